"""What is worked out once for a group follows every way in which its parameters become others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import FSDPModule, MixedPrecisionPolicy, SharedMemoryPolicy, fully_shard
from fsdp_core.comm import collectives
from tests.engine.gang import Gangs, RankContext
from tests.engine.versus import groups_of

pytestmark = pytest.mark.ranks

WIDTH = 6
STEPS = 6
POLICIES = [None, SharedMemoryPolicy(), SharedMemoryPolicy(share_storage=True)]
Change = Callable[[nn.Module], object]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(torch.tanh(self.linear(x)))
        return x + normed


class Watchful(Layer):
    """Sees each assignment of an attribute, as some libraries' modules do."""

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - of any kind
        super().__setattr__(name, value)


def assigned_state(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def other_dtype(model: nn.Module) -> None:
    model.to(torch.float64)


def frozen(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if "norm" in name:
            param.requires_grad_(not param.requires_grad)


def values_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.75)


def while_whole(model: nn.Module) -> None:
    layer = cast("Any", model)[1]
    if isinstance(layer, FSDPModule):
        layer.unshard()
    other_dtype(model)


def nothing(_: nn.Module) -> None:
    pass


CHANGES: list[Change] = [
    nothing,
    assigned_state,
    other_dtype,
    frozen,
    values_in_place,
    while_whole,
]


def layers(kind: type[Layer]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(3)))


def losses_and_gradients(ctx: RankContext, model: nn.Module, change: Change) -> list[torch.Tensor]:
    """Of steps between which the parameters are changed twice; gradients are whole."""
    seen = []
    for step in range(STEPS):
        if step in (2, 4):
            change(model)
        dtype = next(model.parameters()).dtype
        loss = model(ctx.batch(step, 3, WIDTH).to(dtype)).square().mean()
        torch.autograd.backward(loss)
        seen.append(loss.detach())
        dist.barrier()  # nobody computes with slices while they are written
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    seen.append(averaged(param.grad))
                    param.sub_(param.grad if isinstance(param, DTensor) else seen[-1], alpha=0.1)
                param.grad = None
        dist.barrier()
    return seen


def averaged(grad: torch.Tensor) -> torch.Tensor:
    """The mean over ranks of a plain gradient; that of a DTensor is one."""
    if isinstance(grad, DTensor):
        return grad.full_tensor()
    dist.all_reduce(grad)
    return grad / dist.get_world_size()


@pytest.mark.parametrize("kind", [Layer, Watchful], ids=["plain", "own __setattr__"])
@pytest.mark.parametrize("policy", POLICIES, ids=["by group", "copied", "one copy"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_training_follows_changed_parameters(
    gangs: Gangs, change: Change, policy: SharedMemoryPolicy | None, kind: type[Layer], device: str
) -> None:
    if policy is not None and device != "cpu":
        pytest.skip("memory of the host is shared by CPU ranks")
    gangs(2).run(compare_with_replicas, change, policy, kind)


def compare_with_replicas(
    ctx: RankContext, change: Change, policy: SharedMemoryPolicy | None, kind: type[Layer]
) -> None:
    replica, ours = layers(kind).to(ctx.device), layers(kind).to(ctx.device)
    for unit in (*ours, ours):
        fully_shard(unit, mesh=ctx.mesh, shared_memory=policy)
    found = losses_and_gradients(ctx, ours, change)
    expected = losses_and_gradients(ctx, replica, change)
    assert len(found) == len(expected)
    # The sum of two is the same in any order.
    assert all(map(torch.equal, found, expected))
    groups = list(groups_of(ours))
    assert groups
    assert all(group._plan is not None for group in groups)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_one_rank_copies_parameters_once_and_gradients_never(
    gangs: Gangs, param_dtype: torch.dtype | None
) -> None:
    gangs(1).run(check_one_rank, param_dtype)


# Where it has nobody to communicate with, whatever the device.
@mock.patch.object(collectives, "by_group_on_one_rank", new=False)
def check_one_rank(ctx: RankContext, param_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    model = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5)).to(ctx.device)
    for unit in (model[0], model):
        fully_shard(unit, mesh=ctx.mesh, mp_policy=policy)

    def backward(step: int) -> None:
        torch.autograd.backward(model(ctx.batch(step, 3, 7)).float().square().mean())

    backward(1)  # asks each parameter, and works out the plan
    with torch.profiler.profile() as profile:
        backward(2)
    operators = {event.name for event in profile.events()}
    assert not operators & {"aten::cat", "aten::_chunk_cat", "aten::split_with_sizes_copy"}
    # Two units: one whole before forward, and the layer again before backward.
    assert sum(event.name == "aten::_foreach_copy_" for event in profile.events()) == 3
