"""Plans as data, and applied to a model."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from pydantic import TypeAdapter
from torch.distributed.tensor import DTensor

from fsdp_core.errors import PlanError
from fsdp_core.plan.apply import apply_plan
from fsdp_core.plan.model import MeshPlan, ShardingPlan, UnitPlan, matches
from fsdp_core.plan.model.resolve import resolve_units
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import BLOCKS, decoder
from tests.engine.sharded import backward_once, states

NAMES = [
    "",
    "embed",
    "blocks",
    "blocks.0",
    "blocks.0.mlp",
    "blocks.1",
    "blocks.1.mlp",
    "norm",
    "head",
]


def plan(*units: UnitPlan, ranks: int = 2) -> ShardingPlan:
    return ShardingPlan(MeshPlan(dp_shard=ranks), units, param_dtype="bf16", reduce_dtype="fp32")


def resolved(*units: UnitPlan) -> list[tuple[str, ...]]:
    return [unit.names for unit in resolve_units(plan(*units), NAMES)]


def test_a_plan_survives_json() -> None:
    adapter = TypeAdapter(ShardingPlan)
    given = plan(UnitPlan(("blocks.*",)), UnitPlan(("norm", "head"), reshard_after_forward=False))
    assert adapter.validate_json(adapter.dump_json(given)) == given
    assert adapter.validate_python(json.loads(json.dumps(dataclasses.asdict(given)))) == given


def test_a_star_stands_for_one_segment() -> None:
    assert matches("blocks.*", "blocks.0")
    assert matches("*", "head")
    assert matches("blocks.*.mlp", "blocks.1.mlp")
    assert matches("", "")
    assert not matches("blocks.*", "blocks")
    assert not matches("blocks.*", "blocks.0.mlp")
    assert not matches("*", "")
    assert not matches("block*", "blocks")


def test_units_are_applied_bottom_up_with_the_root_last() -> None:
    assert resolved() == [("",)]
    assert resolved(UnitPlan(("",)), UnitPlan(("blocks.*",)), UnitPlan(("blocks.*.mlp",))) == [
        ("blocks.0.mlp",),
        ("blocks.1.mlp",),
        ("blocks.0",),
        ("blocks.1",),
        ("",),
    ]
    assert resolved(UnitPlan(("norm", "head"))) == [("norm", "head"), ("",)]


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ((UnitPlan(("layers.*",)),), r"Pattern 'layers\.\*' of the plan matches no module"),
        ((UnitPlan(("norm", "absent")),), "Pattern 'absent' of the plan matches no module"),
        ((UnitPlan(("blocks.*",)), UnitPlan(("blocks.1",))), r"'blocks\.1' is claimed by two"),
    ],
)
def test_plans_that_do_not_fit_are_refused(units: tuple[UnitPlan, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve_units(plan(*units), NAMES)


def test_impossible_plans_cannot_be_made() -> None:
    with pytest.raises(PlanError, match=r"mesh\.tp is 0"):
        MeshPlan(tp=0)
    with pytest.raises(PlanError, match="at least one module"):
        UnitPlan(())
    with pytest.raises(PlanError, match="stands alone"):
        UnitPlan(("blocks.*", "head"))
    with pytest.raises(PlanError, match="unit of its own"):
        UnitPlan(("", "head"))
    with pytest.raises(PlanError, match="version 2"):
        ShardingPlan(MeshPlan(), version=2)


@pytest.mark.ranks
def test_a_plan_shards_the_model(gangs: Gangs) -> None:
    gangs(2).run(check_applied)


def check_applied(ctx: RankContext) -> None:
    model = decoder()
    given = plan(UnitPlan(("blocks.*",), reshard_after_forward=False))
    assert apply_plan(model, given, ctx.mesh) is model
    assert all(isinstance(param, DTensor) for param in model.parameters())
    found = states(model)
    assert len(found) == BLOCKS + 1
    assert [s.options.reshard_after_forward for s in found] == [None] + [False] * BLOCKS
    backward_once(ctx, model)
    assert model.embed.weight.dtype == torch.float32
    assert found[0].params[0].compute_dtype == torch.bfloat16
    with pytest.raises(PlanError, match=r"a mesh of \{'dp_shard': 3\}, and this one has .* 2"):
        apply_plan(decoder(), plan(ranks=3), ctx.mesh)
    with pytest.raises(PlanError, match=r"a mesh of \{'dp_replicate': 2, 'dp_shard': 1\}"):
        apply_plan(decoder(), ShardingPlan(MeshPlan(dp_replicate=2)), ctx.mesh)
