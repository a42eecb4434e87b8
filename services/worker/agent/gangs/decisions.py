"""What an agent decides about one gang on its node: a pure function of state and event.

When any rank fails, by an error that it reports or by its exit, the others are killed: they
would wait for it in a collective (where replicas may be lost, those of its replica: ``replica_loss``). At once, unless it only echoes the loss of a peer: then the
peer gets a moment to say what happened. A gang that hangs (``hang``) is looked into, and killed
once what was found is known. Performing the effects is ``runtime``'s; what a rank may say
is judged in ``rank_reports``, who failed first is worked out in ``exit_order``.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from services.contract.messages.commands import RecordTrace, StopGang
from services.contract.messages.facts import GangDiagnosed, GangProgressed
from services.contract.messages.findings import Findings
from services.contract.messages.rank_pipe import (
    RankCheckpointBegan,
    RankCheckpointFailed,
    RankCheckpointWaits,
    RankFailed,
    RankFinished,
    RankMessage,
    RankMetrics,
    RankOrder,
    RankReady,
    RankTraced,
    RankTraceFailed,
    RankVote,
    TraceOrder,
)
from services.contract.words.ids import step_and_fence
from services.worker.agent.gangs import replica_loss
from services.worker.agent.gangs.events import (
    CheckpointAsked,
    CheckVote,
    Condemned,
    DiagnosisAsked,
    DropTrace,
    Effect,
    Event,
    Exited,
    Instruct,
    Kill,
    LaunchAsked,
    LookedAt,
    LookedInto,
    LookInto,
    MessageCame,
    Misbehaved,
    ReplicaLaunched,
    ReplicasSet,
    Stepped,
    StopAsked,
    Tell,
    Ticked,
    TraceAsked,
    VoteChecked,
    VoteWaits,
)
from services.worker.agent.gangs.rank_reports import (
    fact_of,
    no_trace,
    not_its_own,
    trace_ordered,
    vote_fact,
    waits_fact,
)
from services.worker.agent.gangs.state import GangState, RankState
from services.worker.agent.telemetry.hang import (
    Stall,
    allowance_s,
    look,
    look_at_stopped,
)

WEDGED_AFTER_S: Final = 20.0
FAILED_LEAVES_WITHIN_S: Final = 5.0
ECHO_WAITS_S: Final = 1.0
LOOKED_INTO_WITHIN_S: Final = 5.0

Decision = tuple[GangState, tuple[Effect, ...]]


def decide(state: GangState, event: Event, now: float) -> Decision:
    """The next state and what is to be done. ``now`` is the monotonic clock in seconds."""
    match event:
        case MessageCame() | Misbehaved() | VoteChecked() | VoteWaits():
            decided = _said(state, state.ranks[event.rank], event, now)
        case Exited():
            decided = _exited(state, state.ranks[event.rank], event, now)
        case Stepped(rank=rank, step=step):
            decided = _stepped(state, state.ranks[rank], step)
        case LookedAt():
            decided = _looked_at(state, event, now)
        case LookedInto(findings=findings):
            decided = _looked_into(state, findings)
        case Ticked():
            decided = _ticked(state, now)
        case ReplicasSet():
            decided = replica_loss.are_set(state, event)
        case ReplicaLaunched():
            decided = replica_loss.launched(state, event)
        case _:
            decided = _asked(state, event, now)
    return decided


def _asked(
    state: GangState,
    event: StopAsked | CheckpointAsked | TraceAsked | LaunchAsked | Condemned | DiagnosisAsked,
    now: float,
) -> Decision:
    match event:
        case StopAsked(command=command):
            decided = _stop(state, command, now)
        case CheckpointAsked():
            order = RankOrder(checkpoint=True, stop=False)
            # One is enough: the ranks agree on the step. Several would hear it at different steps,
            # and agree on a checkpoint at each.
            asked = replica_loss.taking_part(state) or _living(state)
            decided = state, (Instruct(asked[:1], order),)
        case TraceAsked(command=command):
            decided = _trace(state, command)
        case LaunchAsked():
            decided = _ready(state)
        case Condemned(reason=reason):
            decided = _kill_all(replace(state, stopped=state.stopped or reason))
        case _:  # DiagnosisAsked
            decided = state, (LookInto("asked", _stall(state, now)),)
    return decided


def _said(
    state: GangState,
    rank: RankState,
    event: MessageCame | Misbehaved | VoteChecked | VoteWaits,
    now: float,
) -> Decision:
    if isinstance(event, VoteChecked | VoteWaits):
        told = waits_fact(state, event) if isinstance(event, VoteWaits) else vote_fact(state, event)
        return state, (Tell(told),)
    if isinstance(event, Misbehaved):
        return _misbehaved(state, rank, event.what, now)
    if rank.misbehaved or _is_said(rank, event.message) or _is_voted_for(rank, event.message):
        return state, ()
    foreign = not_its_own(state, rank.rank, event.message)
    if foreign is not None:
        return _misbehaved(state, rank, foreign, now)
    if isinstance(event.message, RankVote):
        voted = replace(rank, voted=event.message.step)
        return _with(state, voted), (CheckVote(rank.rank, event.message),)
    return _heard(state, rank, event.message, now)


def _is_said(rank: RankState, message: RankMessage) -> bool:
    """Whether a rank has said its last word: were it taken again, it would never be late to leave."""
    if isinstance(message, RankFinished):
        return rank.finished is not None or rank.failed is not None
    return isinstance(message, RankFailed) and rank.failed is not None


def _is_voted_for(rank: RankState, message: RankMessage) -> bool:
    """Whether it speaks of a checkpoint no later than the last one for which this rank voted.

    Ranks write one after the other. If a vote could be taken back, the commit would go on, uncounted.
    """
    if isinstance(message, RankVote):
        return message.step <= rank.voted
    if isinstance(message, RankCheckpointFailed):
        return step_and_fence(message.checkpoint_id)[0] <= rank.voted
    return False


def _heard(state: GangState, rank: RankState, message: RankMessage, now: float) -> Decision:
    match message:
        case RankReady():
            is_first = rank.ready is None
            rank = replace(rank, ready=message)
            state, effects = _ready(_with(state, rank))
            return state, (*effects, *(replica_loss.ready(state, rank) if is_first else ()))
        case RankMetrics():
            return state, ()  # telemetry takes them: nothing is decided them
        case RankTraced() | RankTraceFailed():
            state = _without_trace(state, rank.rank)
        case RankFinished():
            return _with(state, replace(rank, finished=message, spoke_last_at=now)), ()
        case RankFailed():
            rank = replace(rank, failed=message, spoke_last_at=now)
            return _failed(_with_word(state, rank), rank, now)
        case RankCheckpointBegan(step=step) if step <= state.began:
            return state, ()  # all ranks begin the same ones in the same order: this was told
        case RankCheckpointBegan(step=step):
            state = replace(state, began=step)
        case RankCheckpointWaits():
            # Its replica's other ranks wait for it, and say nothing.
            still = {**state.progress.still, **dict.fromkeys(state.replica_of(rank.rank), now)}
            progress = replace(state.progress, moved_at=now, still=still)
            state = replace(state, progress=progress, waited_at=now)
        case _:
            pass
    return state, (Tell(fact_of(state, rank.rank, message)),)


def _ready(state: GangState) -> Decision:
    # Boards are seen sooner than pipes are read: what it says may come after its first step.
    if state.progressed is not None:
        return state, (_progress(state),)
    starts = state.is_script and all(rank.ready is not None for rank in state.ranks.values())
    return (state, (_progress(state),)) if starts else (state, ())


def _misbehaved(state: GangState, rank: RankState, what: str, now: float) -> Decision:
    if rank.ended:
        return state, ()
    said = RankFailed(error=f"rank {rank.rank} {what}", traceback="", step=0)
    rank = replace(
        rank, failed=rank.failed or said, finished=None, misbehaved=True, spoke_last_at=now
    )
    state = _with_word(state, rank)
    if replica_loss.may_lose(state):  # it costs its own replica, as any end of it does
        return _kill(state, tuple(state.replica_of(rank.rank)))
    return _kill_all(state)


def _exited(state: GangState, rank: RankState, event: Exited, now: float) -> Decision:
    if rank.ended:
        return state, ()
    killed = rank.killed and not event.by_itself
    rank = replace(
        rank, exit_code=event.exit_code, signal=event.signal, killed=killed, held=event.held
    )
    left_well = event.exit_code == 0 and rank.failed is None and not rank.misbehaved
    if state.is_script and left_well and rank.finished is None:
        rank = replace(rank, finished=RankFinished(step=0, drained=False))
    state = _with_word(state, rank)
    state, dropped = _untraced(state, rank, event)
    if rank.finished is not None:
        return state, dropped
    state, effects = _failed(state, rank, now)
    return state, (*dropped, *effects)


def _untraced(state: GangState, rank: RankState, event: Exited) -> Decision:
    """A rank that is dead records no more."""
    trace_id = state.tracing.get(rank.rank)
    if trace_id is None:
        return state, ()
    how = f"code {event.exit_code}" if event.signal is None else f"signal {event.signal}"
    fact = no_trace(state, trace_id, rank.rank, f"its process ended by {how} before it was done")
    return _without_trace(state, rank.rank), (DropTrace(rank.rank, trace_id, fact),)


def _without_trace(state: GangState, number: int) -> GangState:
    left = {rank: trace_id for rank, trace_id in state.tracing.items() if rank != number}
    return replace(state, tracing=left)


def _trace(state: GangState, command: RecordTrace) -> Decision:
    told: list[Effect] = [Tell(trace_ordered(state, command.trace_id))]
    if command.trace_id in state.traces:
        return state, tuple(told)  # it was sent again
    here = [rank for rank in command.ranks if rank in state.ranks]
    refused = {rank: _refusal(state, rank) for rank in here}
    told += [
        Tell(no_trace(state, command.trace_id, rank, why))
        for rank, why in refused.items()
        if why is not None
    ]
    chosen = tuple(rank for rank in here if refused[rank] is None)
    if chosen:
        order = TraceOrder(trace_id=command.trace_id, steps=command.steps)
        told.append(Instruct(chosen, RankOrder(trace=order)))
    tracing = {**state.tracing, **dict.fromkeys(chosen, command.trace_id)}
    traces = state.traces | {command.trace_id}
    return replace(state, tracing=tracing, traces=traces), tuple(told)


def _refusal(state: GangState, number: int) -> str | None:
    rank = state.ranks[number]
    if rank.ended or rank.finished is not None or rank.failed is not None:
        return "it has ended"
    other = state.tracing.get(number)
    return None if other is None else f"it still records {other}"


def _failed(state: GangState, rank: RankState, now: float) -> Decision:
    if replica_loss.may_lose(state):
        return replica_loss.failed(state, rank)
    if rank.echoes:
        wait_until = now + ECHO_WAITS_S
        return replace(state, echo_until=state.echo_until or wait_until), ()
    return _kill_survivors(state)


def _stepped(state: GangState, rank: RankState, step: int) -> Decision:
    state = _with(state, replace(rank, step_seen=True))
    if state.progressed is not None or not _have_stepped(state, state.ranks.values()):
        return state, ()
    state = replace(state, progressed=max(step, 1))
    return state, (_progress(state),)


def _progress(state: GangState) -> Tell:
    ready = next((r.ready for r in state.ranks.values() if r.ready is not None), None)
    return Tell(
        GangProgressed(
            job_id=state.job_id,
            fence=state.fence,
            node_id=state.node_id,
            step=state.progressed or 0,
            throughput_unit=None if ready is None else ready.throughput_unit,
            loss_unit=None if ready is None else ready.loss_unit,
            notices=() if ready is None else ready.notices,
        )
    )


def _have_stepped(state: GangState, ranks: Collection[RankState]) -> bool:
    # Nobody says that each rank of a script reports.
    of_enough = any if state.is_script else all
    return of_enough(rank.step_seen for rank in ranks)


def _stop(state: GangState, command: StopGang, now: float) -> Decision:
    if command.mode == "kill":
        state = replace(state, stopped="the controller asked for it")
        if command.look and _may_tell_more(state):
            looks = LookInto("hang", _stall(state, now))
            return replace(state, hung_at=now), (looks,)
        return (state, ()) if state.is_looking else _kill_all(state)
    deadline = now + command.grace_s
    if state.kill_at is not None:
        # A repeated or second drain may shorten the grace, never lengthen it.
        return replace(state, kill_at=min(state.kill_at, deadline)), ()
    state = replace(state, kill_at=deadline)
    order = RankOrder(checkpoint=command.checkpoint != "none", stop=True)
    return state, (Instruct(_living(state), order),)


def _may_tell_more(state: GangState) -> bool:
    """Whether its ranks, which another node's wait for, are as they were and not looked into yet."""
    return state.hung_at is None and not any(
        rank.failed or rank.killed or rank.ended for rank in state.ranks.values()
    )


