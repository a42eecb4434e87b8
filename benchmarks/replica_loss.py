"""What the loss of a replica costs a job that continues without it.

    python -m benchmarks.replica_loss [--kills 4] [--every 30]

A local stack and a job of three CPU replicas of one rank each, twice: undisturbed, and with SIGKILL to one
replica in turn each ``--every`` seconds. The model rests 0.1 s in each pass, as a device would
compute, so that a step takes the same time whatever else the machine does. Printed are the goodput (time
of the undisturbed steps over that of the disturbed ones, both from the first step to the last), the largest
difference of a loss, the longest steps, and how long until a lost replica was back.
"""

import argparse
import heapq
import statistics
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Final

import psutil

from services.contract.api.views import JobView
from services.contract.words.states import JobState
from tests.e2e.conftest import REST, Stack, running_stack

_REPLICAS: Final = 3
_STEP_S: Final = 0.25
_LOOK_S: Final = 0.02


def main() -> None:
    """Trains twice."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between kills")
    chosen = parser.parse_args()
    steps = round((chosen.kills + 0.5) * chosen.every / _STEP_S)
    with (
        tempfile.TemporaryDirectory(prefix="meshloom-replicas-") as folder,
        running_stack(Path(folder)) as stack,
    ):
        calm = _train(stack, steps, every_s=None)
        hit = _train(stack, steps, every_s=chosen.every)
        losses = stack.losses(calm.id), stack.losses(hit.id)
        away = _seconds_away(stack, hit.id)
        usual = statistics.median(_step_times(stack, calm.id))
        longest = heapq.nlargest(len(away), _step_times(stack, hit.id))
        attempts = len(stack.client.attempts(hit.id).items)
        seconds = [_duration_s(stack, job) for job in (calm, hit)]
    apart = max(abs((a or 0.0) - (losses[1][step] or 0.0)) for step, a in losses[0].items())
    sys.stdout.write(
        f"{len(away)} losses in {seconds[1]:.0f} s, {attempts} attempt, {hit.restarts} restarts\n"
        f"goodput {seconds[0] / seconds[1]:.1%}: {steps} steps took {seconds[0]:.1f} s undisturbed, "
        f"{seconds[1]:.1f} s disturbed\n"
        f"largest difference of a loss: {apart:.1e}\n"
        f"longest steps, as many as losses: {_told(longest)}; an undisturbed one {usual:.2f} s\n"
        f"back after: {_told(away)}\n"
    )


def _train(stack: Stack, steps: int, every_s: float | None) -> JobView:
    job = stack.submit(
        name="replicas",
        model={
            "factory": "paced_models:PacedDecoder",
            "args": {"pace_s": 0.1, "dim": 32, "layers": 2, "heads": 2},
        },
        train={"steps": steps, "global_batch": 12, "micro_batch": 2, "seed": 7},
        resources={"ranks": _REPLICAS, "device": "cpu"},
        mesh={"dp_replicate": _REPLICAS},
        faults={"on_replica_loss": "continue", "max_restarts": 0},
        checkpoint={"every_steps": 0},
    )
    stack.at_step(job.id, 1)
    began, kills = time.monotonic(), 0
    while (job := stack.job(job.id)).state not in REST:
        is_near_the_end = (steps - job.progress.step) * _STEP_S < (every_s or 0.0) / 3
        is_due = every_s is not None and time.monotonic() - began > (kills + 1) * every_s
        if is_due and not is_near_the_end:
            ranks = stack.client.ranks(job.id).items
            pid = next(each.pid for each in ranks if each.rank == kills % _REPLICAS)
            psutil.Process(pid).kill()
            kills += 1
        Event().wait(_LOOK_S)
    if job.state is not JobState.SUCCEEDED:
        raise SystemExit(f"{job.state}: {job.reason}")
    return job


def _duration_s(stack: Stack, job: JobView) -> float:
    began = stack.client.attempts(job.id).items[-1].first_step_at
    if began is None or job.ended_at is None:
        raise SystemExit("the job has made no step")
    return (job.ended_at - began).total_seconds()


def _step_times(stack: Stack, job_id: str) -> list[float]:
    return [each.step_time_s for each in stack.client.metrics(job_id, max_points=10_000).items]


def _seconds_away(stack: Stack, job_id: str) -> list[float]:
    lost: list[datetime] = []
    away: list[float] = []
    for event in stack.client.events(job_id).items:
        if event.kind == "replica.lost":
            lost.append(event.at)
        elif event.kind == "replica.returned":
            away.append((event.at - lost[len(away)]).total_seconds())
    return away


def _told(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    main()
