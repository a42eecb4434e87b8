"""How long it takes to profile a decoder, in seconds of one processor.

    python -m benchmarks.profiling_time [--blocks 4 80] [--questions two four split]

Each row is a process of its own, as a probe is. "start" is until everything is imported that
profiling needs. "two" are the conditions that a search asks for, with and without recomputation;
"four" are these in fp32 and bf16; "split" are the first two, whole and with matrices split over 2.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial
from time import perf_counter, process_time

from fsdp_core.plan.model import Conditions, TensorParallelPlan

WIDTH, LENGTH, VOCAB = 192, 64, 512
RECOMPUTED = (False, True)
QUESTIONS = {
    "two": tuple(Conditions(recompute=again) for again in RECOMPUTED),
    "four": tuple(
        Conditions(dtype, recompute=again) for dtype in (None, "bf16") for again in RECOMPUTED
    ),
    "split": tuple(Conditions(recompute=again, tp=tp) for tp in (1, 2) for again in RECOMPUTED),
}
SPLIT = (
    TensorParallelPlan(
        tuple(
            f"blocks.*.{name}"
            for name in (
                "attention.query",
                "attention.key",
                "attention.value",
                "feed_forward.gate",
                "feed_forward.up",
            )
        ),
        "colwise",
    ),
    TensorParallelPlan(("blocks.*.attention.out", "blocks.*.feed_forward.down"), "rowwise"),
)


def main() -> None:
    """Prints a row for each number of blocks and question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 80])
    parser.add_argument("--questions", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS))
    parser.add_argument("--row", action="store_true", help="one alone, in this process")
    chosen = parser.parse_args()
    if chosen.row:
        _print(_row(chosen.blocks[0], chosen.questions[0]))
        return
    _print(f"load of {os.cpu_count()} processors: {os.getloadavg()[0]:.1f}")
    _print(f"{'blocks':>6} {'conditions':<11}{'start s':>9}{'profile s':>11}{'by clock s':>12}")
    for question in chosen.questions:
        for blocks in chosen.blocks:
            command = [sys.executable, "-m", "benchmarks.profiling_time", "--row"]
            asked = ["--blocks", str(blocks), "--questions", question]
            subprocess.run([*command, *asked], check=True)  # noqa: S603 - this very program


def _row(blocks: int, question: str) -> str:
    import torch  # noqa: PLC0415 - what it takes to start is measured
    import torch._dynamo  # noqa: PLC0415 - tensors without memory ask for its settings

    from fsdp_core.plan.profiling import profile_model  # noqa: PLC0415 - as above
    from fsdp_core.plan.study import ModelUnderStudy  # noqa: PLC0415 - as above
    from services.worker.rank.models.decoder import Decoder  # noqa: PLC0415 - as above
    from services.worker.rank.probe.passes import mean_loss  # noqa: PLC0415 - as above

    torch.set_num_threads(1)

    def loss(model: torch.nn.Module, batch: int) -> torch.Tensor:
        return mean_loss(model, torch.zeros(batch, LENGTH + 1, dtype=torch.int64))

    make = partial(Decoder, dim=WIDTH, layers=blocks, heads=4, vocab=VOCAB)
    started, began = process_time(), perf_counter()
    profile_model(ModelUnderStudy(make, loss, tensor_parallel=SPLIT), QUESTIONS[question])
    took, by_clock = process_time() - started, perf_counter() - began
    return f"{blocks:>6} {question:<11}{started:>9.1f}{took:>11.1f}{by_clock:>12.1f}"


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