def _looked_at(state: GangState, event: LookedAt, now: float) -> Decision:
    busy = [r for r in state.ranks.values() if not r.ended and r.finished is None]
    marks = {r.rank: event.marks[r.rank] for r in busy if r.rank in event.marks}
    # Once a rank has failed or is being killed, what stands still waits for its end.
    if not marks or state.hung_at is not None or any(r.failed or r.killed for r in busy):
        return state, ()
    allowed_s = allowance_s(
        marks,
        stepped=_have_stepped(state, busy),
        usual_step_s=event.usual_step_s,
        asked_s=state.hang_timeout_s,
        is_script=state.is_script,
        # Replicas that may be lost show the same phase as they wait for each other; their links have a time of their own.
        cut_off=bool(event.cut_off) and not replica_loss.may_lose(state),
    )
    stopped = event.stopped & {rank.rank for rank in busy}
    progress, freeze = look_at_stopped(state.progress, stopped, state.hang_timeout_s, now)
    progress, stall = look(progress, marks, allowed_s, now)
    state = replace(state, progress=progress)
    if replica_loss.may_lose(state):
        stuck = replica_loss.stuck(state, event.usual_step_s, now)
        if stuck:
            return replica_loss.given_up(state, stuck, now)
    found = next((each for each in (stall, freeze) if each.is_hang), None)
    if found is None:
        return state, ()
    return replace(state, hung_at=now), (LookInto("hang", found),)


