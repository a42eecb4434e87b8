"""The decisions about a gang, and who is to blame when it ends, without any process."""

import signal
from dataclasses import replace

import pytest

from services.contract.messages.commands import StopGang
from services.contract.messages.facts import (
    CheckpointCorrupt,
    CheckpointLost,
    CheckpointVoted,
    ExitStanding,
    GangEnded,
    RankExit,
)
from services.contract.messages.findings import Findings
from services.contract.messages.rank_pipe import (
    RankCheckpointBegan,
    RankCheckpointFailed,
    RankCheckpointWaits,
    RankFailed,
    RankFinished,
    RankFoundCorrupt,
    RankMessage,
    RankOrder,
    RankReady,
    RankVote,
)
from services.contract.redis import redis_keys
from services.contract.storage.manifests import ShardFile
from services.contract.words.ids import checkpoint_id, new_job_id
from services.contract.words.states import RankPhase
from services.worker.agent.gangs.decisions import (
    ECHO_WAITS_S,
    FAILED_LEAVES_WITHIN_S,
    LOOKED_INTO_WITHIN_S,
    WEDGED_AFTER_S,
    decide,
)
from services.worker.agent.gangs.events import (
    CheckpointAsked,
    CheckVote,
    Condemned,
    Effect,
    Event,
    Exited,
    Instruct,
    Kill,
    LookedAt,
    LookedInto,
    LookInto,
    MessageCame,
    Misbehaved,
    StopAsked,
    Tell,
    Ticked,
    VoteChecked,
)
from services.worker.agent.gangs.exit_order import exits
from services.worker.agent.gangs.state import GangState, RankState
from services.worker.agent.telemetry.gang_telemetry import LastPhase
from services.worker.agent.telemetry.hang import LOOKS_EVERY_S, SLOW_PHASE_S, Mark
from tests.agent.conftest import JOB, NODE

KILLED = int(signal.SIGKILL)


def gang(ranks: int = 3) -> GangState:
    return GangState(
        job_id=JOB,
        fence=1,
        node_id=NODE,
        ranks={rank: RankState(rank=rank, pid=100 + rank) for rank in range(ranks)},
    )


def after(state: GangState, *events: Event | tuple[float, Event]) -> tuple[GangState, list[Effect]]:
    """The state and all effects after events, each at time 0 or at the time beside it."""
    effects: list[Effect] = []
    for entry in events:
        now, event = entry if isinstance(entry, tuple) else (0.0, entry)
        state, decided = decide(state, event, now)
        effects += decided
    return state, effects


def failed(rank: int, error: str = "ValueError: no") -> MessageCame:
    return MessageCame(rank, RankFailed(error=error, traceback="Traceback", step=1))


def finished(rank: int) -> MessageCame:
    return MessageCame(rank, RankFinished(step=9, drained=False))


def verdict(state: GangState) -> list[RankExit]:
    return list(exits(state, dict.fromkeys(state.ranks, LastPhase(step=1, phase="FORWARD"))))


def lost_peer(rank: int) -> MessageCame:
    return failed(rank, "RuntimeError: Connection closed by peer [127.0.0.1]:1")


def test_the_others_are_killed_when_a_rank_reports_an_error_and_it_leaves_by_itself() -> None:
    _, effects = after(gang(), failed(1))
    assert effects == [Kill((0, 2))]


def test_ranks_that_another_nodes_wait_for_are_looked_into_before_they_are_killed() -> None:
    asked = StopAsked(StopGang(job_id=JOB, fence=1, mode="kill", look=True))
    state, effects = after(gang(2), asked)
    (look,) = effects
    assert isinstance(look, LookInto)
    assert after(state, asked)[1] == []  # it was sent again
    findings = Findings(why="hang", still_s=6.0, allowed_s=5.0, ranks=())
    state, effects = after(state, LookedInto(findings))
    assert effects == [Kill((0, 1))]
    assert state.hang == findings
    # What has failed tells by itself, and there is nothing to see of what is dead.
    assert after(gang(2), failed(0), asked)[1] == [Kill((1,)), Kill((0,))]


