"""One piece of training, run with the engine and with the reference, and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_core
from tests.engine.gang import RankContext
from tests.engine.models import Decoder, decoder, loss_of, tokens_of


@dataclass(frozen=True)
class Engine:
    """What a script imports, from us or from the reference."""

    fully_shard: Callable[..., Any]
    register_fsdp_forward_method: Callable[[nn.Module, str], None]


@dataclass
class Trace:
    """Everything that must agree."""

    losses: list[float] = field(default_factory=list)
    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def note(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())

    def note_all(self, label: str, model: nn.Module) -> None:
        """This rank's slices of parameters and gradients."""
        for name, param in model.named_parameters():
            self.tensors[f"{label}: {name}"] = slice_of(param)
            grad = param.grad
            self.tensors[f"{label}: gradient of {name}"] = None if grad is None else slice_of(grad)


OURS = Engine(fsdp_core.fully_shard, fsdp_core.register_fsdp_forward_method)


def theirs() -> Engine:
    """The reference; loaded in ranks only, and only when asked for."""
    import torch.distributed.fsdp as reference  # noqa: PLC0415 - only the oracle may load it

    return Engine(reference.fully_shard, reference.register_fsdp_forward_method)


def compare(train: Callable[[Engine], Trace]) -> Trace:
    """Fails unless both engines leave the same trace; returns it."""
    mine = train(OURS)
    reference = train(theirs())
    assert mine.losses == reference.losses
    assert len(mine.losses) > 0
    assert mine.tensors.keys() == reference.tensors.keys()
    for name, tensor in mine.tensors.items():
        other = reference.tensors[name]
        if tensor is None or other is None:
            assert tensor is other, name
        else:
            assert tensor.dtype == other.dtype, name
            assert torch.equal(tensor, other), name
    return mine


def sharded_decoder(ctx: RankContext, engine: Engine, model: Decoder | None = None) -> Any:  # noqa: ANN401 - a class of either engine
    """A decoder with one unit per block and the root."""
    model = decoder().to(ctx.device) if model is None else model
    for block in model.blocks:
        engine.fully_shard(block, mesh=ctx.mesh)
    return engine.fully_shard(model, mesh=ctx.mesh)


def backward(ctx: RankContext, model: nn.Module, step: int = 0) -> torch.Tensor:
    """Forward and backward on this rank's tokens of a step; returns the loss."""
    loss = loss_of(model, tokens_of(step, ctx.rank).to(ctx.device))
    torch.autograd.backward(loss)
    return loss.detach()


def steps(
    ctx: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterable[int]
) -> Trace:
    """A few plain steps."""
    trace = Trace()
    for step in numbers:
        trace.note(backward(ctx, model, step))
        optimizer.step()
        optimizer.zero_grad()
    trace.note_all("after", model)
    return trace


def slice_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's part."""
    local = tensor.detach()
    return (local.to_local() if isinstance(local, DTensor) else local).clone()
