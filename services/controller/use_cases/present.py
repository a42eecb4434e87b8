"""Records as the REST API shows them."""

import signal
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, Literal

from services.contract.api.plan_views import EstimateView
from services.contract.api.views import (
    AttemptView,
    CheckpointView,
    CloneOrigin,
    DiagnosisView,
    ExportView,
    FailureView,
    JobView,
    MeasuredView,
    NodeView,
    RankView,
    ReplicasView,
    ShardView,
)
from services.contract.messages.telemetry import (
    MetricRecord,
    RankProgress,
    RankSample,
    RankStacks,
    StepRecord,
)
from services.contract.words.states import ExitReason, JobState
from services.controller.domain.job.attempt import Attempt, Diagnosis, Failure, ReplicaBook
from services.controller.domain.job.checkpoint import Checkpoint
from services.controller.domain.job.job import Job, Origin
from services.controller.domain.scheduling.node import Lease
from services.controller.domain.scheduling.placement import NodeUsage
from services.controller.use_cases.progress import measure

_NOT_SEEN_YET = "PENDING"
_LAST_MS: Final = 253_402_300_799_000
"""Python knows no later second. What agents and storage say may name one, and fails no list by it."""
STRAGGLER_COST: Final = 0.10
"""A rank is named a straggler when it costs this share of the step, more than the others do.

Less is what ranks of one busy host cost each other."""
_RESOLVED_BYTES: Final = {"resident_growth": 64 << 20, "allocated": 2 << 20}
"""Estimates below this are not compared: kernels, gloo and the allocator take as much for any model."""
_ENDED_BY_PEOPLE = frozenset(
    {ExitReason.COMPLETED, ExitReason.CANCELLED, ExitReason.PAUSED, ExitReason.KILLED}
)


def moment(ms: int) -> datetime:
    """Milliseconds since 1970 as a time in UTC; what lies beyond the year 9999 is its end."""
    return datetime.fromtimestamp(min(max(ms, 0), _LAST_MS) / 1000, tz=UTC)


def maybe_moment(ms: int | None) -> datetime | None:
    """The same for what may not have happened yet."""
    return None if ms is None else moment(ms)


def job_view(
    job: Job,
    records: Sequence[StepRecord],
    samples: Mapping[int, RankProgress],
    metrics: Sequence[MetricRecord] = (),
    *,
    telemetry_away: bool = False,
) -> JobView:
    """A job with its progress."""
    latest = job.latest_checkpoint
    return JobView(
        id=job.id,
        name=job.spec.name,
        state=job.state,
        reason=job.reason,
        exit_reason=job.exit_reason,
        failure=failure_view(job.failure),
        progress=measure(job, records, samples, metrics),
        telemetry_away=telemetry_away,
        evaluation=job.evaluations[-1] if job.evaluations else None,
        attempt=job.fence,
        restarts=job.restarts,
        world_size=job.spec.fewest_ranks if job.plan is None else job.plan.world_size,
        world=job.spec.resources.world,
        replicas=_replicas_view(job.attempts[-1].replicas) if job.attempts else None,
        plan=job.plan,
        estimate=_estimate_view(job, samples),
        latest_checkpoint=None if latest is None else latest.id,
        cloned_from=_origin_view(job.origin),
        revision=job.revision,
        priority=job.spec.priority,
        labels=dict(job.spec.labels),
        owner=job.owner,
        created_at=moment(job.created_ms),
        updated_at=moment(job.updated_ms),
        started_at=maybe_moment(job.started_ms),
        ended_at=maybe_moment(job.ended_ms),
        spec=job.spec,
    )


def _estimate_view(job: Job, samples: Mapping[int, RankProgress]) -> EstimateView | None:
    if job.estimate is None:
        return None
    of_attempt = [sample for sample in samples.values() if sample.fence == job.fence]
    most = max((each.peak_bytes for each in of_attempt if each.peak_bytes), default=None)
    fragments = (each.fragments_bytes for each in of_attempt if each.fragments_bytes is not None)
    is_host = job.plan is None or job.plan.device_type == "cpu"
    way: Literal["resident_growth", "allocated"] = "resident_growth" if is_host else "allocated"
    estimated = job.estimate.peak.total
    return EstimateView(
        **dict(job.estimate),
        measured_peak_bytes=most,
        measured_as=None if most is None else way,
        ratio=round(most / estimated, 3)
        if most is not None and estimated >= _RESOLVED_BYTES[way]
        else None,
        measured_fragments_bytes=max(fragments, default=None),
    )