def test_ranks_whose_look_takes_too_long_are_killed_all_the_same() -> None:
    asked = StopAsked(StopGang(job_id=JOB, fence=1, mode="kill", look=True))
    _, effects = after(gang(2), asked, (LOOKED_INTO_WITHIN_S, Ticked()))
    assert effects[1:] == [Kill((0, 1))]


def test_a_rank_that_reported_an_error_and_stays_is_killed_too() -> None:
    _, effects = after(gang(), failed(1), (FAILED_LEAVES_WITHIN_S, Ticked()))
    assert effects == [Kill((0, 2)), Kill((1,))]


def test_the_others_are_killed_when_a_rank_exits_before_it_finished() -> None:
    _, effects = after(gang(), Exited(1, 0, None))
    assert effects == [Kill((0, 2))]


def test_no_rank_is_killed_when_one_exits_after_it_finished() -> None:
    _, effects = after(gang(), finished(1), Exited(1, None, int(signal.SIGABRT)))
    assert effects == []


def test_a_rank_that_wedges_after_it_finished_is_killed() -> None:
    state, effects = after(gang(), finished(1), (WEDGED_AFTER_S, Ticked()))
    assert effects == [Kill((1,))]
    assert after(state, (WEDGED_AFTER_S + 1, Ticked()))[1] == []


def test_a_rank_that_says_its_last_word_again_and_again_gains_no_time_to_leave() -> None:
    said = [
        (float(now), one)
        for now in range(int(WEDGED_AFTER_S))
        for one in (finished(1), MessageCame(2, RankFailed(error="e", traceback="t", step=1)))
    ]
    state, _ = after(gang(), *said)
    _, effects = after(state, (WEDGED_AFTER_S, Ticked()))
    assert effects == [Kill((2,))]  # those that had not failed were killed when it did
    one, _ = after(gang(), *[(now, word) for now, word in said if word.rank == 1])
    assert after(one, (WEDGED_AFTER_S, Ticked()))[1] == [Kill((1,))]


def test_a_rank_that_waits_for_room_neither_hangs_nor_lets_those_wedge_that_wait_for_it() -> None:
    said = RankCheckpointWaits(checkpoint_id=checkpoint_id(JOB, 9, 1), step=9, condition="full")
    looked = LookedAt({1: Mark(9, RankPhase.CHECKPOINT, (), ())})
    looks = [LOOKS_EVERY_S * number for number in range(int(2 * SLOW_PHASE_S / LOOKS_EVERY_S))]
    state, _ = after(gang(2), finished(0))
    for now in looks:
        spoken = [(now, MessageCame(1, said))] if now % 10 == 0 else []
        state, effects = after(state, *spoken, (now, looked), (now, Ticked()))
        assert [type(effect) for effect in effects] == [Tell] * len(spoken)
    silent = looks[-1] + WEDGED_AFTER_S
    assert after(state, (silent, Ticked()))[1] == [Kill((0,))]


def test_an_echo_leaves_the_one_to_blame_a_moment_to_speak() -> None:
    state, effects = after(gang(), lost_peer(0), Exited(0, 1, None))
    assert effects == []
    assert after(state, (ECHO_WAITS_S, Ticked()))[1] == [Kill((1, 2))]
    state, effects = after(state, failed(2))
    assert effects == [Kill((1,))]
    state, _ = after(state, Exited(1, None, KILLED), Exited(2, 1, None))
    assert [e.rank for e in verdict(state)] == [2, 0, 1]


# As fsdp_core words them; tests/engine/test_shared_memory.py has them raised.
ENDED = "Rank 1 of group '0' ended while rank 0 waited for it in the all-gather of 'head.weight'."
LOST = "Rank 1 of group '0' ended, or did not answer in 30 s, while rank 0 shared memory with it."
SILENT = "Rank 1 of group '0' has not taken part in the reduce-scatter of 'head.weight' for 1800 s."
OTHER_UNITS = "Rank 0 of group '0' shares 4096 bytes, but rank 1 shares 8192. Shard the same units."


