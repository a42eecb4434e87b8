"""Which replicas take part: a loss and a return each make an epoch, and neither makes an attempt."""

import pytest

from services.contract.jobs.plans import GangPlan, RankPlacement
from services.contract.messages.base import Address
from services.contract.messages.commands import (
    CommitCheckpoint,
    LaunchGang,
    ReturnReplica,
    SetReplicas,
    StopGang,
)
from services.contract.messages.facts import (
    EpochBroken,
    GangEnded,
    RankExit,
    ReplicaLost,
    ReplicaReady,
)
from services.contract.words.ids import checkpoint_id
from services.contract.words.states import CheckpointState, ExitReason, JobState
from services.controller.domain.decisions.dispatch import decide
from services.controller.domain.decisions.replicas import LOSSES_WITHIN_MS, MOST_LOSSES
from services.controller.domain.job.attempt import ReplicaBook
from services.controller.domain.job.events import GangPlaced, JobEvent, NodeLost
from services.controller.domain.job.job import Job
from services.controller.domain.plans import default_plan
from tests.controller.histories import (
    NODE,
    NOW,
    STEPS,
    commands,
    launched,
    linked,
    new_job,
    placed,
    play,
    progressed,
    vote,
)

OTHER = "loom-2"


def lasting(shards: int = 1) -> Job:
    return new_job(
        resources={"ranks": 3 * shards},
        mesh={"dp_replicate": 3, "dp_shard": shards},
        faults={"on_replica_loss": "continue", "max_restarts": 0},
    )


def ready(job: Job, replica: int, life: int = 1, node: str = NODE) -> ReplicaReady:
    store = Address(host="127.0.0.1", port=4000 + 10 * replica + life)
    return ReplicaReady(
        job_id=job.id, fence=1, node_id=node, replica=replica, life=life, store=store
    )


def lost(job: Job, replica: int, life: int = 1) -> ReplicaLost:
    gone = RankExit(rank=replica, pid=1, signal=9, order=0, step=5, phase="FORWARD")
    return ReplicaLost(
        job_id=job.id, fence=1, node_id=NODE, replica=replica, life=life, exits=(gone,)
    )


def training(shards: int = 1) -> Job:
    """A job whose three replicas have begun."""
    job = lasting(shards)
    events: list[JobEvent] = [placed(job), launched(job), *(ready(job, n) for n in range(3))]
    return play(job, [*events, progressed(job)]).job


def book(job: Job) -> ReplicaBook:
    found = job.attempts[-1].replicas
    assert found is not None
    return found


def test_replicas_begin_together_once_all_have_built_their_models() -> None:
    job = lasting()
    early = play(job, [placed(job), launched(job), ready(job, 0), ready(job, 2), ready(job, 2)])
    assert [type(each) for each in commands(early)] == [LaunchGang]
    begun = decide(early.job, ready(job, 1), NOW)
    (told,) = commands(begun)
    assert isinstance(told, SetReplicas)
    assert (told.replicas.epoch, told.replicas.members) == (1, (0, 1, 2))


def test_a_lost_replica_is_left_out_started_again_and_taken_back() -> None:
    job = training()
    gone = play(job, [lost(job, 0), lost(job, 0)])
    told, again = commands(gone)
    assert isinstance(told, SetReplicas)
    assert (told.replicas.epoch, told.replicas.members) == (2, (1, 2))
    assert told.replicas.port == 4011, "the lost one's store is gone with it"
    assert isinstance(again, ReturnReplica)
    assert (again.replica, again.life) == (0, 2)
    back = play(gone.job, [ready(job, 0), ready(job, 0, life=2), ready(job, 0, life=2)])
    (told,) = commands(back)
    assert isinstance(told, SetReplicas)
    assert (told.replicas.epoch, told.replicas.members) == (3, (0, 1, 2))
    assert told.replicas.port == 4011, "one that has been there has the store"
    assert (back.job.state, back.job.fence, back.job.restarts) == (JobState.RUNNING, 1, 0)
    assert (book(back.job).lost, book(back.job).returned) == (1, 1)
    assert [note.kind for note in (*gone.notes, *back.notes)] == [
        "replica.lost",
        "replica.returned",
    ]


def test_a_replica_that_is_lost_again_and_again_ends_the_attempt() -> None:
    job = training()
    for life in range(1, MOST_LOSSES):
        job = play(job, [lost(job, 1, life), ready(job, 1, life + 1)]).job
    later = decide(job, lost(job, 1, MOST_LOSSES), NOW + LOSSES_WITHIN_MS)
    assert SetReplicas in {type(each) for each in commands(later)}
    ended = decide(job, lost(job, 1, MOST_LOSSES), NOW)
    (stop,) = commands(ended)
    assert isinstance(stop, StopGang)
    assert stop.mode == "kill"
    assert "3 times" in (book(ended.job).given_up or "")


def test_the_last_replica_and_one_that_has_not_begun_end_the_attempt() -> None:
    job = training()
    alone = play(job, [lost(job, 0), lost(job, 2)]).job
    assert isinstance(commands(decide(alone, lost(job, 1), NOW))[0], StopGang)
    job = lasting()
    starting = play(job, [placed(job), launched(job), ready(job, 0)]).job
    assert isinstance(commands(decide(starting, lost(job, 1), NOW))[0], StopGang)


def test_a_replica_that_is_ready_once_the_attempt_is_given_up_changes_nothing() -> None:
    """Of those that were members none has a store any more: it could be told of none."""
    job = training()
    given_up = play(job, [lost(job, 0), lost(job, 2), lost(job, 1)]).job
    assert book(given_up).given_up is not None
    late = decide(given_up, ready(job, 0, life=2), NOW)
    assert (late.job, commands(late)) == (given_up, [])