def failure_view(failure: Failure | None) -> FailureView | None:
    """A failure, its signal by name."""
    if failure is None:
        return None
    fields = failure.model_dump(exclude={"standing"})
    return FailureView(**fields | {"signal": _signal_name(failure.signal)})


def attempt_views(job: Job) -> tuple[AttemptView, ...]:
    """A job's attempts, oldest first."""
    following = list((*job.attempts, None)[1:])
    if job.attempts_left_out:
        following[0] = None  # what followed the first one is not kept
    return tuple(_attempt_view(a, b) for a, b in zip(job.attempts, following, strict=True))


def _attempt_view(attempt: Attempt, following: Attempt | None) -> AttemptView:
    goes_on = following is not None and attempt.exit_reason not in _ENDED_BY_PEOPLE
    return AttemptView(
        fence=attempt.fence,
        world_size=attempt.world_size,
        mesh=attempt.mesh,
        node_ids=tuple(attempt.incarnations),
        resumed_from=attempt.resumed_from,
        started_at=moment(attempt.started_ms),
        first_step_at=maybe_moment(attempt.first_step_ms),
        ended_at=maybe_moment(attempt.ended_ms),
        first_step=attempt.first_step,
        last_step=attempt.last_step if attempt.ended_ms is not None else None,
        lost_steps=attempt.lost_steps,
        exit_reason=attempt.exit_reason,
        failure=failure_view(attempt.failure),
        time_to_detect_s=_seconds(attempt.failed_ms, attempt.ended_ms),
        time_to_restart_s=(
            _seconds(attempt.ended_ms, following.started_ms) if following and goes_on else None
        ),
        time_to_first_step_s=_seconds(attempt.started_ms, attempt.first_step_ms),
        replicas=_replicas_view(attempt.replicas),
    )


def _replicas_view(book: ReplicaBook | None) -> ReplicasView | None:
    if book is None:
        return None
    return ReplicasView(
        count=book.count, present=len(book.members), lost=book.lost, returned=book.returned
    )


def _seconds(start_ms: int | None, end_ms: int | None) -> float | None:
    return None if start_ms is None or end_ms is None else max(end_ms - start_ms, 0) / 1000


def rank_views(job: Job, samples: Mapping[int, RankSample]) -> Iterator[RankView]:
    """The ranks of the newest attempt; one that was not seen yet is PENDING."""
    if job.plan is None:
        return
    current = {rank: sample for rank, sample in samples.items() if sample.fence == job.fence}
    foremost: dict[str, int] = {}
    for sample in current.values():
        for group, number in sample.issued.items():
            foremost[group] = max(foremost.get(group, 0), number)
    # Nobody waits for a rank that has ended, or is drained.
    slowest = _slowest(current.values()) if job.state == JobState.RUNNING else None
    for seat in job.plan.ranks:
        if seat.rank in current:
            is_straggler = seat.rank == slowest
            yield _rank_view(current[seat.rank], foremost, is_straggler=is_straggler)
        else:
            yield RankView(
                rank=seat.rank,
                local_rank=seat.local_rank,
                node_id=seat.node_id,
                device=seat.device,
                phase=_NOT_SEEN_YET,
            )


def diagnosis_view(
    job_id: str, fence: int, diagnosis: Diagnosis, stacks: Sequence[RankStacks]
) -> DiagnosisView:
    """A verdict, with the stacks of its attempt."""
    return DiagnosisView(
        job_id=job_id,
        attempt=fence,
        at=moment(diagnosis.at_ms),
        live=diagnosis.live,
        verdict=diagnosis.verdict,
        rank=diagnosis.rank,
        node_id=diagnosis.node_id,
        summary=diagnosis.summary,
        evidence=diagnosis.evidence,
        advice=diagnosis.advice,
        stacks=tuple(entry for entry in stacks if entry.fence == fence and entry.text),
    )


