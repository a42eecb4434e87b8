"""Whether a failed attempt is followed by another one.

A signal, a lost rank, a lost node, a refused launch: the world's fault, and worth another try
within the budget; an agent that was stopped in an orderly way costs none of it, nor does a state of
the node that may pass, such as a full disk: for that the job waits. An exception before the
attempt's first step was done, or the same failure again at the same step (an exception, an exit
code, a crash, want of memory): the job's own fault, and another try would only repeat it. A loss
that is no number: what the spec says.
"""

import itertools
import re
from dataclasses import dataclass
from typing import Final

from services.contract.messages.facts import ExitStanding
from services.contract.words.states import ExitReason, FailureClass
from services.controller.domain.decisions import diagnose
from services.controller.domain.job.attempt import Attempt, Failure, NodeExit
from services.controller.domain.job.checkpoint import LINKED_STATES
from services.controller.domain.job.job import Job

BACKOFF_MS: Final = (0, 1_000, 5_000, 15_000, 30_000, 60_000)
"""The wait after so many attempts in a row, but one, that saved nothing; the last for all more.

A job that commits checkpoints between its failures is not to wait longer and longer: what a growing
wait protects from is a fault that comes back at once.
"""

CONDITION_MS: Final = (1_000, 2_000, 5_000, 15_000, 30_000)
"""The wait after so many attempts in a row that a node's state prevented; the last for all more."""

_EXCEPTIONS: Final = {
    FailureClass.NAN: ExitReason.NON_FINITE_LOSS,
    FailureClass.CHECKPOINT_FAILED: ExitReason.CHECKPOINT_FAILED,
    FailureClass.OUT_OF_MEMORY: ExitReason.OUT_OF_MEMORY,
}
_REPEATABLE: Final = frozenset(
    {
        ExitReason.USER_ERROR,
        ExitReason.RANK_LOST,
        ExitReason.CHECKPOINT_FAILED,
        ExitReason.OUT_OF_MEMORY,
    }
)
_FROM_OUTSIDE: Final = frozenset({FailureClass.KILLED_BY_OPERATOR, FailureClass.NODE_LOST})
_NOTHING_LEFT: Final = (
    "{what}, and there is no other committed checkpoint to resume from: restore its files and "
    "verify it, or delete the corrupt ones to start over"
)
_TRACEBACK_KEPT: Final = 16_000
_LINE_KEPT: Final = 300
_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Restart:
    """Try again after ``delay_ms``. ``counts``: at the cost of one restart of the budget."""

    delay_ms: int
    counts: bool = True


@dataclass(frozen=True)
class GiveUp:
    """The job has failed."""

    exit_reason: ExitReason
    reason: str


def first_failure(attempt: Attempt) -> Failure | None:
    """The rank that failed first, as the agents ordered the exits; None if none failed.

    Across nodes a failure of its own comes before what may echo another one's. Where a node was
    lost, or could not launch, that is what the others' ends followed from.
    """
    failed = sorted(
        (e for e in attempt.exits if not (e.exit.finished or e.exit.drained)),
        key=lambda e: (e.exit.standing, e.exit.order, e.exit.rank),
    )
    # It is on record only if nothing had failed before.
    if attempt.refusal is not None:
        return Failure(error=attempt.refusal)
    # Ranks that wait for a node that is lost hang, too.
    if attempt.hang and attempt.lost is None:
        return _hang(attempt)
    is_own = bool(failed) and failed[0].exit.standing == ExitStanding.OWN_FAILURE
    if attempt.lost is not None and not is_own:
        return Failure(error=attempt.lost)
    return _failure(failed[0]) if failed else None