@pytest.mark.parametrize(
    ("error", "standing"),
    [
        ("RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer", "ECHO"),
        ("RuntimeError: [gloo/buffer.cc:81] Timed out waiting 1000ms for recv", "ECHO"),
        ("torch.distributed.DistStoreError: wait timeout after 30000ms", "ECHO"),
        ("torch.distributed.DistBackendError: NCCL communicator was aborted", "ECHO"),
        (f"PeerError: {ENDED}", "ECHO"),
        (f"PeerError: {LOST}", "ECHO"),
        (f"PeerError: {SILENT}", "ECHO"),
        (f"PeerError: {OTHER_UNITS}", "OWN_FAILURE"),
        ("TimeoutError: the feature server timed out", "OWN_FAILURE"),
        ("ValueError: the model has a fault", "OWN_FAILURE"),
    ],
)
def test_an_error_stands_by_what_it_says(error: str, standing: str) -> None:
    state, _ = after(gang(1), failed(0, error), Exited(0, 1, None))
    (only,) = verdict(state)
    assert only.standing is ExitStanding[standing]


def test_a_rank_that_died_before_our_signal_is_no_victim() -> None:
    events = failed(0), Exited(0, 1, None), Exited(2, None, KILLED)
    state, _ = after(gang(), *events, Exited(1, None, KILLED, by_itself=True))
    assert [e.rank for e in verdict(state)] == [0, 1, 2]
    state, _ = after(
        gang(), lost_peer(0), Exited(0, 1, None), (ECHO_WAITS_S, Ticked()),
        Exited(2, None, KILLED), Exited(1, None, KILLED, by_itself=True),
    )  # fmt: skip
    assert [(e.rank, e.error) for e in verdict(state)] == [
        (1, "ended by SIGKILL"),
        (0, "RuntimeError: Connection closed by peer [127.0.0.1]:1"),
        (2, "killed: another rank of the gang failed"),
    ]


def test_an_abort_alone_is_still_the_first_failure() -> None:
    state, effects = after(gang(2), Exited(1, None, int(signal.SIGABRT)), (1.0, Ticked()))
    assert effects == [Kill((0,))]
    state, _ = after(state, Exited(0, None, KILLED))
    assert [(e.rank, e.order) for e in verdict(state)] == [(1, 0), (0, 1)]


def test_finished_ranks_come_last_and_keep_their_word() -> None:
    state, _ = after(gang(2), finished(0), Exited(0, 0, None), failed(1), Exited(1, 1, None))
    first, second = verdict(state)
    assert (first.rank, first.finished, first.traceback) == (1, False, "Traceback")
    assert (second.rank, second.finished, second.error) == (0, True, None)


@pytest.mark.parametrize(("checkpoint", "asked"), [("none", False), ("required", True)])
def test_a_drain_orders_a_stop_and_kills_after_its_grace(checkpoint: str, asked: bool) -> None:  # noqa: FBT001 a parameter of the test
    stop = StopGang.model_validate(
        {"job_id": JOB, "fence": 1, "mode": "drain", "checkpoint": checkpoint, "grace_s": 5}
    )
    state, effects = after(gang(2), StopAsked(stop), StopAsked(stop), (4.9, Ticked()))
    assert effects == [Instruct((0, 1), RankOrder(checkpoint=asked, stop=True))]
    assert after(state, (5.0, Ticked()))[1] == [Kill((0, 1))]


def test_a_checkpoint_is_asked_of_one_living_rank_which_the_others_follow() -> None:
    order = RankOrder(checkpoint=True, stop=False)
    state, effects = after(gang(), CheckpointAsked())
    assert effects == [Instruct((0,), order)]
    _, effects = after(state, finished(0), Exited(0, 0, None), CheckpointAsked())
    assert effects == [Instruct((1,), order)]


