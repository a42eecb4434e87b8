"""What an agent decides about a replica that is lost alone, without any process."""

import signal
from dataclasses import replace

from services.contract.messages.base import Address
from services.contract.messages.facts import ReplicaReady
from services.contract.messages.rank_pipe import RankOrder, RankReady, ReplicaSet
from services.worker.agent.gangs.events import (
    CheckpointAsked,
    Condemned,
    Exited,
    Instruct,
    Kill,
    MessageCame,
    ReplicaLaunched,
    ReplicasSet,
    Tell,
    TellLost,
    Ticked,
)
from services.worker.agent.gangs.state import GangState
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
