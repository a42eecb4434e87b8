"""Elastic jobs: as many ranks as there is room for that nobody who waits could use.

A job that is given slots gets more than it needs at once. One that runs grows only where it pays:
there has been room for a while, and its last checkpoint is fresh, so that little is lost should
ending go wrong. It shrinks by itself when it goes on after a loss, and at once when its bounds
were lowered. Growing and shrinking are moves: a checkpoint, the end, the next attempt.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.contract.jobs.specs import JobSpec
from services.contract.messages.probing import DeviceType
from services.contract.words.states import CheckpointState, JobState
from services.controller.domain.job.events import MoveAsked
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.allocation import Allocation, KnownLimits, QueueHead
from services.controller.domain.scheduling.placement import (
    GangRequest,
    Never,
    NodeUsage,
    NotNow,
    Placed,
    place,
    seats_for,
)

RESIZE_GRACE_S: Final = 300.0
"""For the checkpoint before a resize: nothing presses, and a kill would cost the steps since."""

_DOUBLINGS: Final = 4


@dataclass(frozen=True)
class GrowthDelay:
    """What growing waits for, in milliseconds.

    Attributes:
        stable_ms: So long there must have been room all the while; twice as long after each restart
            that counted, up to 16 times, so that a node that comes and goes does not use the budget up.
        commit_ms: So long, from then on, the next commit is waited for.
    """

    stable_ms: int = 30_000
    commit_ms: int = 300_000

    def stable_ms_of(self, job: Job) -> int:
        """The first of them for this job."""
        return self.stable_ms << min(job.restarts, _DOUBLINGS)


@dataclass(frozen=True)
class GrowthOption:
    """A job that runs could go on with more ranks: it would run there."""

    job: Job
    placed: Placed

    @property
    def attempt(self) -> tuple[str, int]:
        """Of which attempt that is true."""
        return self.job.id, self.job.fence


def gang_request_of(job: Job, ranks: int | None = None) -> GangRequest:
    """The job's gang, of so many ranks or of the fewest that it needs.

    It rather does without the nodes that its last attempt lost.
    """
    lost = job.attempts[-1].lost_nodes if job.attempts else ()
    gang = GangRequest.of(job.spec, ranks)
    return replace(gang, last_resort=lost) if lost else gang


def place_most(spec: JobSpec, usages: Sequence[NodeUsage]) -> Placed | NotNow | Never:
    """Seats for as many ranks of a new job as there is room for; none unless for what it needs."""
    outcome = place(GangRequest.of(spec), usages)
    if not isinstance(outcome, Placed):
        return outcome
    device = outcome.device

    def placed(ranks: int) -> Placed | None:
        return seats_for(replace(GangRequest.of(spec, ranks), device=device), usages)

    return _most(_larger(spec, len(outcome.ranks), device, usages), placed) or outcome


def enlarged(
    allocation: Allocation, heads: Mapping[DeviceType, QueueHead], placed: Iterable[Job]
) -> tuple[Allocation, Mapping[str, Placed]]:
    """More slots for those that have just been given some, in this order; the allocation after it."""
    larger: dict[str, Placed] = {}
    known: KnownLimits = {}
    for job in placed:
        least = allocation.placed[job.id]
        more = _largest(allocation, heads, job, len(least.ranks), least.device, known)
        if more is not None:
            known = {}
            larger[job.id] = more
            allocation = allocation.without(job).with_placed(job, more)
    return allocation, larger


def growth_options(
    allocation: Allocation, heads: Mapping[DeviceType, QueueHead], jobs: Iterable[Job]
) -> tuple[GrowthOption, ...]:
    """Which of the jobs that run could have more ranks, all of them together."""
    found = []
    known: KnownLimits = {}
    able = (job for job in jobs if job.spec.resources.world is not None and _trains(job))
    for job in sorted(able, key=lambda j: (-j.spec.priority, j.created_ms, j.id)):
        if job.plan is None:
            continue
        more = _largest(allocation, heads, job, job.plan.world_size, job.plan.device_type, known)
        if more is not None:
            known = {}
            found.append(GrowthOption(job, more))
            allocation = allocation.without(job).with_placed(job, more)
    return tuple(found)


def followed(
    since: Mapping[tuple[str, int], int], found: Sequence[GrowthOption], now_ms: int
) -> Mapping[tuple[str, int], int]:
    """Since when each attempt has had that option without a break."""
    return {option.attempt: min(since.get(option.attempt, now_ms), now_ms) for option in found}


def growth(
    option: GrowthOption, since_ms: int, now_ms: int, growth_delay: GrowthDelay
) -> MoveAsked | None:
    """The request to go on with more ranks, once it is time."""
    job = option.job
    now, then = len(job.plan.ranks) if job.plan else 0, len(option.placed.ranks)
    settled_ms = since_ms + growth_delay.stable_ms_of(job)
    if now < job.spec.fewest_ranks:
        why = f"its bounds require {job.spec.fewest_ranks} or more"
    elif now_ms >= settled_ms and _may_end(job, settled_ms, now_ms, growth_delay):
        seconds = (now_ms - since_ms) / 1000
        why = f"for {seconds:.0f} s there have been free slots that no job waits for"
    else:
        return None
    where = ", ".join(node.id for node in option.placed.nodes)
    return _resize(now, then, f"{why}, on {where}")


def shrinkage(job: Job) -> MoveAsked | None:
    """The request to go on with fewer ranks, where the bounds were lowered below what it has."""
    most = job.spec.worlds[-1]
    if job.plan is None or not job.can_migrate or job.plan.world_size <= most:
        return None
    return _resize(job.plan.world_size, most, f"its bounds allow {most} at most")


def _largest(
    allocation: Allocation,
    heads: Mapping[DeviceType, QueueHead],
    job: Job,
    present: int,
    device: DeviceType,
    known: KnownLimits,
) -> Placed | None:
    """Seats for as many ranks as can be, more than at present, in nobody's way."""
    left = allocation.without(job)
    worlds = _larger(job.spec, present, device, left.usages)
    if not worlds:
        return None
    head = heads.get(device)
    backfill = None if head is None else allocation.backfill_without(job, device, head, known)
    is_over = backfill is not None and backfill.is_over_by(left.end_ms(job))

    def placed(ranks: int) -> Placed | None:
        nodes = left.usages if backfill is None else backfill.nodes(ranks, is_over=is_over)
        return seats_for(replace(gang_request_of(job, ranks), device=device), nodes)

    return _most(worlds, placed)


