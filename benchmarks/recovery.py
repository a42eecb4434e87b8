"""How long until the next step after a kill of a rank, of the warm process, or of the agent.

    python -m benchmarks.recovery [--rounds 5] [--only rank "warm process" agent]

A local stack, which starts its agent again by itself, and a job of two CPU ranks that checkpoints
each 20 steps. By turns one of the three is killed with SIGKILL; the figure is the time from there to
the first step of the next attempt. Printed are the median, the lowest and the highest of the rounds,
where the median round's time went, and what the template takes in memory.

The parts, one after the other: *seen*, until the attempt has ended with its reason; *decided*, until the next one has
its nodes; *forked*, until rank 0 runs; *met*, until it has found the others; *built*, the model, its sharding and the
optimizer; *loaded*, the checkpoint; *first step*, until the controller knows of it. From *forked* to *loaded* they are read
from rank 0's board, each 5 ms.
"""

import argparse
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from services.contract.messages.board import BoardReader
from services.contract.words.states import RankPhase
from tests.e2e.conftest import Stack, running_stack
from tests.waiting import until

_EVERY_STEPS = 20
_MIB = 1 << 20
_BOARDS: Final = Path("/dev/shm")  # noqa: S108 where agents have them
_UNTIL: Final = {
    "forked": RankPhase.INIT,
    "met": RankPhase.BUILD,
    "built": RankPhase.LOAD,
    "loaded": RankPhase.DATA,
}


def main() -> None:
    """Kills in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=_VICTIMS, default=_VICTIMS, help="these")
    chosen = parser.parse_args()
    rounds, victims = chosen.rounds, {name: _VICTIMS[name] for name in chosen.only}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in victims}
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
    for name, recoveries in found.items():
        _report(name, recoveries)
    sys.stdout.write(
        f"template: {template.rss / _MIB:.0f} MiB resident, of which {template.uss / _MIB:.0f} MiB "
        f"are its own alone; its share by PSS is {template.pss / _MIB:.0f} MiB\n"
    )


def _report(name: str, recoveries: list[dict[str, float]]) -> None:
    by_time = sorted(recoveries, key=lambda parts: sum(parts.values()))
    seconds = [sum(parts.values()) for parts in by_time]
    sys.stdout.write(
        f"{name} killed: next step after {statistics.median(seconds):.2f} s "
        f"({seconds[0]:.2f} to {seconds[-1]:.2f}, {len(seconds)} times)\n"
    )
    middle = by_time[len(by_time) // 2]
    parts = ", ".join(f"{part} {each:.3f}" for part, each in middle.items())
    sys.stdout.write(f"    of a median round: {parts}\n")


def _recovery(
    stack: Stack, job_id: str, find: Callable[[Stack, str], psutil.Process]
) -> dict[str, float]:
    """Seconds from a kill to the first step of the next attempt, by part."""
    before = until(lambda: _committed(stack, job_id))
    with _phases(job_id, before + 1) as reached:
        killed_at = datetime.now(UTC)
        find(stack, job_id).kill()

        def restarted() -> list[datetime] | None:
            *others, last = stack.client.attempts(job_id).items
            if last.fence == before or last.first_step_at is None:
                return None
            ended = others[-1].ended_at
            return None if ended is None else [ended, last.started_at, last.first_step_at]

        seen, decided, stepped = until(restarted)
    moments = {"seen": seen, "decided": decided}
    moments |= {part: reached[phase] for part, phase in _UNTIL.items() if phase in reached}
    parts, last = {}, killed_at
    for part, moment in (*moments.items(), ("first step", stepped)):
        parts[part] = (moment - last).total_seconds()
        last = moment
    return parts


@contextmanager
def _phases(job_id: str, fence: int) -> Iterator[dict[RankPhase, datetime]]:
    """When rank 0 of this attempt came to each phase or a later one, while the block lasts."""
    reached: dict[RankPhase, datetime] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            for path in _BOARDS.glob(f"meshloom-*/{job_id}-{fence}/rank-0.board"):
                with suppress(ValueError, OSError):  # it has just been made
                    _note(path, reached)

    watching = threading.Thread(target=look)
    watching.start()
    try:
        yield reached
    finally:
        over.set()
        watching.join()


def _note(path: Path, reached: dict[RankPhase, datetime]) -> None:
    board = BoardReader.open(path)
    try:
        shown = board.read()
    finally:
        board.close()
    if shown is not None:
        for phase in RankPhase:
            if phase <= shown.phase:
                reached.setdefault(phase, datetime.now(UTC))


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
