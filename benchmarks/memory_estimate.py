"""Estimated against measured peaks of memory, on CPU ranks.

    python -m benchmarks.memory_estimate

Measured is the peak of live tensor storage in the second and third step of training, by a
dispatch mode in each rank; the rank that held most counts.
"""

from __future__ import annotations

import sys
from statistics import median

from tests.engine.gang import Gangs
from tests.plan.suite import CASES, estimated, measured


def main() -> None:
    """Prints a row for each model and layout, then the median and the largest error."""
    gangs, errors = Gangs("cpu"), []
    _print(
        f"{'model and layout':<40}{'ranks':>6}{'measured':>12}{'estimated':>12}{'off':>8}  peak in"
    )
    for case in sorted(CASES.values(), key=lambda case: case.plan.mesh.ranks):
        ranks = case.plan.mesh.ranks
        held = max(gangs(ranks).run(measured, case.name))
        peak = estimated(case).peak
        errors.append(abs(peak.memory.total / held - 1))
        _print(
            f"{case.name:<40}{ranks:>6}{held:>12,}{peak.memory.total:>12,}"
            f"{peak.memory.total / held - 1:>8.2%}  {peak.where} {peak.unit}"
        )
    _print(f"{len(errors)} cases: median {median(errors):.2%}, largest {max(errors):.2%}")
    gangs.close()


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