def _most(worlds: Sequence[int], placed: Callable[[int], Placed | None]) -> Placed | None:
    """Seats for the most of these numbers of ranks, ascending, for which there are some.

    Where there is room for more ranks there is room for fewer: a few are tried, not each of hundreds.
    """
    tried: dict[int, Placed | None] = {}

    def is_too_many(ranks: int) -> bool:
        tried[ranks] = placed(ranks)
        return tried[ranks] is None

    fitting = bisect_left(worlds, True, key=is_too_many)  # noqa: FBT003 what is looked for
    return tried[worlds[fitting - 1]] if fitting else None


def _larger(
    spec: JobSpec, present: int, device: DeviceType, usages: Sequence[NodeUsage]
) -> Sequence[int]:
    """The numbers of ranks above ``present``, ascending, that are not more than all free slots.

    A spec may allow 65 536 numbers.
    """
    slots = sum(usage.free(device) for usage in usages)
    worlds = spec.worlds
    return worlds[bisect_right(worlds, present) : bisect_right(worlds, slots)]


def _trains(job: Job) -> bool:
    attempt = job.attempt
    is_running = job.state == JobState.RUNNING and job.can_migrate
    return is_running and attempt is not None and attempt.first_step is not None


def _may_end(job: Job, settled_ms: int, now_ms: int, growth_delay: GrowthDelay) -> bool:
    """Whether this is a good moment: right after a commit, or where none is to be waited for."""
    if job.spec.checkpoint.every_steps == 0 or now_ms >= settled_ms + growth_delay.commit_ms:
        return True
    return any(
        c.state == CheckpointState.COMMITTED
        and c.fence == job.fence
        and (c.committed_ms or 0) >= settled_ms
        for c in job.checkpoints.values()
    )


def _resize(now: int, then: int, why: str) -> MoveAsked:
    verb = "grows" if then > now else "shrinks"
    words = f"{verb} from {now} to {then} ranks: {why}; a checkpoint first"
    return MoveAsked("resized", f"{then} ranks", words, RESIZE_GRACE_S)
