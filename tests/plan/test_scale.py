"""The engine as one rank of very many, on tensors without memory, against the estimate."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.llama import Llama, Shape, next_token_loss
from benchmarks.one_of_many import Step, step_of_one
from benchmarks.scale_on_paper import SPLIT, UNITS
from fsdp_core.plan.model import (
    ADAMW_FUSED,
    Conditions,
    MeshPlan,
    ModelProfile,
    ShardingPlan,
    Training,
    estimate,
)
from fsdp_core.plan.profiling import profile_model
from fsdp_core.plan.study import ModelUnderStudy

SHAPE = Shape(dim=256, layers=2, heads=8, kv_heads=4, hidden=384, vocab=1000)
STUDY = ModelUnderStudy(
    partial(Llama, SHAPE), partial(next_token_loss, length=32), tensor_parallel=SPLIT
)
MESHES = (
    MeshPlan(dp_shard=8),
    MeshPlan(dp_shard=64),
    MeshPlan(dp_shard=4096),
    MeshPlan(dp_replicate=64, dp_shard=16, tp=4),
)


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_model(
        STUDY,
        tuple(
            Conditions("bf16", recompute=again, tp=tp) for again in (False, True) for tp in (1, 4)
        ),
        sizes=(1,),
    )


def plan_over(mesh: MeshPlan) -> ShardingPlan:
    return ShardingPlan(
        mesh,
        UNITS,
        param_dtype="bf16",
        reduce_dtype="fp32",
        tensor_parallel=SPLIT if mesh.tp > 1 else (),
    )


@pytest.fixture(scope="module")
def steps() -> dict[MeshPlan, Step]:
    return {mesh: step_of_one(STUDY.make, STUDY.loss, plan_over(mesh)) for mesh in MESHES}


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.ranks}-{mesh.tp}")
def test_one_rank_of_many_holds_what_was_estimated(
    mesh: MeshPlan, profile: ModelProfile, steps: dict[MeshPlan, Step]
) -> None:
    found = estimate(
        profile, plan_over(mesh), Training(1, optimizer=ADAMW_FUSED), only_tensors=True
    )
    assert abs(found.peak.memory.total / steps[mesh].peak - 1) < 0.01
    assert {axis: n for axis, n in found.collectives.items() if n} == steps[mesh].collectives


def test_a_rank_launches_as_much_however_many_there_are(steps: dict[MeshPlan, Step]) -> None:
    few, more, many, _ = (steps[mesh].operators for mesh in MESHES)
    assert few == more == many
