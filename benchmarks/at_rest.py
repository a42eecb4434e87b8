"""What the services take of the processor while nothing happens, and while one job trains.

    python -m benchmarks.at_rest [--seconds 30]

A local stack: Redis, controller and agent with the processes that it keeps warm. Printed is the processor
time of each in percent of one core, which a busy machine changes little: with no job, with one job of two
CPU ranks, with one that also takes a checkpoint every 20 steps, and after them. The ranks themselves do not
count. Steps are as short as they can be: how many there were a second is printed, and how many commands Redis
was given, among them those of scripts.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil
from redis import Redis

from services.contract.words.states import JobState
from tests.e2e.conftest import Stack, running_stack
from tests.waiting import until

_PARTS: Final[Mapping[str, str]] = {
    "controller": "services.controller",
    "agent": "services.worker.agent",
    "Redis": "redis-server",
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    seconds = parser.parse_args().seconds
    with (
        tempfile.TemporaryDirectory(prefix="meshloom-at-rest-") as folder,
        running_stack(Path(folder)) as stack,
    ):
        until(lambda: stack.client.nodes().items)
        _measure(stack, "no job", seconds)
        for name, every_steps in (
            ("one job", 10**6),
            ("one job, a checkpoint every 20 steps", 20),
        ):
            _with_job(stack, name, seconds, every_steps)
        _measure(stack, "after them", seconds)


def _with_job(stack: Stack, name: str, seconds: float, every_steps: int) -> None:
    job = stack.submit(
        train={"steps": 10**6, "global_batch": 4, "seed": 7},
        checkpoint={"every_steps": every_steps},
    )
    until(lambda: stack.client.job(job.id).progress.step > 0)
    _measure(stack, name, seconds, job.id)
    stack.client.kill(job.id)
    until(lambda: stack.client.job(job.id).state is JobState.CANCELLED)


def _measure(stack: Stack, when: str, seconds: float, job_id: str | None = None) -> None:
    """Print what is used over so many seconds, and how many steps a second the job makes meanwhile."""
    url = stack.part(_PARTS["controller"]).environ()["MESHLOOM_REDIS_URL"]
    with Redis.from_url(url, decode_responses=True) as redis:
        made, given, began = _steps(stack, job_id), _commands(redis), time.monotonic()
        shares = _share(stack, seconds)
        took = time.monotonic() - began
        commands = (_commands(redis) - given) / took
        steps = (_steps(stack, job_id) - made) / took
    parts = ", ".join(f"{name} {share:.1f}" for name, share in shares.items())
    sys.stdout.write(
        f"{when}: {sum(shares.values()):.1f} % of a core ({parts}); "
        f"{steps:.0f} steps and {commands:.0f} commands a second\n"
    )
    sys.stdout.flush()


def _steps(stack: Stack, job_id: str | None) -> int:
    return 0 if job_id is None else stack.client.job(job_id).progress.step


def _commands(redis: Redis) -> int:
    told: dict[str, dict[str, int]] = redis.info("commandstats")
    return sum(each["calls"] for each in told.values())


def _share(stack: Stack, seconds: float) -> dict[str, float]:
    """Percent of one core, by part, over so many seconds."""
    processes = {name: stack.part(command) for name, command in _PARTS.items()}
    before = {name: _used_s(process) for name, process in processes.items()}
    began = time.monotonic()
    time.sleep(seconds)  # noqa: TID251 (the period that is measured)
    took = time.monotonic() - began
    return {
        name: 100 * (_used_s(process) - before[name]) / took for name, process in processes.items()
    }


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
