"""A search for a layout of Llama 3's shapes, on nodes of eight ranks.

    python -m benchmarks.layout_search [--shape 8B] [--ranks 64] [--gib 80 10] [--batch 1024]

Profiles the model once, then asks for a layout with each of the given memories. The rates of a
node are assumed, not measured: about what an H100 with its links and network reaches.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from time import process_time

from benchmarks.llama import Llama, next_token_loss
from benchmarks.scale_on_paper import LENGTH, SHAPES, SPLIT
from fsdp_core.plan.model import (
    ADAMW_FUSED,
    Candidate,
    LayoutAnswer,
    LayoutQuestion,
    NodeFacts,
    Seats,
    Workload,
    conditions_for,
    search_layout,
)
from fsdp_core.plan.profiling import profile_model
from fsdp_core.plan.study import ModelUnderStudy

PER_NODE = 8
ASSUMED = NodeFacts(
    matmul_flops={"bf16": 6e14},
    memory_bandwidth=3e12,
    link_bandwidth=3e11,
    network_bandwidth=4.5e10,
    collective_latency=2e-5,
    ranks=PER_NODE,
)


def main() -> None:
    """Prints an answer for each memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="8B")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--gib", type=float, nargs="+", default=[80, 10])
    parser.add_argument("--batch", type=int, default=1024, help="sequences of 4096 tokens")
    parser.add_argument("--rows", type=int, default=10, help="alternatives shown")
    chosen = parser.parse_args()
    questions = [
        LayoutQuestion(
            Seats(chosen.ranks, PER_NODE, int(gib * (1 << 30)), ASSUMED),
            Workload(chosen.batch, ADAMW_FUSED, param_dtype="bf16", reduce_dtype="fp32"),
            splits=SPLIT,
        )
        for gib in chosen.gib
    ]
    study = ModelUnderStudy(
        partial(Llama, SHAPES[chosen.shape]),
        partial(next_token_loss, length=LENGTH),
        tensor_parallel=SPLIT,
    )
    profile = profile_model(study, conditions_for(questions[0]), sizes=(1, 2))
    for gib, question in zip(chosen.gib, questions, strict=True):
        began = process_time()
        answer = search_layout(profile, question)
        took = process_time() - began
        _print(f"{chosen.shape}, {chosen.ranks} ranks of {gib:g} GiB, batch {chosen.batch}:")
        _print(
            f"{answer.considered} layouts, {answer.estimated} of them followed step by step, "
            f"{took:.2f} s of one core"
        )
        _show(answer, chosen.rows)


def _show(answer: LayoutAnswer, rows: int) -> None:
    for reason in answer.reasons:
        _print(f"  {reason}")
    _print(f"  {'mesh':<13}{'batch':<8}{'units':<36}{'GiB':>7}{'s':>8}")
    assert answer.best is not None  # noqa: S101 - the batch divides
    _print(f"  {_row(answer.best)}  {'chosen' if answer.feasible else 'needs least'}")
    for each in answer.alternatives[:rows]:
        _print(f"  {_row(each.candidate)}  {each.why}")
    for advice in answer.advice:
        _print(f"  would fit: {advice.text}")
    _print("")


def _row(candidate: Candidate) -> str:
    mesh, cost = candidate.plan.mesh, candidate.estimate
    batch = f"{candidate.micro_batch} x {candidate.accumulation}"
    time = "" if cost.time is None else f"{cost.time.total:.2f}"
    return (
        f"{f'{mesh.dp_replicate} x {mesh.dp_shard} x {mesh.tp}':<13}{batch:<8}"
        f"{_units(candidate):<36}{cost.peak.memory.total / (1 << 30):>7.1f}{time:>8}"
    )


def _units(candidate: Candidate) -> str:
    units = candidate.plan.units
    if not units:
        return "one"
    words = ["blocks" if len(units) == 1 else "apart"]
    if units[0].reshard_after_forward is False:
        words.append("kept")
    elif units[0].reshard_after_forward is not None:
        words.append(f"slices for {units[0].reshard_after_forward}")
    if units[0].recompute:
        words.append("recomputed")
    if units[0].prefetch is not None:
        words.append(f"prefetch {units[0].prefetch}")
    return ", ".join(words)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