def cause(attempt: Attempt, failure: Failure | None) -> ExitReason:
    """Why an attempt that was not asked to stop ended."""
    if attempt.refusal is not None:
        return ExitReason.LAUNCH_FAILED
    if attempt.lost is not None:
        return ExitReason.NODE_LOST
    if attempt.hang:
        kind = diagnose.of_findings(attempt.hang, attempt.world_size, attempt.addresses).verdict
        is_memory = kind is FailureClass.OUT_OF_MEMORY
        return ExitReason.OUT_OF_MEMORY if is_memory else ExitReason.HANG
    if failure is None or attempt.was_prevented(failure):
        return ExitReason.CHECKPOINT_FAILED
    kind = diagnose.classify(attempt, failure)
    if not is_exception(failure):
        is_memory = kind is FailureClass.OUT_OF_MEMORY
        return ExitReason.OUT_OF_MEMORY if is_memory else ExitReason.RANK_LOST
    return _EXCEPTIONS.get(kind, ExitReason.USER_ERROR)


def judge(job: Job, attempt: Attempt, failure: Failure | None) -> Restart | GiveUp:
    """Whether ``job`` is tried again after ``attempt``, its newest, has failed so."""
    if job.has_lost_its_checkpoints or _strikes_its_source_out(job, attempt):
        return _without_source(job, attempt)
    if attempt.farewell and (failure is None or failure.rank is None):
        return Restart(0, counts=False)
    if attempt.was_prevented(failure):
        number = _prevented_in_a_row(job)
        return Restart(CONDITION_MS[min(number, len(CONDITION_MS)) - 1], counts=False)
    why = cause(attempt, failure)
    what = describe(failure)
    if failure is not None:
        hopeless = _hopeless(job, attempt, failure, why)
        if hopeless is not None:
            return GiveUp(why, f"{what}{hopeless}")
    budget = job.spec.faults.max_restarts
    if job.restarts >= budget:
        spent = f"all {budget} restarts are used up" if budget else "faults.max_restarts is 0"
        return GiveUp(ExitReason.RESTARTS_EXHAUSTED if budget else why, f"{what}; {spent}")
    return Restart(BACKOFF_MS[min(max(_in_vain(job) - 1, 0), len(BACKOFF_MS) - 1)])


def _hopeless(job: Job, attempt: Attempt, failure: Failure, why: ExitReason) -> str | None:
    """Why another try would only repeat it; None where it might not."""
    if diagnose.lacks_processes(failure):
        return None
    is_before_any = attempt.first_step is None and (failure.step or 0) <= attempt.resumed_step
    is_memory = why == ExitReason.OUT_OF_MEMORY and is_exception(failure)
    if (why == ExitReason.USER_ERROR or is_memory) and is_before_any:
        return "; the attempt made no step, so another would fail in the same way"
    if why in _REPEATABLE and _same_as_before(job, attempt, failure):
        return ", the second time at this step"
    if why == ExitReason.NON_FINITE_LOSS:
        if job.spec.faults.on_nan == "stop":
            return "; faults.on_nan is stop"
        if _is_nan_again(job, attempt, failure):
            return (
                ", the second time at this step on the same data: lower the learning rate, or "
                "check the data of this step"
            )
    return None


def describe(failure: Failure | None) -> str:
    """A failure in half a sentence."""
    if failure is None:
        return "the last checkpoint was not committed"
    if failure.rank is None:
        return failure.error or "the attempt was lost"
    where = f"rank {failure.rank} on {failure.node_id}"
    if failure.error is not None:
        return f"{where} failed after step {failure.step}: {_first_line(failure.error)}"
    if failure.signal is not None:
        return f"{where} was ended by signal {failure.signal} after step {failure.step}"
    return f"{where} exited with code {failure.exit_code} after step {failure.step}"


def _strikes_its_source_out(job: Job, attempt: Attempt) -> bool:
    """Whether its checkpoint was found to be corrupt, and it saved none itself: else this would never end."""
    saved = any(
        c.fence == attempt.fence and c.state in LINKED_STATES for c in job.checkpoints.values()
    )
    return attempt.corrupt_source is not None and not saved


def _without_source(job: Job, attempt: Attempt) -> Restart | GiveUp:
    if job.latest_checkpoint is not None:
        # Each such attempt strikes one checkpoint out: this ends by itself.
        return Restart(0, counts=False)
    what = "every checkpoint is corrupt"
    if attempt.corrupt_source is not None:
        what = f"checkpoint {attempt.resumed_from} is corrupt ({attempt.corrupt_source})"
    return GiveUp(ExitReason.CHECKPOINT_FAILED, _NOTHING_LEFT.format(what=what))


