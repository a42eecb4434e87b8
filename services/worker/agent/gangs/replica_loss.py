"""What an agent decides about replicas that may be lost alone: pure functions.

A replica is lost when one of its ranks fails, or stands still while the others wait for it: its ranks are killed, and once all are
dead the controller is told. It says who takes part then (``ReplicasSet``), and has the replica started again.
"""

from collections.abc import Mapping
from dataclasses import replace

from services.contract.messages.facts import ReplicaReady
from services.contract.messages.rank_pipe import RankFailed, RankOrder
from services.contract.words.states import RankPhase
from services.worker.agent.gangs.events import (
    Effect,
    Instruct,
    Kill,
    ReplicaLaunched,
    ReplicasSet,
    Tell,
    TellLost,
)
from services.worker.agent.gangs.state import GangState, RankState
from services.worker.agent.telemetry.hang import STOPPED_ALLOWED_S, allowance_s

Decision = tuple[GangState, tuple[Effect, ...]]


def may_lose(state: GangState) -> bool:
    """Whether the gang goes on without a replica that fails now: all have begun, and none ends it."""
    return state.replica_size is not None and state.epoch > 0 and state.stopped is None


def ready(state: GangState, rank: RankState) -> tuple[Effect, ...]:
    """What is told as a rank has built its model: that its replica is ready, if it was the last one."""
    if state.replica_size is None:
        return ()
    replica = rank.rank // state.replica_size
    if any(each.ready is None for each in state.replica_of(rank.rank).values()):
        return ()
    fact = ReplicaReady(
        job_id=state.job_id,
        fence=state.fence,
        node_id=state.node_id,
        replica=replica,
        life=state.lives[replica],
        store=state.stores[replica],
    )
    return (Tell(fact),)


def failed(state: GangState, rank: RankState) -> Decision:
    """A rank failed: the rest of its replica is killed, and the replica is lost once all are dead."""
    members = state.replica_of(rank.rank)
    targets = tuple(
        number
        for number, each in members.items()
        if not each.ended and not each.killed and each.failed is None
    )
    killed = {number: replace(state.ranks[number], killed=True) for number in targets}
    state = replace(state, ranks={**state.ranks, **killed})
    effects: tuple[Effect, ...] = (Kill(targets),) if targets else ()
    replica = rank.rank // (state.replica_size or 1)
    if replica in state.lost or not all(each.ended for each in members.values()):
        return state, effects
    return replace(state, lost=state.lost | {replica}), (*effects, TellLost(replica))


def stuck(state: GangState, usual_step_s: float | None, now: float) -> Mapping[int, str]:
    """The ranks here for which the members of other replicas wait too long, and what is wrong with each.

    Empty where all members are stuck: then the gang hangs like any other. Ranks that wait for other replicas, or
    for a word of the controller, show RENDEZVOUS, and are not to blame unless their processes are stopped.
    """
    found: dict[int, str] = {}
    size = state.replica_size or 1
    for replica in state.members:
        ranks = {n: r for n, r in state.ranks.items() if n // size == replica}
        found |= _stopped(state, ranks, now) or _still(state, ranks, usual_step_s, now)
    return {} if {rank // size for rank in found} >= set(state.members) else found


def given_up(state: GangState, stuck: Mapping[int, str], now: float) -> Decision:
    """Ranks that stand still are killed, and with them their replicas: dead, none of them writes or returns by itself."""
    size = state.replica_size or 1
    replicas = {rank // size for rank in stuck}
    killed = {
        number: replace(
            rank,
            killed=True,
            failed=_said(stuck[number], state.progress.marks[number].step)
            if number in stuck
            else rank.failed,
            spoke_last_at=now if number in stuck else rank.spoke_last_at,
        )
        for number, rank in state.ranks.items()
        if number // size in replicas and not rank.ended
    }
    return replace(state, ranks={**state.ranks, **killed}), (Kill(tuple(killed)),)


def _stopped(state: GangState, ranks: Mapping[int, RankState], now: float) -> Mapping[int, str]:
    allowed_s = state.hang_timeout_s or STOPPED_ALLOWED_S
    since = {rank: at for rank, at in state.progress.stopped.items() if rank in ranks}
    return {
        rank: f"its process is stopped, for {now - at:.1f} s"
        for rank, at in since.items()
        if now - at > allowed_s
    }


def _still(
    state: GangState, ranks: Mapping[int, RankState], usual_step_s: float | None, now: float
) -> Mapping[int, str]:
    marks = {
        rank: mark
        for rank, mark in state.progress.marks.items()
        if rank in ranks and mark.phase is not RankPhase.RENDEZVOUS
    }
    if not marks:
        return {}
    allowed_s = allowance_s(
        marks,
        stepped=all(rank.step_seen for rank in ranks.values()),
        usual_step_s=usual_step_s,
        asked_s=state.hang_timeout_s,
    )
    still_s = now - max(state.progress.still[rank] for rank in marks)
    if still_s <= allowed_s:
        return {}
    return {
        rank: f"it stood still for {still_s:.1f} s in {mark.phase.name}, and the other replicas waited"
        for rank, mark in marks.items()
    }


def _said(what: str, step: int) -> RankFailed:
    return RankFailed(error=what, traceback="", step=max(step, 0))


def are_set(state: GangState, event: ReplicasSet) -> Decision:
    """The controller says who takes part; ranks here that do not are not told."""
    told = event.replicas
    if state.replica_size is None or told.epoch <= state.epoch:
        return state, ()
    state = replace(state, epoch=told.epoch, members=told.members)
    members = taking_part(state)
    return state, (Instruct(members, RankOrder(replicas=told)),) if members else ()


def taking_part(state: GangState) -> tuple[int, ...]:
    """The live ranks here that are members'."""
    size = state.replica_size or 1
    living = (rank.rank for rank in state.ranks.values() if not rank.ended)
    return tuple(rank for rank in living if rank // size in state.members)


def launched(state: GangState, event: ReplicaLaunched) -> Decision:
    """The ranks of a lost replica live again."""
    ranks = {number: RankState(number, pid) for number, pid in event.pids.items()}
    state = replace(
        state,
        ranks={**state.ranks, **ranks},
        lives={**state.lives, event.replica: event.life},
        stores={**state.stores, event.replica: event.store},
        lost=state.lost - {event.replica},
    )
    if state.stopped is None:
        return state, ()
    return state, (Kill(tuple(ranks)),)


def left_waiting(state: GangState) -> tuple[int, ...]:
    """The live ranks here that wait to take part, although all others have finished.

    They are no members, or became members too late for the others to know.
    """
    if state.replica_size is None or state.epoch == 0:
        return ()
    living = [rank for rank in state.ranks.values() if not rank.ended]
    is_done = any(rank.finished is not None for rank in state.ranks.values())
    waiting = [
        rank
        for rank in living
        if rank.rank // state.replica_size not in state.members
        or (state.lives.get(rank.rank // state.replica_size, 1) > 1 and not rank.step_seen)
    ]
    if not is_done or len(waiting) < len(living):
        return ()
    return tuple(rank.rank for rank in waiting)