def test_a_second_drain_may_shorten_the_grace_but_not_lengthen_it() -> None:
    long = StopAsked(StopGang(job_id=JOB, fence=1, mode="drain", grace_s=100))
    short = StopAsked(StopGang(job_id=JOB, fence=1, mode="drain", grace_s=1))
    state, _ = after(gang(1), long, short, long)
    assert after(state, (1.0, Ticked()))[1] == [Kill((0,))]


def test_a_condemned_gang_is_killed_once() -> None:
    _, effects = after(gang(2), Condemned("fenced"), Condemned("fenced"))
    assert effects == [Kill((0, 1))]


def vote(rank: int, *, of: int | None = None, job: str = JOB, fence: int = 1) -> RankVote:
    shard = ShardFile(rank=rank if of is None else of, name="r", bytes=1, sha256="0" * 64)
    return RankVote(checkpoint_id=checkpoint_id(job, 5, fence), step=5, shard=shard)


def test_a_rank_that_misbehaves_is_killed_with_its_gang_and_named_whatever_it_said_before() -> None:
    state, effects = after(gang(), finished(1), Misbehaved(1, "wrote nonsense"))
    assert effects == [Kill((0, 1, 2))]
    state, _ = after(state, *(Exited(rank, None, KILLED) for rank in range(3)))
    first, *others = verdict(state)
    assert (first.rank, first.error, first.finished) == (1, "rank 1 wrote nonsense", False)
    assert (first.standing, first.traceback) == (ExitStanding.OWN_FAILURE, "")
    assert {e.standing for e in others} == {ExitStanding.VICTIM}


def test_what_a_rank_says_after_it_misbehaved_counts_for_nothing() -> None:
    said = [MessageCame(1, RankFinished(step=5, drained=False)), MessageCame(1, vote(1))]
    state, effects = after(gang(2), Misbehaved(1, "wrote nonsense"), *said)
    assert effects == [Kill((0, 1))]
    state, _ = after(state, Exited(1, None, KILLED), Exited(0, None, KILLED))
    assert [(e.rank, e.finished) for e in verdict(state)] == [(1, False), (0, False)]


def test_what_a_rank_leaves_behind_does_not_change_how_it_ended() -> None:
    state, _ = after(gang(1), finished(0), Exited(0, 0, None))
    assert after(state, Misbehaved(0, "wrote nonsense")) == (state, [])


OTHER_JOB = new_job_id(1, b"\x01" * 10)
OTHERS = checkpoint_id(OTHER_JOB, 5, 1)
LOADED = checkpoint_id(OTHER_JOB, 9, 4)


@pytest.mark.parametrize(
    "message",
    [
        RankFoundCorrupt(checkpoint_id=OTHERS, file="f", reason="r"),
        RankFoundCorrupt(checkpoint_id=checkpoint_id(JOB, 5, 1), file="f", reason="r"),
        RankCheckpointFailed(checkpoint_id=OTHERS, reason="r"),
        RankCheckpointFailed(checkpoint_id=checkpoint_id(JOB, 5, 2), reason="r"),
        RankCheckpointBegan(checkpoint_id=OTHERS, step=5),
        RankCheckpointBegan(checkpoint_id=checkpoint_id(JOB, 5, 1), step=6),
        vote(1, job=OTHER_JOB),
        vote(1, fence=2),
        vote(1, of=0),
    ],
)
def test_a_rank_speaks_of_its_own_attempts_checkpoints_and_shard_alone(
    message: RankMessage,
) -> None:
    state = replace(gang(), resume_from=LOADED)
    state, effects = after(state, MessageCame(1, message))
    assert effects == [Kill((0, 1, 2))]
    assert state.ranks[1].misbehaved


def test_a_rank_may_find_corrupt_what_its_attempt_was_to_load_whichever_job_it_is_of() -> None:
    found = RankFoundCorrupt(checkpoint_id=LOADED, file="f", reason="r")
    _, effects = after(replace(gang(), resume_from=LOADED), MessageCame(1, found))
    (told,) = effects
    assert isinstance(told, Tell)
    assert isinstance(told.fact, CheckpointCorrupt)
    assert told.fact.checkpoint_id == LOADED


