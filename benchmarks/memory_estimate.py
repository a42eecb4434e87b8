"""Estimated against measured peaks of memory, on CPU ranks.

    python -m benchmarks.memory_estimate [part of a name ...]

Measured are steps after the first, in a process that has trained the model before: `allocated` is
the most that malloc gave out of blocks of a page and more, in all threads and within operators
(`fsdp_core/plan/allocator_peak.py`); `tensors` is the peak of live tensor storage. The rank that
held most counts. Names choose cases.
"""

from __future__ import annotations

import os
import sys
from statistics import median

from tests.engine.gang import Gang, Gangs
from tests.plan.suite import CASES, SHARED, estimated, measured
from tests.plan.wide_suite import WIDE, measured_wide


def main() -> None:
    """Prints a row for each model and layout, then how the errors are spread."""
    gangs, errors = Gangs("cpu"), []
    _print(f"load of {os.cpu_count()} processors: {os.getloadavg()[0]:.1f}")
    _print(
        f"{'model and layout':<40}{'ranks':>6}{'tensors':>13}{'allocated':>13}{'estimated':>13}"
        f"{'off':>9}{'workspace':>12}  peak in"
    )
    wanted = sys.argv[1:] or [""]
    cases = {**CASES, **WIDE, **SHARED}.values()
    for case in sorted(cases, key=lambda case: case.plan.mesh.ranks):
        if not any(part in case.name for part in wanted):
            continue
        ranks = case.plan.mesh.ranks
        measure = measured_wide if case.name in WIDE else measured
        # What earlier cases left in memory that ranks share would be used again.
        own = Gang(ranks, "cpu") if case.name in SHARED else None
        held = (own or gangs(ranks)).run(measure, case.name)
        if own is not None:
            own.close()
        tensors, allocated = (max(each) for each in zip(*map(tuple, held), strict=True))
        peak = estimated(case).peak
        errors.append(peak.memory.total / allocated - 1)
        _print(
            f"{case.name:<40}{ranks:>6}{tensors:>13,}{allocated:>13,}{peak.memory.total:>13,}"
            f"{errors[-1]:>9.2%}{peak.memory.workspace:>12,}  {peak.where} {peak.unit}"
        )
    sizes = [abs(error) for error in errors]
    _print(
        f"{len(sizes)} cases: median {median(sizes):.2%}, {sum(s <= 0.1 for s in sizes)} within "  # noqa: PLR2004 - a tenth
        f"10 %, from {min(errors):.2%} to {max(errors):.2%}"
    )
    gangs.close()


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
