"""What plans estimate of memory beside what real ranks on CPUs took, for models of several sizes.

    python -m benchmarks.measured_memory

A stack of its own plans each decoder for two ranks and trains it by that plan for a few steps.
Measured is what ``GET /v1/jobs/{id}`` then shows: the kernel's high-water mark of a step, without
files and without what the process held before it built the model. Resident is all of the process.
"""

import sys
import tempfile
from pathlib import Path
from typing import Final

from services.cli.plan_command import planned
from services.contract.words.states import JobState, PlanState
from tests.e2e.conftest import Stack, running_stack

SIZES: Final = ((128, 4), (256, 6), (384, 8), (512, 8), (768, 8))
RANKS: Final = 2
_HEADS: Final = 4
_MIB: Final = 1 << 20


def main() -> None:
    """Prints a row for each size."""
    _print(
        f"{'decoder':<16}{'parameters':>12}{'estimated MiB':>14}{'measured MiB':>14}{'ratio':>7}"
        f"{'resident MiB':>14}"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        running_stack(Path(folder), MESHLOOM_PLAN_WAIT_S="60") as stack,
    ):
        for dim, layers in SIZES:
            _print(_row(stack, dim, layers))


def _row(stack: Stack, dim: int, layers: int) -> str:
    plan = planned(stack.client, _spec(dim, layers))
    if plan.state is not PlanState.READY or not plan.feasible:
        return f"{dim} x {layers}: {plan.reason}"
    job = stack.rested(stack.client.submit({"plan_id": plan.id}).id, timeout_s=600)
    found = job.estimate
    if job.state is not JobState.SUCCEEDED or found is None or not found.measured_peak_bytes:
        return f"{dim} x {layers}: {job.reason}"
    resident = max(rank.memory_bytes for rank in stack.client.ranks(job.id).items)
    parameters = sum(unit.parameters for unit in plan.units)
    return (
        f"{f'{dim} x {layers}':<16}{parameters:>12,}{found.peak.total / _MIB:>14.1f}"
        f"{found.measured_peak_bytes / _MIB:>14.1f}{found.ratio:>7.2f}{resident / _MIB:>14.1f}"
    )


def _spec(dim: int, layers: int) -> dict[str, object]:
    return {
        "name": f"decoder-{dim}-{layers}",
        "model": {
            "factory": "decoder",
            "args": {"dim": dim, "layers": layers, "heads": _HEADS},
        },
        "data": {"factory": "stdlib_bytes", "args": {"seq_len": 64}},
        "optimizer": {"factory": "adamw", "args": {"lr": 1e-4}},
        "train": {"steps": 6, "global_batch": 8, "micro_batch": 4, "seed": 7},
        "resources": {"ranks": RANKS, "device": "cpu"},
        "mesh": {"dp_shard": RANKS},
        "checkpoint": {"every_steps": 3},
    }


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
