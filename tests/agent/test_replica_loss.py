"""What an agent decides about a replica that is lost alone, without any process."""

import signal
from collections import defaultdict
from dataclasses import replace

import pytest

from fsdp_core.plan.model import MeshPlan, ShardingPlan
from services.contract.jobs.plans import GangPlan, RankPlacement
from services.contract.messages.base import Address
from services.contract.messages.facts import EpochBroken, ReplicaReady
from services.contract.messages.rank_pipe import (
    RankCheckpointWaits,
    RankEpochBroken,
    RankOrder,
    RankReady,
    ReplicaSet,
)
from services.contract.words.ids import checkpoint_id
from services.contract.words.states import RankPhase
from services.worker.agent.gangs.events import (
    CheckpointAsked,
    Condemned,
    Effect,
    Event,
    Exited,
    Instruct,
    Kill,
    LookedAt,
    LookInto,
    MessageCame,
    Misbehaved,
    ReplicaLaunched,
    ReplicasSet,
    Tell,
    TellLost,
    Ticked,
)
from services.worker.agent.gangs.exit_order import exits
from services.worker.agent.gangs.state import GangState
from services.worker.agent.ranks.launch import LaunchError, refuse_spread
from services.worker.agent.telemetry.gang_telemetry import LastPhase
from services.worker.agent.telemetry.hang import SLOW_PHASE_S, Mark
from tests.agent.conftest import JOB
from tests.agent.test_gang import after, failed, finished, gang

KILLED = int(signal.SIGKILL)
STORES = {replica: Address(host="127.0.0.1", port=4000 + replica) for replica in range(2)}
READY = RankReady(units=(), groups=(), parameters=1, data_digest="")


def members(epoch: int, *replicas: int) -> ReplicasSet:
    return ReplicasSet(ReplicaSet(epoch=epoch, members=replicas, host="127.0.0.1", port=4001))


def pair() -> GangState:
    """Two replicas of two ranks, which have not begun."""
    return replace(gang(4), replica_size=2, lives={0: 1, 1: 1}, stores=STORES)


def begun() -> GangState:
    return after(pair(), members(1, 0, 1))[0]


def test_a_replica_is_ready_once_all_of_its_ranks_are_and_is_told_once() -> None:
    _, effects = after(pair(), *(MessageCame(rank, READY) for rank in (0, 3, 1, 1)))
    told = [each.fact for each in effects if isinstance(each, Tell)]
    assert [fact.replica for fact in told if isinstance(fact, ReplicaReady)] == [0]


def test_a_dead_rank_takes_its_replica_along_and_no_other_one() -> None:
    state, effects = after(begun(), Exited(2, None, KILLED))
    assert effects == [Kill((3,))]
    state, effects = after(state, Exited(3, None, KILLED), (100.0, Ticked()))
    assert effects == [TellLost(1)]
    assert not state.ended


def test_a_rank_that_misbehaves_is_charged_and_takes_its_replica_along_and_no_other_one() -> None:
    state, effects = after(begun(), Misbehaved(2, "wrote phase 99 to its board"))
    assert effects == [Kill((2, 3))]
    state, effects = after(state, Exited(2, None, KILLED), Exited(3, None, KILLED))
    assert effects == [TellLost(1)]
    first, *_ = exits(
        replace(state, ranks=state.replica_of(2)), defaultdict(lambda: LastPhase(3, "FORWARD"))
    )
    assert (first.rank, first.error) == (2, "rank 2 wrote phase 99 to its board")


def test_before_all_have_begun_the_gang_ends_with_any_rank() -> None:
    _, effects = after(pair(), Exited(2, None, KILLED))
    assert effects == [Kill((0, 1, 3))]


def test_sets_reach_the_live_ranks_of_members_and_an_older_one_reaches_none() -> None:
    state, _ = after(begun(), Exited(2, None, KILLED), Exited(3, None, KILLED))
    state, effects = after(state, members(3, 0), members(2, 0, 1))
    assert effects == [Instruct((0, 1), RankOrder(replicas=members(3, 0).replicas))]


def test_a_replica_that_was_launched_again_is_told_of_and_can_be_lost_again() -> None:
    state, _ = after(begun(), failed(2), Exited(2, 1, None), Exited(3, None, KILLED))
    launched = ReplicaLaunched(1, 2, {2: 202, 3: 203}, STORES[1])
    state, effects = after(
        state, launched, MessageCame(2, READY), MessageCame(3, READY), CheckpointAsked()
    )
    (told,) = (each.fact for each in effects if isinstance(each, Tell))
    assert isinstance(told, ReplicaReady)
    assert (told.replica, told.life) == (1, 2)
    assert effects[-1] == Instruct((0,), RankOrder(checkpoint=True))
    _, effects = after(state, Exited(3, None, KILLED), Exited(2, None, KILLED))
    assert effects == [Kill((2,)), TellLost(1)]


def test_one_that_is_launched_too_late_is_killed() -> None:
    state, _ = after(begun(), Exited(2, None, KILLED), Exited(3, None, KILLED))
    condemned, _ = after(state, Condemned("a newer attempt of the job is open"))
    launched = ReplicaLaunched(1, 2, {2: 202, 3: 203}, STORES[1])
    assert after(condemned, launched)[1] == [Kill((2, 3))]