def _hang(attempt: Attempt) -> Failure:
    """A hang is no rank's exit: agents killed them all. Which one is to blame is worked out."""
    diagnosis = diagnose.of_findings(attempt.hang, attempt.world_size, attempt.addresses)
    blamed = [r for part in attempt.hang for r in part.findings.ranks if r.rank == diagnosis.rank]
    # Where no single one is to blame, the attempt itself tells where it stood.
    return Failure(
        rank=diagnosis.rank,
        node_id=diagnosis.node_id,
        phase=blamed[0].phase if blamed else None,
        step=blamed[0].step if blamed else attempt.last_step,
        error=diagnosis.summary,
    )


def _in_vain(job: Job) -> int:
    """How many attempts of this run, the newest ones in a row, saved no step."""
    following = job.resume_point.step
    count = 0
    run = [a for a in job.attempts if a.fence > job.run_fence and a.condition is None]
    for attempt in reversed(run):
        if following > attempt.resumed_step:
            break
        count += 1
        following = attempt.resumed_step
    return count


def _prevented_in_a_row(job: Job) -> int:
    run = [a for a in job.attempts if a.fence > job.run_fence]
    return len(list(itertools.takewhile(lambda a: a.condition is not None, reversed(run))))


def _failure(entry: NodeExit) -> Failure:
    gone = entry.exit
    return Failure(
        rank=gone.rank,
        node_id=entry.node_id,
        phase=gone.phase,
        step=gone.step,
        exit_code=gone.exit_code,
        signal=gone.signal,
        standing=gone.standing,
        error=gone.error,
        error_types=gone.error_types,
        traceback=gone.traceback[-_TRACEBACK_KEPT:] if gone.traceback else None,
    )


def is_exception(failure: Failure) -> bool:
    """Whether a failure is an exception of the job's own.

    The agent explains exits without one in its words, and knows those that only tell of a lost peer.
    """
    return failure.traceback is not None and failure.standing == ExitStanding.OWN_FAILURE


def _first_line(error: str) -> str:
    line = error.strip().partition("\n")[0]
    return line if len(line) <= _LINE_KEPT else f"{line[:_LINE_KEPT]}…"


def _same_as_before(job: Job, attempt: Attempt, failure: Failure) -> bool:
    """Whether its ranks ended in this way at this step in the attempt before, too.

    What came from outside was not theirs: it may come again at the same step by chance.
    """
    earlier = [a for a in job.attempts if job.run_fence < a.fence < attempt.fence]
    before = next((a for a in reversed(earlier) if a.condition is None), None)
    if before is None or before.failure is None or before.exit_reason not in _REPEATABLE:
        return False
    ends = [(failure, diagnose.classify(attempt, failure))]
    ends.append((before.failure, diagnose.classify(before, before.failure)))
    if any(end.standing != ExitStanding.OWN_FAILURE for end, _ in ends):
        return False
    if any(kind in _FROM_OUTSIDE for _, kind in ends):
        return False
    present, past = (_signature(end, kind) for end, kind in ends)
    return before.failure.step == failure.step and present == past


def _is_nan_again(job: Job, attempt: Attempt, failure: Failure) -> bool:
    """Whether the attempt before ended at this step for the same reason."""
    before = [a for a in job.attempts if job.run_fence < a.fence < attempt.fence][-1:]
    return any(
        a.exit_reason == ExitReason.NON_FINITE_LOSS
        and a.failure is not None
        and a.failure.step == failure.step
        for a in before
    )


def _signature(failure: Failure, kind: FailureClass) -> tuple[FailureClass, str | None]:
    # How much memory was free is told with each want of it, and differs.
    if kind == FailureClass.OUT_OF_MEMORY or failure.error is None:
        return kind, None
    return kind, _ADDRESS.sub("0x", failure.error)
