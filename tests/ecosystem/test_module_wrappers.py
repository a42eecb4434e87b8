"""Activation checkpointing and compiled blocks train as under the reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ecosystem.engines import Engine, Trace, compare, steps
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import Decoder, decoder

pytestmark = pytest.mark.ranks


class Reentrant(nn.Module):
    """Calls a block under the reentrant kind of checkpointing."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.block, x, use_reentrant=True)
        return result


class NonReentrant(Reentrant):
    """Calls a block under the other kind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


def unit_in_wrapper(wrapper: type[nn.Module]) -> Callable[[RankContext, Engine], nn.Module]:
    """Each unit is inside its wrapper: recomputation runs the unit's own hooks."""

    def build(ctx: RankContext, engine: Engine) -> nn.Module:
        model = decoder().to(ctx.device)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrapper(engine.fully_shard(block, mesh=ctx.mesh))
        return root(ctx, engine, model)

    return build


def wrapper_in_unit(wrap: Callable[[nn.Module], nn.Module]) -> Callable[..., nn.Module]:
    """Each unit is a wrapped block: recomputation is inside the unit."""

    def build(ctx: RankContext, engine: Engine) -> nn.Module:
        model = decoder().to(ctx.device)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = engine.fully_shard(wrap(block), mesh=ctx.mesh)
        return root(ctx, engine, model)

    return build


def root(ctx: RankContext, engine: Engine, model: Decoder) -> nn.Module:
    whole: nn.Module = engine.fully_shard(model, mesh=ctx.mesh)
    return whole


def with_checkpoint_wrapper(block: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: PLC0415 - it loads the reference
        checkpoint_wrapper,
    )

    return checkpoint_wrapper(block)


def with_composable_checkpoint(block: nn.Module) -> nn.Module:
    from torch.distributed._composable.checkpoint_activation import (  # noqa: PLC0415 - it loads the reference
        checkpoint as composable,
    )

    composable(block)
    return block


def compiled_in_place(block: nn.Module) -> nn.Module:
    block.compile(backend="aot_eager")
    return block


def compiled_wrapper(block: nn.Module) -> nn.Module:
    wrapped = torch.compile(block, backend="aot_eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped


WAYS = {
    "non-reentrant around the unit": unit_in_wrapper(NonReentrant),
    "reentrant around the unit": unit_in_wrapper(Reentrant),
    "non-reentrant in the unit": wrapper_in_unit(NonReentrant),
    "reentrant in the unit": wrapper_in_unit(Reentrant),
    "checkpoint_wrapper": wrapper_in_unit(with_checkpoint_wrapper),
    "composable": wrapper_in_unit(with_composable_checkpoint),
}
COMPILED = {
    "in place": wrapper_in_unit(compiled_in_place),
    "wrapper": wrapper_in_unit(compiled_wrapper),
}


@pytest.mark.parametrize("way", WAYS)
def test_checkpointed_activations_change_no_bit(gangs: Gangs, way: str) -> None:
    gangs(2).run(train_checkpointed, way)


@pytest.mark.system
@pytest.mark.parametrize("way", COMPILED)
def test_compiled_blocks_train_as_under_the_reference(gangs: Gangs, way: str) -> None:
    gangs(2).run(train_compiled, way)


def train_checkpointed(ctx: RankContext, way: str) -> None:
    trace = compare(lambda engine: train(ctx, engine, WAYS[way]))
    plain = compare(lambda engine: train(ctx, engine, wrapper_in_unit(lambda block: block)))
    assert trace.losses == plain.losses


def train_compiled(ctx: RankContext, way: str) -> None:
    def run(engine: Engine) -> Trace:
        torch._dynamo.reset()
        with warnings.catch_warnings():
            # Dynamo looks whether each input has a gradient, leaf or not.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            return train(ctx, engine, COMPILED[way])

    trace = compare(run)
    eager = compare(lambda engine: train(ctx, engine, wrapper_in_unit(lambda block: block)))
    assert trace.losses == pytest.approx(eager.losses, rel=1e-5)


def train(
    ctx: RankContext, engine: Engine, build: Callable[[RankContext, Engine], nn.Module]
) -> Trace:
    model = build(ctx, engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return steps(ctx, model, optimizer, range(3))
