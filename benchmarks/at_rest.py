"""What the services take of the processor while nothing happens, and while one job trains.

    python -m benchmarks.at_rest [--seconds 30]

A local stack: Redis, controller and agent with the processes that it keeps warm. Printed is the processor
time of each in percent of one core: with no job, with one job of two CPU ranks, and after it has ended.
The ranks themselves do not count. A job's steps are short, so its ranks report as often as they may.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

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
        _print("no job", _share(stack, seconds))
        job = stack.submit(train={"steps": 10**6, "global_batch": 4, "seed": 7})
        until(lambda: stack.client.job(job.id).progress.step > 0)
        _print("one job of two ranks", _share(stack, seconds))
        stack.client.kill(job.id)
        until(lambda: stack.client.job(job.id).state is JobState.CANCELLED)
        _print("after it", _share(stack, seconds))


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


def _print(when: str, shares: Mapping[str, float]) -> None:
    parts = ", ".join(f"{name} {share:.1f}" for name, share in shares.items())
    sys.stdout.write(f"{when}: {sum(shares.values()):.1f} % of a core ({parts})\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
