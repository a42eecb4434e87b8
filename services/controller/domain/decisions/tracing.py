"""What people, agents and the end of an attempt do to a job's traces.

Nothing of a trace touches the job's course: it trains on, whatever becomes of the recording.
"""

from typing import Final

from services.contract.jobs.traces import MOST_TRACED_RANKS, TRACES_KEPT
from services.contract.messages.commands import RecordTrace, RemoveTraces
from services.contract.messages.facts import TraceFailed, TraceOrdered, TraceRecorded
from services.contract.words.problems import Fault
from services.contract.words.states import ExitReason, JobState, TraceState
from services.controller.domain.errors import InvalidRequestError, StateConflictError
from services.controller.domain.job import trace as traces
from services.controller.domain.job.effects import Draft
from services.controller.domain.job.events import TraceAsked, TraceOverdue
from services.controller.domain.job.job import RESUMABLE_STATES, Job
from services.controller.domain.job.trace import Trace, TraceFile

ANSWER_DUE_MS: Final = 10_000
RESENT_MOST: Final = 2


def on_asked(event: TraceAsked, draft: Draft) -> None:
    """Command the agents of these ranks to have them record; the job's oldest surplus trace goes.

    Raises:
        StateConflictError: The job does not run, is being stopped, or is already being recorded.
        InvalidRequestError: It has no such rank, or more ranks than are recorded at a time.
    """
    job = draft.job
    if any(trace.id == event.trace_id for trace in job.traces):
        return
    fence = _refuse_unless_trained(job)
    places = {} if job.plan is None else {seat.rank: seat.node_id for seat in job.plan.ranks}
    chosen = sorted(places if event.ranks is None else set(event.ranks))
    _refuse_unknown_ranks(event, len(places))
    trace = Trace(
        id=event.trace_id,
        fence=fence,
        steps=event.steps,
        places={rank: places[rank] for rank in chosen},
        asked_ms=draft.now_ms,
        commanded_ms=draft.now_ms,
    )
    surplus = job.traces[: max(len(job.traces) + 1 - TRACES_KEPT, 0)]
    draft.change(traces=(*job.traces[len(surplus) :], trace))
    _command(draft, trace)
    if surplus and job.head_node is not None:
        gone = tuple(each.id for each in surplus)
        draft.send(RemoveTraces(job_id=job.id, fence=fence, trace_ids=gone), [job.head_node])
    draft.note(
        "trace.asked",
        f"{_ranks(trace)} is to record {_steps(trace.steps)}",
        trace=trace.id,
        steps=trace.steps,
        ranks=chosen,
    )


def on_overdue(_event: TraceOverdue, draft: Draft) -> None:
    """Tell the silent agents again; after ``RESENT_MOST`` times their ranks are given up.

    An agent that does not know the command passes over it: its version is older than the controller's.
    """
    trace = _open(draft.job)
    if trace is None or not trace.silent_nodes:
        return
    if trace.resent >= RESENT_MOST:
        silent = trace.silent_nodes
        reason = (
            f"the agent of {', '.join(silent)} did not answer: one of an older version than the "
            "controller records no traces; update it and ask again"
        )
        ranks = [rank for node in silent for rank in trace.ranks_on(node)]
        _put(draft, traces.with_failure(trace, ranks, reason, draft.now_ms))
        return
    again = {"resent": trace.resent + 1, "commanded_ms": draft.now_ms}
    trace = trace.model_copy(update=again)
    _put(draft, trace)
    _command(draft, trace)


def on_ordered(fact: TraceOrdered, draft: Draft) -> None:
    """An agent has told its ranks to record."""
    trace = _named(draft.job, fact.trace_id)
    if trace is not None:
        _put(draft, traces.with_order(trace, fact.node_id, draft.now_ms))


def on_recorded(fact: TraceRecorded, draft: Draft) -> None:
    """A rank's file is written."""
    trace = _named(draft.job, fact.trace_id)
    if trace is not None and fact.rank in trace.ranks_on(fact.node_id):
        file = TraceFile(
            path=fact.path,
            bytes=fact.bytes,
            first_step=fact.first_step,
            last_step=fact.last_step,
        )
        _put(draft, traces.with_file(trace, fact.rank, file, draft.now_ms))