def checkpoint_view(job: Job, checkpoint: Checkpoint, *, is_best: bool) -> CheckpointView:
    """A checkpoint of a job. ``is_best``: it is ``job.best_checkpoint``, for which all are looked at."""
    return CheckpointView(
        id=checkpoint.id,
        job_id=checkpoint.job_id,
        state=checkpoint.state,
        step=checkpoint.step,
        fence=checkpoint.fence,
        world_size=checkpoint.world_size,
        bytes=checkpoint.total_bytes,
        loss=checkpoint.loss,
        evaluation=checkpoint.evaluation,
        best=is_best,
        reason=checkpoint.reason,
        votes=len(checkpoint.votes),
        shards=tuple(
            ShardView(rank=rank, name=shard.name, bytes=shard.bytes, sha256=shard.sha256)
            for rank, shard in sorted(checkpoint.votes.items())
        ),
        created_at=moment(checkpoint.created_ms),
        committed_at=maybe_moment(checkpoint.committed_ms),
        verified_at=maybe_moment(checkpoint.verified_ms),
        checked_at=maybe_moment(checkpoint.checked_ms),
        corrupt_file=checkpoint.corrupt_file,
        pinned=checkpoint.pinned,
        export=None
        if checkpoint.export is None
        else ExportView(
            folder=f"{job.id}/exports/{checkpoint.id}", **checkpoint.export.model_dump()
        ),
        held_by=job.holds.get(checkpoint.id, ()),
    )


def node_view(usage: NodeUsage, lease: Lease | None) -> NodeView:
    """A node. The lease is told in whole seconds, so that polling sees few changes."""
    node = usage.node
    return NodeView(
        id=node.id,
        state=node.shown_state,
        inventory=node.inventory,
        cpu_slots_used=usage.cpu_taken,
        accelerators_used=len(usage.accelerators_taken),
        jobs=usage.jobs,
        joined_at=moment(node.joined_ms),
        lease_s=None if lease is None else float(-(-lease.left_ms // 1000)),
        measured={
            device: MeasuredView(
                facts=found.facts, failure=found.failure, measured_at=moment(found.at_ms)
            )
            for device, found in sorted(node.measured.items())
        },
    )


def _origin_view(origin: Origin | None) -> CloneOrigin | None:
    if origin is None:
        return None
    return CloneOrigin(
        job_id=origin.job_id,
        checkpoint_id=origin.checkpoint_id,
        step=origin.step,
    )


def _slowest(samples: Iterable[RankSample]) -> int | None:
    """The straggler: the rank with the highest score, if it costs ``STRAGGLER_COST`` of the step.

    Its cost is its score without the median score of the others. A busy host delays all ranks in
    turn: then all scores are alike, and the step would not be shorter without any one of them.
    """
    scores = sorted((s.straggler_score, s.rank) for s in samples if s.straggler_score is not None)
    if len(scores) < 2:  # noqa: PLR2004  # a comparison takes two
        return None
    *others, (score, rank) = scores
    usual = statistics.median(other for other, _ in others)
    return rank if score - usual >= STRAGGLER_COST else None


def _rank_view(sample: RankSample, foremost: Mapping[str, int], *, is_straggler: bool) -> RankView:
    lags = [foremost[group] - number for group, number in sample.issued.items()]
    return RankView(
        rank=sample.rank,
        local_rank=sample.local_rank,
        node_id=sample.node_id,
        device=sample.device,
        pid=sample.pid,
        phase=sample.phase,
        unit=sample.unit,
        step=sample.step,
        step_time_s=sample.step_time_s,
        data_wait_s=sample.data_wait_s,
        arrival_lag_s=sample.arrival_lag_s,
        straggler_score=sample.straggler_score,
        is_straggler=is_straggler,
        collectives_behind=max(lags, default=0),
        loss=sample.loss,
        tokens_per_s=sample.tokens_per_s,
        memory_bytes=sample.memory_bytes,
        peak_bytes=sample.peak_bytes,
        fragments_bytes=sample.fragments_bytes,
        issued=dict(sample.issued),
        completed=dict(sample.completed),
        last_seen_at=moment(sample.seen_ms) if sample.seen_ms else None,
        beat_age_s=sample.beat_age_s,
    )


def _signal_name(number: int | None) -> str | None:
    if number is None:
        return None
    known = {int(entry): entry.name for entry in signal.Signals}
    return known.get(number, f"signal {number}")
