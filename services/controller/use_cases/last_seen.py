"""What telemetry tells of a job that can no longer tell by itself."""

from collections.abc import Collection
from typing import Final, NamedTuple

from services.contract.messages.telemetry import RankSample
from services.controller.domain.job.job import Job
from services.controller.ports.coordination import Ports
from services.controller.use_cases.progress import STEPS_FOR_ETA, if_it_answers, measure

_STEPS_OF_ALL: Final = 2
"""One step more may have been done by all before the node was heard of last, and told later."""
_BEATS_MS: Final = 2_000
"""Four beats: so late a sample of the node is by no accident."""


class LastSeen(NamedTuple):
    """The last step of which anything was heard, and when (milliseconds), if a rank was seen.

    ``trained_on_s``: for so long the ranks of a lost node computed on after its agent was last heard of.
    """

    step: int
    seen_ms: int | None
    trained_on_s: float | None = None


async def last_seen(ports: Ports, job: Job, node_id: str) -> LastSeen:
    """What the newest attempt told last, of which the ranks on ``node_id`` are lost."""
    told = await if_it_answers(ports.telemetry.last_steps([job.id], STEPS_FOR_ETA))
    records = told.get(job.id, [])
    samples = (await if_it_answers(ports.telemetry.samples([job.id]))).get(job.id, {})
    newest = [s for s in samples.values() if s.fence == job.fence and s.seen_ms]
    seen_ms = max((sample.seen_ms for sample in newest), default=None)
    step = measure(job, records, samples).step
    return LastSeen(step, seen_ms, trained_on_s(newest, node_id))


def trained_on_s(samples: Collection[RankSample], node_id: str) -> float | None:
    """For how long the ranks of a node made steps after its agent was last heard of; None: they did not.

    A step takes all ranks of a gang: where those of other nodes have gone on, the ones of this node lived.
    """
    its = [sample for sample in samples if sample.node_id == node_id]
    if not its:
        return None
    heard_ms, step = max(s.seen_ms for s in its), max(s.step for s in its)
    moved_ms = [
        sample.seen_ms - sample.beat_age_s * 1000
        for sample in samples
        if sample.node_id != node_id and sample.step >= step + _STEPS_OF_ALL
    ]
    on_ms = max(moved_ms, default=heard_ms) - heard_ms
    return on_ms / 1000 if on_ms > _BEATS_MS else None