def _looked_into(state: GangState, findings: Findings) -> Decision:
    if findings.why == "asked":
        fact = GangDiagnosed(
            job_id=state.job_id, fence=state.fence, node_id=state.node_id, findings=findings
        )
        return state, (Tell(fact),)
    return _kill_hung(replace(state, hang=findings))


def _kill_hung(state: GangState) -> Decision:
    why = "the ranks made no progress"
    if state.hang is not None:
        why += f" for {state.hang.still_s:.1f} s"
    return _kill_all(replace(state, stopped=state.stopped or why))


def _stall(state: GangState, now: float) -> Stall:
    moved_at = state.progress.moved_at
    return Stall(still_s=0.0 if moved_at is None else max(now - moved_at, 0.0), allowed_s=0.0)


def _ticked(state: GangState, now: float) -> Decision:
    if state.kill_at is not None and now >= state.kill_at:
        return _kill_all(replace(state, stopped="it did not drain within its grace"))
    if state.hung_at is not None and now >= state.hung_at + LOOKED_INTO_WITHIN_S:
        return _kill_hung(state)
    if state.echo_until is not None and now >= state.echo_until and not state.is_looking:
        return _kill_survivors(state)
    wedged = tuple(
        rank.rank
        for rank in state.ranks.values()
        if (
            rank.finished is not None
            and now >= max(rank.spoke_last_at, state.waited_at) + WEDGED_AFTER_S
        )
        or (rank.failed is not None and now >= rank.spoke_last_at + FAILED_LEAVES_WITHIN_S)
    )
    return _kill(state, (*wedged, *replica_loss.left_waiting(state)))


def _kill_all(state: GangState) -> Decision:
    return _kill(state, tuple(state.ranks))


def _kill_survivors(state: GangState) -> Decision:
    # One that reported its error leaves by itself, with an exit code of its own.
    return _kill(state, tuple(r.rank for r in state.ranks.values() if r.failed is None))


def _kill(state: GangState, ranks: tuple[int, ...]) -> Decision:
    targets = tuple(r for r in ranks if not state.ranks[r].ended and not state.ranks[r].killed)
    for rank in targets:
        state = _with(state, replace(state.ranks[rank], killed=True))
    return (state, (Kill(targets),)) if targets else (state, ())


def _living(state: GangState) -> tuple[int, ...]:
    return tuple(rank.rank for rank in state.ranks.values() if not rank.ended)


def _with(state: GangState, rank: RankState) -> GangState:
    return replace(state, ranks={**state.ranks, rank.rank: rank})


def _with_word(state: GangState, rank: RankState) -> GangState:
    if rank.arrived is None:
        rank = replace(rank, arrived=state.words)
    return replace(_with(state, rank), words=state.words + 1)
