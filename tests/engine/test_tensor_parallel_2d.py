"""Sharded over one axis what tensor parallelism has split over another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from fsdp_core import SharedMemoryPolicy, fully_shard
from tests.engine.gang import Gangs, RankContext
from tests.engine.versus import (
    Engine,
    assert_close,
    assert_equal,
    assert_same_full,
    engines,
    full,
    groups_of,
    local,
    ours,
    reduce_at,
    train,
)

pytestmark = pytest.mark.ranks


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.gain = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.gain * self.down(self.up(self.norm(x)).tanh())
        return result


class Net(nn.Module):
    """Two blocks; the second one's `up` is tied to the first one's. `tail` is never split."""

    def __init__(self, width: int, hidden: int, *, recompute: bool, tied: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.tail = nn.Linear(width, 3)
        self.recompute = recompute
        if tied:
            self.blocks[1].up = self.blocks[0].up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        result: torch.Tensor = self.tail(x)
        return result.square().mean()


@dataclass(frozen=True)
class Case:
    """Sizes, and what else is special."""

    width: int = 8
    hidden: int = 12
    mesh: tuple[int, ...] = (2, 2)
    recompute: bool = False
    tied: bool = False
    microbatches: int = 1
    dtype: torch.dtype | None = None
    freeze_up: bool = False


CASES = [
    Case(),
    Case(hidden=7),
    Case(width=5, hidden=3),
    Case(hidden=7, recompute=True, microbatches=2),
    Case(hidden=7, dtype=torch.bfloat16),
    Case(freeze_up=True),
    Case(tied=True),
    Case(mesh=(1, 2, 2)),
    Case(hidden=7, mesh=(2, 1, 2)),
]


@cache
def mesh_of(device_type: str, sizes: tuple[int, ...]) -> DeviceMesh:
    names = ("dp_replicate", "dp_shard", "tp")[-len(sizes) :]
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def plain(case: Case, *, seed: int = 9) -> Net:
    torch.manual_seed(seed)
    model = Net(case.width, case.hidden, recompute=case.recompute, tied=case.tied)
    if case.freeze_up:
        model.blocks[0].get_parameter("up.weight").requires_grad = False
    return model


def sharded(
    ctx: RankContext, engine: Engine, case: Case, *, seed: int = 9, on_meta: bool = False
) -> Net:
    mesh = mesh_of(ctx.device.type, case.mesh)
    # Not drawn on the device: its numbers would be others than those of one process.
    with torch.device("meta" if on_meta else "cpu"):
        model = plain(case, seed=seed)
    if not on_meta:
        model = model.to(ctx.device)
    # Local outputs would lose the global size of what is split unevenly.
    split = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    for index, block in enumerate(model.blocks):
        # What is tied is split once.
        parts = {n: s for n, s in split.items() if not (case.tied and index == 1 and n == "up")}
        parallelize_module(block, mesh["tp"], parts)
    dp = mesh["dp_shard"] if len(case.mesh) == 2 else mesh["dp_replicate", "dp_shard"]
    policy = engine.precision(param_dtype=case.dtype, reduce_dtype=torch.float32)
    units = [model] if case.tied else [*model.blocks, model]
    for unit in units:
        engine.shard(unit, mesh=dp, mp_policy=policy)
    return model


def batch(ctx: RankContext, case: Case, step: int, place: int | None = None) -> torch.Tensor:
    """The same for the ranks of one tensor-parallel group."""
    place = ctx.rank // case.mesh[-1] if place is None else place
    generator = torch.Generator().manual_seed(10 * step + place)
    return torch.randn(3, case.width, generator=generator).to(ctx.device)


def loss_on(ctx: RankContext, case: Case, model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(ctx, case, step))
    return loss


def test_two_axes_train_as_in_the_reference(gangs: Gangs) -> None:
    gangs(4).run(compare)


def compare(ctx: RankContext) -> None:
    for case in CASES:
        traces = [
            train(
                sharded(ctx, engine, case),
                partial(loss_on, ctx, case),
                steps=2,
                microbatches=case.microbatches,
                before_backward=reduce_at(case.microbatches - 1),
            )
            for engine in engines()
        ]
        assert_equal(*traces)


def test_two_axes_train_as_one_process_does(gangs: Gangs) -> None:
    gangs(4).run(compare_with_one_process)


def compare_with_one_process(ctx: RankContext) -> None:
    for case in (Case(hidden=7), Case(mesh=(2, 1, 2)), Case(hidden=7, tied=True)):
        model, whole = sharded(ctx, ours(), case), plain(case).to(ctx.device)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, whole)]
        for step in range(2):
            torch.autograd.backward(model(batch(ctx, case, step)))
            for place in range(2):
                torch.autograd.backward(whole(batch(ctx, case, step, place)) / 2)
            assert_same_full(model, whole, rtol=1e-4, atol=1e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def test_split_parameters_round_trip_through_state_dicts(gangs: Gangs) -> None:
    gangs(4).run(check_state_dicts)


def check_state_dicts(ctx: RankContext) -> None:
    for case in (Case(), Case(hidden=7), Case(mesh=(1, 2, 2)), Case(tied=True)):
        source = sharded(ctx, ours(), case)
        saved = {name: tensor.clone() for name, tensor in source.state_dict().items()}
        for name, whole in plain(case).to(ctx.device).state_dict().items():
            assert torch.equal(full(saved[name]), whole), name
        expected = source(batch(ctx, case, 0))
        for on_meta in (False, True):
            model = sharded(ctx, ours(), case, seed=1, on_meta=on_meta)
            if on_meta:
                model.to_empty(device=ctx.device)
            model.load_state_dict(saved, assign=on_meta)
            found = model(batch(ctx, case, 0))
            assert torch.equal(found, expected)
            torch.autograd.backward(found)
            for group in groups_of(model):
                assert len({id(p.sharded_param) for p in group.params}) == len(group.params)


def test_a_model_on_meta_can_be_filled_and_trained(gangs: Gangs) -> None:
    gangs(4).run(check_meta)


def check_meta(ctx: RankContext) -> None:
    case = Case(hidden=7)
    traces = []
    for engine in engines():
        model = sharded(ctx, engine, case, on_meta=True)
        if engine.is_ours:
            with pytest.raises(RuntimeError, match="were still on meta device: "):
                model(batch(ctx, case, 0))
            model = sharded(ctx, engine, case, on_meta=True)
        model.to_empty(device=ctx.device)
        torch.manual_seed(2)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                for param in module.parameters():
                    whole = torch.randn(param.shape).to(ctx.device)
                    assert isinstance(param, DTensor)
                    param.data.copy_(
                        DTensor.from_local(  # every rank draws the same
                            whole, param.device_mesh, [Replicate()] * param.device_mesh.ndim
                        ).redistribute(placements=param.placements)
                    )
        for block in model.blocks:
            local(block.get_parameter("gain")).fill_(1.0)
        traces.append(train(model, lambda m, step: m(batch(ctx, case, step)), steps=2))
    assert_close(*traces, rtol=0.0, atol=0.0)


class Hiding(nn.Module):
    """Keeps a tensor beside what it returns."""

    def __init__(self, width: int, tp: DeviceMesh) -> None:
        super().__init__()
        self.gain = nn.Parameter(distribute_tensor(torch.ones(width), tp, [Replicate()]))
        self.hidden: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * self.gain
        self.hidden.append(hidden)
        return x + hidden.detach()


@pytest.mark.parametrize("memory", [None, SharedMemoryPolicy()], ids=["own", "shared"])
def test_a_backward_that_would_read_freed_split_parameters_is_refused(
    gangs: Gangs, memory: SharedMemoryPolicy | None
) -> None:
    gangs(4).run(check_freed, memory)


def check_freed(ctx: RankContext, memory: SharedMemoryPolicy | None) -> None:
    mesh = mesh_of(ctx.device.type, (2, 2))
    for frees in (True, False):
        model = Hiding(4, mesh["tp"]).to(ctx.device)
        fully_shard(model, mesh=mesh["dp_shard"], reshard_after_forward=frees, shared_memory=memory)
        x = distribute_tensor(torch.ones(3, 4, device=ctx.device), mesh["tp"], [Replicate()])
        model(x.requires_grad_())
        loss = model.hidden[0].square().sum()
        if frees:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.backward(loss)
        else:
            torch.autograd.backward(loss)
            assert model.gain.grad is not None
