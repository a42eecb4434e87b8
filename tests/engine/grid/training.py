"""Some steps in the way of a cell, by either engine or by one process without any."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.engine.gang import RankContext
from tests.engine.grid.cell import Accumulate, Cell, Precision, Weights
from tests.engine.grid.engines import Engine
from tests.engine.grid.model import Net, loss_of, net, tokens_of


@dataclass
class Trace:
    """What two trainings must agree on.

    Attributes:
        losses: One per microbatch.
        grads: One dict of slices per step; None where there is no gradient.
        params: Slices after the last step, or whole parameters of one process.
        whole: The parameters put together.
    """

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)


def train(ctx: RankContext, cell: Cell, engine: Engine, steps: int) -> Trace:
    """Trains the cell's model; collective over all ranks."""
    model = sharded_net(ctx, cell, engine)
    optimizer = sgd(model)
    trace = Trace()
    for step in range(steps):
        trace.losses += backwards_of_step(ctx, cell, model, step)
        trace.grads.append({name: _slice(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    model.state_dict()  # hangs the slices on all modules
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), name
        trace.params[name] = param.to_local().detach().clone()
        # The device's process group knows no memory of the host.
        moved = param.detach().to(ctx.device)
        assert isinstance(moved, DTensor), name
        trace.whole[name] = moved.full_tensor()
    return trace


def backwards_of_step(ctx: RankContext, cell: Cell, model: Any, step: int) -> list[float]:  # noqa: ANN401 - a class of either engine
    """Forward and backward of each microbatch of a step; returns the losses."""
    data_rank = ctx.rank * cell.data_ranks // ctx.world
    losses = []
    for micro in range(cell.microbatches):
        is_last = micro == cell.microbatches - 1
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last or cell.accumulate != "without sync")
        tokens = tokens_of(step, micro, data_rank).to(ctx.device)
        loss = loss_of(model(tokens), tokens)
        torch.autograd.backward(loss)
        losses.append(loss.item())
    return losses


@cache
def train_alone(
    precision: Precision,
    weights: Weights,
    accumulate: Accumulate,
    data_ranks: int,
    device: str,
    steps: int,
) -> Trace:
    """One process, no engine, on the batches of all ranks.

    In fp32 they are joined. In bf16 they are passed one after the other: sums over a longer batch,
    such as the gradient of an embedding, would be rounded more than those to be compared.
    """
    microbatches = 1 if accumulate == "no" else 2
    model = net(weights).to(device)
    optimizer = sgd(model)
    trace = Trace()
    for step in range(steps):
        for micro in range(microbatches):
            batches = [tokens_of(step, micro, rank).to(device) for rank in range(data_ranks)]
            if precision == "fp32":
                batches = [torch.cat(batches)]
            losses = [_backward_alone(model, precision, tokens, len(batches)) for tokens in batches]
            trace.losses.append(sum(losses))
        optimizer.step()
        optimizer.zero_grad()
    trace.whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    return trace


def _backward_alone(
    model: nn.Module, precision: Precision, tokens: torch.Tensor, parts: int
) -> float:
    """A batch's share in the loss and the gradients of ``parts`` equal ones."""
    params: dict[str, torch.Tensor] = dict(model.named_parameters())
    if precision == "bf16":
        params = {name: p.to(torch.bfloat16) for name, p in params.items()}
    loss = loss_of(torch.func.functional_call(model, params, (tokens,)), tokens) / parts
    torch.autograd.backward(loss)
    return loss.item()


def sharded_net(ctx: RankContext, cell: Cell, engine: Engine) -> Any:  # noqa: ANN401 - a class of either engine
    """The cell's model, ready to train."""
    model = _shard(ctx, cell, engine, is_meta=cell.meta)
    if cell.meta:
        values = _shard(ctx, cell, engine, is_meta=False)
        model.to_empty(device="cpu" if cell.offloaded else ctx.device)
        model.load_state_dict(values.state_dict())
    return model


def _shard(ctx: RankContext, cell: Cell, engine: Engine, *, is_meta: bool) -> Any:  # noqa: ANN401 - a class of either engine
    if is_meta:
        with torch.device("meta"):
            model = Net(cell.weights, checkpointed=cell.checkpointed)
    else:
        model = net(cell.weights, checkpointed=cell.checkpointed).to(ctx.device)
    mesh = ctx.mesh
    if cell.mesh == "HSDP":
        mesh = _mesh(ctx.device.type, "dp_replicate", "dp_shard")
    if cell.mesh == "TP":
        mesh = _mesh(ctx.device.type, "dp_shard", "tp")
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        mesh = mesh["dp_shard"]
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": cell.reshard}
    if cell.precision == "bf16":
        options["mp_policy"] = engine.precision(torch.bfloat16, torch.float32)
    if cell.offloaded:
        # The reference cannot pin memory without an accelerator.
        options["offload_policy"] = engine.offload(pin_memory=ctx.device.type != "cpu")
    blocks = list(model.blocks)
    units: list[Any] = [blocks[:2], blocks[2]] if cell.grouped else blocks
    for unit in [*units, model]:
        engine.fully_shard(unit, **options)
    # The engine that packs as the reference is asked to; an engine that can do nothing else
    # need not know the request.
    choose_packing = getattr(model, "set_agree_on_unused_params", None)
    if engine.packs_as_reference and choose_packing is not None:
        choose_packing(False)  # noqa: FBT003 - the setter's only argument
    return model


@cache
def _mesh(device_type: str, *axes: str) -> DeviceMesh:
    # A mesh makes process groups, which live as long as the rank.
    return init_device_mesh(device_type, (2, 2), mesh_dim_names=axes)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With momentum: an optimizer with state, which amplifies no rounding as Adam's does."""
    # Not foreach: tensor-parallel and plain parameters lie on different meshes.
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, foreach=False)


def _slice(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach().clone()