def on_failed(fact: TraceFailed, draft: Draft) -> None:
    """A rank recorded nothing, or all ranks of a node."""
    trace = _named(draft.job, fact.trace_id)
    if trace is None:
        return
    here = trace.ranks_on(fact.node_id)
    ranks = here if fact.rank is None else tuple({fact.rank}.intersection(here))
    who = fact.node_id if fact.rank is None else f"rank {fact.rank}"
    _put(draft, traces.with_failure(trace, ranks, f"{who}: {fact.reason}", draft.now_ms))


def end_with_attempt(draft: Draft, why: ExitReason) -> None:
    """No rank of the newest attempt lives any more: what is not recorded will not be."""
    trace = _open(draft.job)
    if trace is not None:
        reason = f"attempt {trace.fence} ended ({why}) before all of it was recorded"
        _put(draft, traces.with_failure(trace, trace.places, reason, draft.now_ms))


def is_overdue(job: Job, now_ms: int) -> bool:
    """Whether an agent should have said by now that it told its ranks."""
    trace = _open(job)
    if trace is None or not trace.silent_nodes:
        return False
    return now_ms - trace.commanded_ms > ANSWER_DUE_MS


def _refuse_unless_trained(job: Job) -> int:
    """The number of the attempt that trains."""
    attempt = job.attempt
    if job.state != JobState.RUNNING or attempt is None or attempt.is_over:
        first = "resume it first, and " if job.state in RESUMABLE_STATES else ""
        then = "" if job.state == JobState.SUCCEEDED else f"; {first}retry when it is RUNNING"
        raise StateConflictError(
            f"the job is {job.state}: only steps of a running job are recorded{then}"
        )
    if job.stop is not None:
        raise StateConflictError(
            "the ranks of the job are being stopped, so that it continues elsewhere or later; "
            "retry when it is RUNNING with its next attempt"
        )
    under_way = _open(job)
    if under_way is not None:
        raise StateConflictError(
            f"trace {under_way.id} is {under_way.state}, and a job has one at a time: wait for its end "
            f"(GET /v1/jobs/{job.id}/traces/{under_way.id})",
            code="trace_under_way",
        )
    return attempt.fence


def _refuse_unknown_ranks(event: TraceAsked, world_size: int) -> None:
    faults = [
        Fault(
            pointer=f"/ranks/{place}",
            detail=f"there is no rank {rank}: the job runs on ranks 0 to {world_size - 1}",
            code="unknown_rank",
        )
        for place, rank in enumerate(event.ranks or ())
        if rank >= world_size
    ]
    if event.ranks is None and world_size > MOST_TRACED_RANKS:
        faults = [
            Fault(
                pointer="/ranks",
                detail=f"the job runs on {world_size} ranks, and a trace is of {MOST_TRACED_RANKS} at "
                "most; name some of them",
                code="too_many_ranks",
            )
        ]
    if faults:
        raise InvalidRequestError(faults)


def _command(draft: Draft, trace: Trace) -> None:
    command = RecordTrace(
        job_id=draft.job.id,
        fence=trace.fence,
        trace_id=trace.id,
        steps=trace.steps,
        ranks=tuple(trace.places),
    )
    draft.send(command, trace.silent_nodes)


def _open(job: Job) -> Trace | None:
    return next((trace for trace in job.traces if trace.is_open), None)


def _named(job: Job, trace_id: str) -> Trace | None:
    return next((trace for trace in job.traces if trace.id == trace_id), None)


def _put(draft: Draft, trace: Trace) -> None:
    """Keep what is new of a trace, and say so."""
    before = _named(draft.job, trace.id)
    if before is None or trace == before:
        return
    kept = (trace if each.id == trace.id else each for each in draft.job.traces)
    draft.change(traces=tuple(kept))
    if trace.state == before.state:
        return
    message = {
        TraceState.RECORDING: f"{_ranks(trace)} records the next {_steps(trace.steps)}",
        TraceState.DONE: f"{_ranks(trace)} has recorded {_steps(trace.steps)} "
        f"({trace.total_bytes} bytes)",
        TraceState.FAILED: f"the trace of {_ranks(trace)} failed: {trace.reason}",
    }
    kind = {TraceState.RECORDING: "recording", TraceState.DONE: "done", TraceState.FAILED: "failed"}
    draft.note(f"trace.{kind[trace.state]}", message[trace.state], trace=trace.id)


def _ranks(trace: Trace) -> str:
    one, *more = trace.places
    return f"rank {one}" if not more else f"each of {len(trace.places)} ranks"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