def test_the_attempt_ends_well_without_a_replica_that_did_not_return() -> None:
    job = training()
    left = play(job, [lost(job, 1), vote(job, STEPS, 0), linked(job, STEPS)]).job
    ends = {0: {"exit_code": 0, "finished": True}, 1: {"signal": 9}, 2: {"exit_code": 0}}
    exits = tuple(
        RankExit.model_validate(
            {"rank": rank, "pid": 1, "order": 0, "step": STEPS, "phase": "X"}
            | {"finished": rank != 1}
            | end
        )
        for rank, end in ends.items()
    )
    fact = GangEnded(job_id=job.id, fence=1, node_id=NODE, exits=exits, last_step=STEPS)
    done = decide(left, fact, NOW).job
    assert (done.state, done.exit_reason) == (JobState.SUCCEEDED, ExitReason.COMPLETED)


def test_one_replica_writes_a_checkpoint_and_what_a_lost_one_wrote_does_not_count() -> None:
    job = training(shards=2)
    half = play(job, [vote(job, 10, 0), lost(job, 0), vote(job, 10, 2)]).job
    name = checkpoint_id(job.id, 10, 1)
    assert half.checkpoints[name].state is CheckpointState.WRITING
    whole = decide(half, vote(job, 10, 3), NOW)
    assert [each.rank for each in whole.job.checkpoints[name].manifest.shards] == [2, 3]
    (commit,) = commands(whole)
    assert isinstance(commit, CommitCheckpoint)


def test_a_vote_that_comes_after_its_replica_was_lost_does_not_count() -> None:
    job = training(shards=2)
    late = play(job, [vote(job, 10, 0), lost(job, 0), vote(job, 10, 1), vote(job, 10, 2)]).job
    known = late.checkpoints[checkpoint_id(job.id, 10, 1)]
    assert (known.state, set(known.votes)) == (CheckpointState.WRITING, {2})


def broken(job: Job, epoch: int) -> EpochBroken:
    return EpochBroken(job_id=job.id, fence=1, node_id=NODE, epoch=epoch)


def test_connections_that_break_without_a_death_cost_an_epoch_and_no_replica() -> None:
    job = training()
    after = play(job, [broken(job, 1), broken(job, 1)])
    (told,) = commands(after)
    assert isinstance(told, SetReplicas)
    assert (told.replicas.epoch, told.replicas.members) == (2, (0, 1, 2))
    assert [note.kind for note in after.notes] == ["replica.reconnected"]
    assert book(after.job).lost == 0
    # What was told while the loss was on its way says nothing new.
    gone = play(job, [lost(job, 0), broken(job, 1)])
    assert [note.kind for note in gone.notes] == ["replica.lost"]


def test_connections_that_break_again_and_again_end_the_attempt() -> None:
    job = training()
    for epoch in range(1, MOST_LOSSES):
        job = decide(job, broken(job, epoch), NOW).job
    later = decide(job, broken(job, MOST_LOSSES), NOW + LOSSES_WITHIN_MS)
    assert [type(each) for each in commands(later)] == [SetReplicas]
    ended = decide(job, broken(job, MOST_LOSSES), NOW)
    assert [type(each) for each in commands(ended)] == [StopGang]
    assert "3 times" in (book(ended.job).given_up or "")


@pytest.mark.parametrize(("node", "goes_on"), [(OTHER, True), (NODE, False)])
def test_a_lost_node_takes_its_replicas_along(node: str, *, goes_on: bool) -> None:
    job = lasting()
    seats = tuple(
        RankPlacement(
            rank=rank, node_id=OTHER if rank == 2 else NODE, local_rank=rank % 2, device="cpu"
        )
        for rank in range(3)
    )
    plan = GangPlan(device_type="cpu", sharding=default_plan.shard(job.spec), ranks=seats)
    on_two = GangPlaced(plan, {NODE: "life-1", OTHER: "life-1"})
    begun = play(job, [on_two, *(ready(job, n) for n in range(3)), progressed(job)]).job
    after = decide(begun, NodeLost(node, "its lease ended"), NOW)
    sent = [(send.node_id, type(send.command)) for send in after.sends]
    assert (node, StopGang) in sent
    assert ((NODE, SetReplicas) in sent) is goes_on
    assert (after.job.attempts[-1].lost is None) is goes_on
    if goes_on:
        assert (OTHER, ReturnReplica) not in sent
        assert book(after.job).members == (0, 1)


def test_a_node_whose_first_replica_ends_the_attempt_is_lost_with_all_of_them() -> None:
    """Of those that are left one may have no store: were the next epoch begun, the loss would never be heeded."""
    job = new_job(
        resources={"ranks": 4},
        mesh={"dp_replicate": 4},
        faults={"on_replica_loss": "continue", "max_restarts": 0},
    )
    seats = tuple(
        RankPlacement(
            rank=rank, node_id=OTHER if rank in {1, 2} else NODE, local_rank=rank % 2, device="cpu"
        )
        for rank in range(4)
    )
    plan = GangPlan(device_type="cpu", sharding=default_plan.shard(job.spec), ranks=seats)
    on_two = GangPlaced(plan, {NODE: "life-1", OTHER: "life-1"})
    job = play(job, [on_two, *(ready(job, n) for n in range(4)), progressed(job)]).job
    for life in range(1, MOST_LOSSES):
        gone = lost(job, 1, life).model_copy(update={"node_id": OTHER})
        job = play(job, [gone, ready(job, 1, life + 1, OTHER)]).job
    job = play(job, [lost(job, 0)]).job
    after = decide(job, NodeLost(OTHER, "its lease ended"), NOW).job
    assert "3 times" in (book(after).given_up or "")
    assert after.attempts[-1].lost_nodes == (OTHER,)
