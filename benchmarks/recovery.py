"""How long until the next step after a kill of a rank, of the warm process, or of the agent.

    python -m benchmarks.recovery [--rounds 5] [--only rank "warm process" agent]

A local stack, which starts its agent again by itself, and a job of two CPU ranks that checkpoints
each 20 steps. By turns one of the three is killed with SIGKILL; the figure is the time from there to
the first step of the next attempt. Printed are the median, the lowest and the highest of the rounds,
and what the template takes in memory.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from tests.e2e.conftest import Stack, running_stack
from tests.waiting import until

_EVERY_STEPS = 20
_MIB = 1 << 20


def main() -> None:
    """Kills in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=_VICTIMS, default=_VICTIMS, help="these")
    chosen = parser.parse_args()
    rounds, victims = chosen.rounds, {name: _VICTIMS[name] for name in chosen.only}
    found: dict[str, list[float]] = {name: [] for name in victims}
    with (
        tempfile.TemporaryDirectory(prefix="meshloom-recovery-") as folder,
        running_stack(Path(folder)) as stack,
    ):
        job_id = stack.submit(
            train={"steps": 10**6, "global_batch": 4, "seed": 7},
            checkpoint={"every_steps": _EVERY_STEPS},
            faults={"max_restarts": 3 * rounds},
        ).id
        for _ in range(rounds):
            for name, find in victims.items():
                found[name].append(_recovery(stack, job_id, find))
        template = psutil.Process(_warm(stack, job_id).ppid()).memory_full_info()
    for name, seconds in found.items():
        sys.stdout.write(
            f"{name} killed: next step after {statistics.median(seconds):.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} times)\n"
        )
    sys.stdout.write(
        f"template: {template.rss / _MIB:.0f} MiB resident, of which {template.uss / _MIB:.0f} MiB "
        f"are its own alone; its share by PSS is {template.pss / _MIB:.0f} MiB\n"
    )


def _recovery(stack: Stack, job_id: str, find: Callable[[Stack, str], psutil.Process]) -> float:
    """Seconds from a kill to the first step of the next attempt."""
    before = until(lambda: _committed(stack, job_id))
    killed_at = datetime.now(UTC)
    find(stack, job_id).kill()

    def restarted() -> float | None:
        last = stack.client.attempts(job_id).items[-1]
        if last.fence == before or last.first_step_at is None:
            return None
        return (last.first_step_at - killed_at).total_seconds()

    return until(restarted)


def _committed(stack: Stack, job_id: str) -> int | None:
    """The job's attempt, once it has committed a checkpoint."""
    newest = max((each.fence for each in stack.client.attempts(job_id).items), default=0)
    checkpoints = stack.client.checkpoints(job_id).items
    has_committed = any(c.fence == newest and c.committed_at for c in checkpoints)
    return newest if has_committed else None


def _rank(stack: Stack, job_id: str) -> psutil.Process:
    """Rank 1, as soon as a beat of its agent has named its process."""

    def found() -> psutil.Process | None:
        ranks = stack.client.ranks(job_id).items
        pid = next((rank.pid for rank in ranks if rank.rank == 1), None)
        return psutil.Process(pid) if pid and psutil.pid_exists(pid) else None

    return until(found)


def _warm(stack: Stack, job_id: str) -> psutil.Process:
    return psutil.Process(_rank(stack, job_id).ppid())


_VICTIMS: Final[dict[str, Callable[[Stack, str], psutil.Process]]] = {
    "rank": _rank,
    "warm process": _warm,
    "agent": lambda stack, _: stack.part("services.worker.agent"),
}


if __name__ == "__main__":
    main()
