"""Estimates for Llama 3's shapes on 8 to 4096 ranks, against one rank of the engine.

    python -m benchmarks.scale_on_paper [--worlds 8 64 512 4096] [--shapes 8B 70B]

The engine runs as rank 0 under PyTorch's fake process group, on tensors without memory: layouts,
allocations and launches are real, values and collectives are not. "ideal" is what parameters,
gradients and AdamW's state would be, cut without padding; "off" is the estimate's error.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from benchmarks.llama import LLAMA_8B, LLAMA_70B, Llama, next_token_loss
from benchmarks.one_of_many import step_of_one
from fsdp_core.plan.model import (
    ADAMW_FUSED,
    Conditions,
    MeshPlan,
    ModelProfile,
    ShardingPlan,
    TensorParallelPlan,
    Training,
    UnitPlan,
    estimate,
)
from fsdp_core.plan.profiling import profile_model
from fsdp_core.plan.study import ModelUnderStudy

SHAPES = {"8B": LLAMA_8B, "70B": LLAMA_70B}
LENGTH, TP = 4096, 8
SPLIT = (
    TensorParallelPlan(
        tuple(
            f"blocks.*.{name}"
            for name in ("attention.query", "attention.key", "attention.value", "gate", "up")
        ),
        "colwise",
    ),
    TensorParallelPlan(("blocks.*.attention.out", "blocks.*.down"), "rowwise"),
)
UNITS = (UnitPlan(("blocks.*",), recompute=True), UnitPlan(("norm", "head")))


def plans_for(ranks: int) -> dict[str, ShardingPlan]:
    """Fully sharded, and for many ranks also split and replicated."""
    how = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    meshes = {"": MeshPlan(dp_shard=ranks)}
    if ranks >= TP * TP * 2:
        meshes["x"] = MeshPlan(dp_replicate=ranks // (8 * TP), dp_shard=8, tp=TP)
    return {
        f"{m.dp_replicate} x {m.dp_shard} x {m.tp}": ShardingPlan(
            m,
            UNITS,
            tensor_parallel=SPLIT if m.tp > 1 else (),
            **how,  # type: ignore[arg-type]  # two words
        )
        for m in meshes.values()
    }


def main() -> None:
    """Prints a row for each shape, number of ranks and mesh."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    chosen = parser.parse_args()
    _print(
        f"{'shape':<6}{'ranks':>6} {'mesh':<14}{'ideal':>9}{'engine':>9}{'estimate':>9}{'off':>8}"
        f"{'started':>9}{'estimated':>10}{'operators':>10}{'host s':>8}  GiB; peak in"
    )
    for name in chosen.shapes:
        make = partial(Llama, SHAPES[name])
        loss = partial(next_token_loss, length=LENGTH)
        tps = (1, TP) if max(chosen.worlds) >= TP * TP * 2 else (1,)
        conditions = [
            Conditions("bf16", recompute=again, tp=tp) for tp in tps for again in (False, True)
        ]
        study = ModelUnderStudy(make, loss, tensor_parallel=SPLIT)
        profile = profile_model(study, conditions, sizes=(1,))
        for ranks in chosen.worlds:
            for mesh, plan in plans_for(ranks).items():
                _print(f"{name:<6}{ranks:>6} {mesh:<14}" + _row(study, profile, plan))


def _row(study: ModelUnderStudy, profile: ModelProfile, plan: ShardingPlan) -> str:
    found = estimate(profile, plan, Training(1, optimizer=ADAMW_FUSED), only_tensors=True)
    step = step_of_one(study.make, study.loss, plan)
    total = found.peak.memory.total
    started = sum(step.collectives.values())
    return (
        f"{_gib(_ideal(profile, plan)):>9}{_gib(step.peak):>9}{_gib(total):>9}"
        f"{total / step.peak - 1:>8.2%}{started:>9}{sum(found.collectives.values()):>9}"
        f"{step.operators:>11}{step.seconds:>8.1f}  {found.peak.where} {found.peak.unit}"
    )


def _ideal(profile: ModelProfile, plan: ShardingPlan) -> int:
    whole = sum(_numel(p.shape) * p.itemsize for p in profile.parameters)
    return 4 * whole // (plan.mesh.dp_shard * plan.mesh.tp)


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