def test_a_gang_ends_when_its_members_have_finished_and_nothing_waits_to_take_part() -> None:
    state, _ = after(begun(), Exited(2, None, KILLED), Exited(3, None, KILLED), members(2, 0))
    state, _ = after(state, ReplicaLaunched(1, 2, {2: 202, 3: 203}, STORES[1]))
    ends = (finished(0), finished(1), Exited(0, 0, None), Exited(1, 0, None))
    state, effects = after(state, *ends, Ticked())
    assert effects == [Kill((2, 3))]
    state, _ = after(state, Exited(2, None, KILLED), Exited(3, None, KILLED))
    assert state.ended


def still(
    state: GangState, phases: dict[int, RankPhase], seconds: int, stopped: frozenset[int]
) -> tuple[GangState, list[Effect]]:
    """Looks ten times a second at ranks in these phases, of which none moves."""
    marks = {rank: Mark(7, phase, (), ()) for rank, phase in phases.items()}
    looks = [(n / 10, LookedAt(marks, 0.1, stopped)) for n in range(10 * seconds)]
    return after(state, *looks)


WAITS, COMPUTES = RankPhase.RENDEZVOUS, RankPhase.FORWARD


def stepped() -> GangState:
    state = begun()
    ranks = {number: replace(rank, step_seen=True) for number, rank in state.ranks.items()}
    return replace(state, ranks=ranks)


@pytest.mark.parametrize(
    ("phases", "stopped", "seconds", "why"),
    [
        ((WAITS, WAITS, COMPUTES, WAITS), frozenset(), 6, "it stood still for 5."),
        ((WAITS, WAITS, WAITS, WAITS), frozenset({2}), 62, "its process is stopped, for 60."),
    ],
)
def test_a_rank_that_stands_still_while_the_others_wait_is_killed_with_its_replica(
    phases: tuple[RankPhase, ...], stopped: frozenset[int], seconds: int, why: str
) -> None:
    state, effects = still(stepped(), dict(enumerate(phases)), seconds, stopped)
    assert effects == [Kill((2, 3))]
    said = state.ranks[2].failed
    assert said is not None
    assert said.error.startswith(why)
    assert state.ranks[3].failed is None
    # Nothing of it is reported lost before both are dead: until then it might still write.
    state, effects = after(state, (100.0, Ticked()), Exited(2, None, KILLED))
    assert effects == []
    assert after(state, Exited(3, None, KILLED))[1] == [TellLost(1)]


def test_a_replica_that_waits_for_room_on_the_disk_does_not_stand_still() -> None:
    writes = RankPhase.CHECKPOINT
    marks = {rank: Mark(7, writes if rank < 2 else WAITS, (), ()) for rank in range(4)}
    waits = RankCheckpointWaits(
        checkpoint_id=checkpoint_id(JOB, 7, 1), step=7, condition="the disk is full"
    )
    looks = [(n / 10, LookedAt(marks, 0.1)) for n in range(round(12 * SLOW_PHASE_S))]
    spoken = [(n * 10.0, MessageCame(0, waits)) for n in range(round(SLOW_PHASE_S / 8))]
    events: list[tuple[float, Event]] = [*looks, *spoken]
    _, effects = after(stepped(), *sorted(events, key=lambda each: each[0]))
    assert {type(each) for each in effects} == {Tell}


def test_replicas_of_which_all_stand_still_hang_like_any_gang() -> None:
    computing = dict.fromkeys(range(4), COMPUTES)
    _, effects = still(stepped(), computing, 6, frozenset())
    assert [type(each) for each in effects] == [LookInto]


def test_replicas_that_wait_for_others_elsewhere_are_not_to_blame() -> None:
    """Another node has the third one, which stands still."""
    state, _ = after(stepped(), members(2, 0, 1, 2))
    waiting = dict.fromkeys(range(4), WAITS)
    assert still(state, waiting, int(SLOW_PHASE_S) - 1, frozenset())[1] == []
    _, effects = still(state, dict.fromkeys(range(4), COMPUTES), 6, frozenset())
    assert effects == [Kill((0, 1, 2, 3))]


def test_a_replica_on_two_nodes_is_refused_with_what_to_change() -> None:
    sharding = ShardingPlan(MeshPlan(dp_replicate=2, dp_shard=2))
    seats = tuple(
        RankPlacement(rank=rank, node_id=node, local_rank=0, device="cpu")
        for rank, node in enumerate(("a", "a", "b", "c"))
    )
    with pytest.raises(LaunchError) as refused:
        refuse_spread(GangPlan(device_type="cpu", sharding=sharding, ranks=seats))
    assert "replica 1 has ranks on b, c" in str(refused.value)
    assert "lower mesh.dp_shard x mesh.tp" in str(refused.value)


def test_ranks_report_connections_that_broke_without_a_death() -> None:
    _, effects = after(begun(), MessageCame(1, RankEpochBroken(epoch=1)))
    (told,) = (each.fact for each in effects if isinstance(each, Tell))
    assert isinstance(told, EpochBroken)
    assert told.epoch == 1
