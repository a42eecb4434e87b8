"""Elastic jobs: as many ranks as there is room for that nobody who waits could use.

A job that is given seats gets more than it needs at once. One that runs grows only where it pays:
there has been room for a while, and its last checkpoint is fresh, so that little is lost should
ending go wrong. It shrinks by itself when it goes on after a loss, and at once when its bounds
were lowered. Growing and shrinking are moves: a checkpoint, the end, the next attempt.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.contract.messages.probing import DeviceType
from services.contract.specs import JobSpec
from services.contract.states import CheckpointState, JobState
from services.controller.domain.job.events import MoveAsked
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.allocation import Hall, Head
from services.controller.domain.scheduling.placement import (
    Gang,
    Never,
    NotNow,
    Seated,
    Standing,
    place,
)

RESIZE_GRACE_S: Final = 300.0
"""For the checkpoint before a resize: nothing presses, and a kill would cost the steps since."""

_DOUBLINGS: Final = 4


@dataclass(frozen=True)
class Patience:
    """What growing waits for, in milliseconds.

    Attributes:
        room_ms: So long there must have been room all the while; twice as long after each restart
            that counted, up to 16 times, lest a node that comes and goes uses the budget up.
        commit_ms: So long, from then on, the next commit is waited for.
    """

    room_ms: int = 30_000
    commit_ms: int = 300_000

    def room_ms_of(self, job: Job) -> int:
        """The first of them for this job."""
        return self.room_ms << min(job.restarts, _DOUBLINGS)


@dataclass(frozen=True)
class Chance:
    """A job that runs could go on with more ranks: it would sit there."""

    job: Job
    seated: Seated

    @property
    def attempt(self) -> tuple[str, int]:
        """Of which attempt that is true."""
        return self.job.id, self.job.fence


def wishes_of(job: Job, ranks: int | None = None) -> Gang:
    """The job's gang, of so many ranks or of the fewest that it needs.

    It rather does without the nodes that its last attempt lost.
    """
    lost = job.attempts[-1].lost_nodes if job.attempts else ()
    return replace(Gang.of(job.spec, ranks), last_resort=lost)


def place_most(spec: JobSpec, standings: Sequence[Standing]) -> Seated | NotNow | Never:
    """Seats for as many ranks of a new job as there is room for; none unless for what it needs."""
    outcome = place(Gang.of(spec), standings)
    if not isinstance(outcome, Seated):
        return outcome
    for ranks in _larger(spec, len(outcome.ranks), outcome.device, standings):
        larger = place(replace(Gang.of(spec, ranks), device=outcome.device), standings)
        if isinstance(larger, Seated):
            return larger
    return outcome


def enlarged(
    hall: Hall, heads: Mapping[DeviceType, Head], seated: Iterable[Job]
) -> tuple[Hall, Mapping[str, Seated]]:
    """More seats for those that have just been given some, in this order; the hall after it."""
    larger: dict[str, Seated] = {}
    for job in seated:
        least = hall.seated[job.id]
        more = _largest(hall, heads, job, len(least.ranks), least.device)
        if more is not None:
            larger[job.id] = more
            hall = hall.without(job).with_seated(job, more)
    return hall, larger


def chances(
    hall: Hall, heads: Mapping[DeviceType, Head], jobs: Iterable[Job]
) -> tuple[Chance, ...]:
    """Which of the jobs that run could have more ranks, all of them together."""
    found = []
    able = (job for job in jobs if job.spec.resources.world is not None and _trains(job))
    for job in sorted(able, key=lambda j: (-j.spec.priority, j.created_ms, j.id)):
        if job.plan is None:
            continue
        more = _largest(hall, heads, job, job.plan.world_size, job.plan.device_type)
        if more is not None:
            found.append(Chance(job, more))
            hall = hall.without(job).with_seated(job, more)
    return tuple(found)


def followed(
    since: Mapping[tuple[str, int], int], found: Sequence[Chance], now_ms: int
) -> Mapping[tuple[str, int], int]:
    """Since when each attempt has had a chance without a break."""
    return {chance.attempt: min(since.get(chance.attempt, now_ms), now_ms) for chance in found}


def growth(chance: Chance, since_ms: int, now_ms: int, patience: Patience) -> MoveAsked | None:
    """The wish to go on with more ranks, once it is time."""
    job = chance.job
    now, then = len(job.plan.ranks) if job.plan else 0, len(chance.seated.ranks)
    settled_ms = since_ms + patience.room_ms_of(job)
    if now < job.spec.worlds[0]:
        why = f"its bounds want {job.spec.worlds[0]} or more"
    elif now_ms >= settled_ms and _may_end(job, settled_ms, now_ms, patience):
        why = f"for {(now_ms - since_ms) / 1000:.0f} s there has been room that nobody waits for"
    else:
        return None
    where = ", ".join(node.id for node in chance.seated.nodes)
    return _resize(now, then, f"{why}, on {where}")


def shrinkage(job: Job) -> MoveAsked | None:
    """The wish to go on with fewer ranks, where the bounds were lowered below what it has."""
    most = job.spec.worlds[-1]
    if job.plan is None or not job.can_migrate or job.plan.world_size <= most:
        return None
    return _resize(job.plan.world_size, most, f"its bounds allow {most} at most")


def _largest(
    hall: Hall, heads: Mapping[DeviceType, Head], job: Job, present: int, device: DeviceType
) -> Seated | None:
    """Seats for as many ranks as can be, more than at present, in nobody's way."""
    head = heads.get(device)
    left = hall.without(job)
    for ranks in _larger(job.spec, present, device, left.standings):
        nodes = left.standings if head is None else left.harmless(job, ranks, device, head)
        outcome = place(replace(wishes_of(job, ranks), device=device), nodes)
        if isinstance(outcome, Seated):
            return outcome
    return None


def _larger(
    spec: JobSpec, present: int, device: DeviceType, standings: Sequence[Standing]
) -> Sequence[int]:
    """The numbers of ranks above ``present`` for which there are seats, the most first.

    A spec may allow 65 536 numbers, and to look for seats for each takes seconds.
    """
    seats = sum(standing.free(device) for standing in standings)
    worlds = spec.worlds
    return worlds[bisect_right(worlds, present) : bisect_right(worlds, seats)][::-1]


def _trains(job: Job) -> bool:
    attempt = job.attempt
    is_running = job.state == JobState.RUNNING and job.can_migrate
    return is_running and attempt is not None and attempt.first_step is not None


def _may_end(job: Job, settled_ms: int, now_ms: int, patience: Patience) -> bool:
    """Whether this is a good moment: right after a commit, or where none is to be waited for."""
    if job.spec.checkpoint.every_steps == 0 or now_ms >= settled_ms + patience.commit_ms:
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
