"""Pieces of work on sharded models, for functions that run in ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp_core.runtime import FSDPState
from tests.engine.gang import RankContext
from tests.engine.models import Decoder, decoder, loss_of, tokens_of


def shard_decoder(
    ctx: RankContext,
    model: Decoder | None = None,
    *,
    reshard: bool | None = None,
    policy: MixedPrecisionPolicy | None = None,
) -> Decoder:
    """A decoder with one unit per block and the root."""
    model = decoder().to(ctx.device) if model is None else model
    policy = policy or MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=ctx.mesh, reshard_after_forward=reshard, mp_policy=policy)
    return model


def backward_once(ctx: RankContext, model: Decoder, step: int = 0) -> torch.Tensor:
    """Forward and backward on this rank's tokens; returns the loss."""
    loss = loss_of(model, tokens_of(step, ctx.rank).to(ctx.device))
    torch.autograd.backward(loss)
    return loss.detach()


def unit(module: nn.Module) -> FSDPModule:
    """The module, seen as what `fully_shard` made of it."""
    assert isinstance(module, FSDPModule)
    return module


def state(module: nn.Module) -> FSDPState:
    """The module's state."""
    found = fully_shard.state(module)
    assert found is not None
    return found


def states(module: nn.Module) -> list[FSDPState]:
    """All states below the module."""
    return [found for m in module.modules() if (found := fully_shard.state(m)) is not None]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The slice of a DTensor, aliasing it."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local()


def held_unsharded_bytes(module: nn.Module) -> int:
    """Bytes of whole parameters that are allocated below the module."""
    return sum(param.unsharded().held_bytes for found in states(module) for param in found.params)
