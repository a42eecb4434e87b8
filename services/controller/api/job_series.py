"""Series of running jobs for Prometheus: those of a job that has ended are gone with it."""

from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.controller.use_cases.figures import JobFigures

_OF_A_JOB: Final = ("job_id", "name", "owner")


def job_series(jobs: Sequence[JobFigures], left_out: int) -> bytes:
    """The series of these jobs as text; ``left_out``: how many more run."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(jobs, left_out))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, jobs: Sequence[JobFigures], left_out: int) -> None:
        self._jobs = jobs
        self._left_out = left_out

    def collect(self) -> Iterable[GaugeMetricFamily]:
        yield from self._simple()
        throughput = _family(
            "meshloom_job_throughput", "Tokens or samples a second of the newest step", "unit"
        )
        ranks = _family("meshloom_job_ranks", "Ranks of the job by what they do", "phase")
        for job in self._jobs:
            if job.throughput is not None:
                throughput.add_metric([*_labels(job), job.unit], job.throughput)
            for phase, count in sorted(job.phases.items()):
                ranks.add_metric([*_labels(job), phase], count)
        yield throughput
        yield ranks
        yield GaugeMetricFamily(
            "meshloom_jobs_without_series",
            "Running jobs that have no series of their own, as too many run",
            value=self._left_out,
        )

    def _simple(self) -> Iterable[GaugeMetricFamily]:
        figures = {
            "step": ("Steps made", "step"),
            "restarts": ("Restarts that count against the budget", "restarts"),
            "loss": ("Loss of the newest step", "loss"),
            "step_seconds": ("Seconds of the newest step", "step_s"),
            "memory_bytes": ("Memory of the rank that has most", "memory_bytes"),
            "straggler_score": ("Highest straggler score of its ranks, 0 to 1", "straggler_score"),
            "checkpoint_seconds": (
                "Seconds from begin to commit of the newest committed checkpoint",
                "checkpoint_s",
            ),
            "checkpoint_age_seconds": (
                "Seconds since the newest checkpoint was committed",
                "checkpoint_age_s",
            ),
        }
        for name, (told, attribute) in figures.items():
            family = _family(f"meshloom_job_{name}", told)
            for job in self._jobs:
                value = getattr(job, attribute)
                if value is not None:
                    family.add_metric(_labels(job), value)
            yield family


def _family(name: str, told: str, *more: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, told, labels=[*_OF_A_JOB, *more])


def _labels(job: JobFigures) -> list[str]:
    return [job.job_id, job.name, job.owner]