def test_a_vote_is_told_once_its_shard_was_read_and_a_wrong_one_costs_the_checkpoint() -> None:
    state, effects = after(gang(), MessageCame(1, vote(1)))
    assert effects == [CheckVote(1, vote(1))]
    _, (told,) = after(state, VoteChecked(1, vote(1), None))
    assert isinstance(told, Tell)
    assert isinstance(told.fact, CheckpointVoted)
    _, (told,) = after(state, VoteChecked(1, vote(1), "the file is missing"))
    assert isinstance(told, Tell)
    assert isinstance(told.fact, CheckpointLost)
    assert told.fact.reason == "shard r of rank 1: the file is missing"


def test_a_vote_cannot_be_taken_back() -> None:
    """Its commit may be under way, and its place among those would be given to the next one."""
    failed = RankCheckpointFailed(checkpoint_id=vote(1).checkpoint_id, reason="r")
    again, other = MessageCame(1, vote(1)), MessageCame(0, failed)
    state, effects = after(gang(), again, again, MessageCame(1, failed))
    assert effects == [CheckVote(1, vote(1))]
    _, (told,) = after(state, other)
    assert isinstance(told, Tell), "another rank has not voted"
    name = checkpoint_id(JOB, vote(1).step + 1, 1)
    later = RankCheckpointFailed(checkpoint_id=name, reason="r")
    _, (told,) = after(state, MessageCame(1, later))
    assert isinstance(told, Tell), "no vote was for it"


def test_a_checkpoint_that_several_ranks_begin_is_told_once() -> None:
    def began(rank: int, step: int) -> MessageCame:
        name = checkpoint_id(JOB, step, 1)
        return MessageCame(rank, RankCheckpointBegan(checkpoint_id=name, step=step))

    _, effects = after(gang(), began(0, 5), began(0, 6), began(1, 5), began(1, 6), began(1, 7))
    told = [effect.fact for effect in effects if isinstance(effect, Tell)]
    assert [getattr(fact, "step", None) for fact in told] == [5, 6, 7]


def test_what_a_script_says_late_of_itself_is_told() -> None:
    def ready(*notices: str) -> MessageCame:
        said = RankReady(units=(), groups=(), parameters=0, data_digest="", notices=notices)
        return MessageCame(0, said)

    _, effects = after(replace(gang(1), is_script=True), ready(), ready("it starts over"))
    told = [effect.fact for effect in effects if isinstance(effect, Tell)]
    assert [getattr(fact, "notices", None) for fact in told] == [(), ("it starts over",)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("word", ["store", "PeerError: Rank 1 of group "])
def test_an_error_that_repeats_a_word_is_judged_in_no_time(word: str) -> None:
    said = RankFailed(error="", traceback="", step=1)
    rank = RankState(0, 1, failed=said.model_copy(update={"error": word * 50_000}))
    assert not rank.echoes
    lost = f"of {word * 2}\n{word * 9}it has not taken part, or timed out"
    assert replace(rank, failed=said.model_copy(update={"error": lost})).echoes


@pytest.mark.parametrize("letter", ["\x01", "😀"])
def test_whatever_ranks_say_as_they_fail_their_end_is_a_fact_that_is_taken(letter: str) -> None:
    words = {
        "error": letter * 9_999,
        "error_types": [letter * 999] * 32,
        "traceback": letter * 99_999,
    }
    said = RankFailed.model_validate({**words, "step": 1})
    ranks = {n: RankState(n, n + 1, failed=said, exit_code=1, arrived=n) for n in range(128)}
    state = replace(gang(), ranks=ranks)
    told = exits(state, dict.fromkeys(ranks, LastPhase(step=1, phase="FORWARD")))
    end = GangEnded(job_id=JOB, fence=1, node_id=NODE, exits=told, last_step=1)
    assert len(end.model_dump_json().encode()) < redis_keys.LONGEST_FACT // 2
    assert [each.rank for each in told] == list(ranks)
    assert told[0].traceback == said.traceback
    assert told[-1].traceback is None
    assert (told[-1].error or "").startswith(letter)
