"""PyTorch's FSDP1 with our extension in place of its own: the same run, bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_core.fsdp1 import DTensorExtensions
from tests.engine.gang import Gangs, RankContext
from tests.extensions.grid import assert_same, grid, outdated_words

pytestmark = pytest.mark.ranks

STEPS = 3


class Mlp(nn.Module):
    """Split over the tensor-parallel ranks, but for `norm`, whose 7 rows no axis divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 12)
        self.down = nn.Linear(12, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.norm(self.down(nn.functional.gelu(self.up(x))))
        return result


@dataclass
class Run:
    """Everything that must agree."""

    losses: list[float] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)


class Counted(DTensorExtensions):
    """Ours, and how often each of its methods was called."""

    calls: ClassVar[Counter[str]] = Counter()

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401 - whatever the attribute is
        if name in DTensorExtensions.__dict__ and not name.startswith("__"):
            Counted.calls[name] += 1
        return super().__getattribute__(name)


def test_tensor_parallel_training_is_the_same_bit_for_bit(gangs: Gangs) -> None:
    gangs(4).run(check_two_axes)


@outdated_words()
def check_two_axes(ctx: RankContext) -> None:
    from torch.distributed.fsdp import _init_utils  # noqa: PLC0415 - as above

    theirs = run(ctx, tensor_parallel(ctx))
    Counted.calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_init_utils, "DTensorExtensions", Counted)
        model = tensor_parallel(ctx)
        ours = run(ctx, model)
    assert all(type(part._fsdp_extension) is Counted for part in fsdp_parts(model))
    assert {
        "pre_flatten_transform",
        "post_unflatten_transform",
        "chunk_dtensor",
        "all_gather_dtensor",
    } <= Counted.calls.keys()
    assert_same_run(ours, theirs)
    assert any(isinstance(value, DTensor) for value in ours.saved.values())


def test_training_over_one_axis_is_the_same_bit_for_bit(gangs: Gangs) -> None:
    gangs(4).run(check_one_axis)


@outdated_words()
def check_one_axis(ctx: RankContext) -> None:
    theirs = run(ctx, data_parallel(ctx))
    model = data_parallel(ctx)
    Counted.calls.clear()
    for part in fsdp_parts(model):
        extension = Counted(part._device_handle)
        part._fsdp_extension = part._handle._fsdp_extension = extension
    ours = run(ctx, model)
    assert {"chunk_tensor", "pre_load_state_dict_transform"} <= Counted.calls.keys()
    assert_same_run(ours, theirs)


def tensor_parallel(ctx: RankContext) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 - only the oracle may load it

    mesh = grid(ctx)
    torch.manual_seed(3)
    model = nn.Sequential(Mlp(), Mlp()).to(ctx.device)
    over = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh["tp"], over)
    wrapped = [
        FullyShardedDataParallel(
            block, device_mesh=mesh["dp_shard"], use_orig_params=True, device_id=ctx.device
        )
        for block in model
    ]
    return nn.Sequential(*wrapped)


def data_parallel(ctx: RankContext) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 - only the oracle may load it

    torch.manual_seed(3)
    model = nn.Sequential(Mlp(), Mlp()).to(ctx.device)
    return nn.Sequential(
        *(FullyShardedDataParallel(block, device_id=ctx.device) for block in model)
    )


def fsdp_parts(model: nn.Module) -> list[Any]:
    """The FSDP1 modules, whose private parts no type describes."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 - only the oracle may load it

    return FullyShardedDataParallel.fsdp_modules(model)


def run(ctx: RankContext, model: nn.Module) -> Run:
    """Trains, saves, trains on, goes back to what was saved, and trains on again."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp  # noqa: PLC0415 - only the oracle may load it
    from torch.distributed.fsdp import StateDictType  # noqa: PLC0415 - as above

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result = Run()

    def train(first: int) -> list[float]:
        losses = []
        for step in range(first, first + STEPS):
            x = batch(ctx, step)
            loss = model(x).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    result.losses += train(0)
    with sharded_state(), Fsdp.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        result.saved = model.state_dict()
        result.optimizer = Fsdp.optim_state_dict(model, optimizer)
    # FSDP1 does not bring back the optimizer state of tensor-parallel parameters as it was, so
    # training goes on from a copy, and what it does bring back is only compared.
    own = copy.deepcopy(optimizer.state_dict())
    later = train(STEPS)
    assert later[0] != later[-1]
    with sharded_state(), Fsdp.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(result.saved)
        result.loaded = Fsdp.optim_state_dict_to_load(model, optimizer, result.optimizer)
        assert_same_state(model.state_dict(), result.saved)
    optimizer.load_state_dict(own)
    assert train(STEPS) == later, "what was saved is where training went on from"
    result.losses += later
    return result


def batch(ctx: RankContext, step: int) -> torch.Tensor:
    """One for each pair of ranks: tensor-parallel ranks need the same."""
    generator = torch.Generator().manual_seed(10 * step + ctx.rank // 2)
    return torch.randn(4, 7, generator=generator).to(ctx.device)


@contextmanager
def sharded_state() -> Iterator[None]:
    """FSDP1's state dict calls tell that they are outdated, with what they build on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP.state_dict_type", FutureWarning)
        yield


def assert_same_run(ours: Run, theirs: Run) -> None:
    assert ours.losses == theirs.losses
    assert_same_state(ours.saved, theirs.saved)
    assert_same_state(ours.optimizer["state"], theirs.optimizer["state"])
    assert_same_state(ours.loaded["state"], theirs.loaded["state"])


def assert_same_state(ours: dict[Any, Any], theirs: dict[Any, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, dict):
            assert_same_state(ours[name], value)
        else:
            assert_same(ours[name], value)
