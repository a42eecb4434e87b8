"""Ranks that use different parameters of a unit train on, and agree on who had a gradient."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_core import MixedPrecisionPolicy, Owned
from fsdp_core.param import OwnedParam
from tests.engine.gang import Gangs, RankContext
from tests.engine.versus import assert_same_full, assert_same_tensor, full, groups_of, ours

pytestmark = pytest.mark.ranks

WIDTH, EXPERTS = 5, 4


class Choice(nn.Module):
    """A layer that each batch chooses among several, between two that all use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        hidden = self.first(x)
        for index in chosen:
            hidden = self.experts[index](hidden.tanh())
            if index == 0:
                hidden = hidden * self.scale
        result: torch.Tensor = self.last(hidden).float().square().mean()
        return result


def choice(ctx: RankContext) -> Choice:
    torch.manual_seed(19)
    return Choice().to(ctx.device)


def chosen_by(rank: int, step: int) -> list[int]:
    """Expert 3 is never chosen; the last step chooses none at all."""
    choices: list[list[list[int]]] = [[[0], [1], [2]], [[2], [2, 2], []], [[], [], []]]
    return choices[step][rank % 3]


FULL = MixedPrecisionPolicy()


@dataclass(frozen=True)
class Case:
    """A mesh, and how to train over it."""

    replicas: int = 1
    microbatches: int = 1
    sync: bool = True
    policy: MixedPrecisionPolicy = FULL
    tolerance: float = 1e-5


LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
ALL_LOW = MixedPrecisionPolicy(torch.bfloat16)
HALF = MixedPrecisionPolicy(None, torch.float16)
CASES = [
    Case(),
    Case(microbatches=2),
    Case(microbatches=2, sync=False),
    Case(policy=LOW, tolerance=3e-2),
    Case(microbatches=2, sync=False, policy=LOW, tolerance=3e-2),
    Case(policy=ALL_LOW, tolerance=3e-2),
    Case(policy=HALF, tolerance=3e-3),
]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_different_parameters_train_as_one_process(gangs: Gangs, world: int) -> None:
    gangs(world).run(compare, CASES)


def test_replicas_with_different_parameters_train_as_one_process(gangs: Gangs) -> None:
    gangs(4).run(
        compare,
        [Case(2), Case(4, microbatches=2, sync=False), Case(2, 2, policy=HALF, tolerance=3e-3)],
    )


def mesh_of(ctx: RankContext, case: Case) -> DeviceMesh:
    if case.replicas == 1:
        return ctx.mesh
    sizes = (case.replicas, ctx.world // case.replicas)
    return init_device_mesh(ctx.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard"))


def compare(ctx: RankContext, cases: list[Case]) -> None:
    for case in cases:
        model, plain = choice(ctx), choice(ctx)
        ours().shard(model.first, mesh=mesh_of(ctx, case), mp_policy=case.policy)
        ours().shard(model, mesh=mesh_of(ctx, case), mp_policy=case.policy)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, plain)]
        for step in range(3):
            for micro in range(case.microbatches):
                is_last = micro == case.microbatches - 1
                model.set_requires_gradient_sync(case.sync or is_last)  # type: ignore[operator]  # FSDPModule's
                # Another microbatch, another choice.
                backward(model, ctx, ctx.rank, step, micro)
                for rank in range(ctx.world):
                    backward(plain, ctx, rank, step, micro, 1 / ctx.world)
            assert_same_full(model, plain, rtol=case.tolerance, atol=case.tolerance)
            for name, param in plain.named_parameters():
                # None of the ranks: None; one of them: a gradient on all, whatever its slice.
                assert (model.get_parameter(name).grad is None) == (param.grad is None), name
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert model.experts[3].weight.grad is None


def backward(
    model: nn.Module, ctx: RankContext, rank: int, step: int, micro: int, scale: float = 1.0
) -> None:
    x = RankContext(rank, ctx.world, ctx.device, ctx.mesh).batch(10 * step + micro, 4, 3)
    torch.autograd.backward(model(x, chosen_by(rank + micro, step)) * scale)


def test_zeros_take_part_where_unused_parameters_are_reduced(gangs: Gangs) -> None:
    gangs(3).run(check_reduce_unused)


def check_reduce_unused(ctx: RankContext) -> None:
    for agree in (True, False):
        model, plain = choice(ctx), choice(ctx)
        ours().shard(model, mesh=ctx.mesh)
        for group in groups_of(model):
            group.options.agree_on_unused = agree
            group.options.reduce_unused = True
        backward(model, ctx, ctx.rank, 0, 0)
        for rank in range(ctx.world):
            backward(plain, ctx, rank, 0, 0, 1 / ctx.world)
        for param in plain.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        assert_same_full(model, plain, rtol=1e-5, atol=1e-6)


class Half(nn.Module):
    """A part of a larger model that a microbatch may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(23)
        self.stem = nn.Linear(3, 3)
        self.choice = Choice()

    def forward(self, x: torch.Tensor, chosen: list[int] | None) -> torch.Tensor:
        hidden = self.stem(x)
        result: torch.Tensor = (
            hidden.square().mean() if chosen is None else self.choice(hidden, chosen)
        )
        return result


def test_ranks_agree_on_what_earlier_microbatches_left_although_the_last_skips_the_unit(
    gangs: Gangs,
) -> None:
    gangs(2).run(check_left_by_others)


def check_left_by_others(ctx: RankContext) -> None:
    model, plain = Half().to(ctx.device), Half().to(ctx.device)
    ours().shard(model.choice, mesh=ctx.mesh)
    ours().shard(model, mesh=ctx.mesh)
    # The same number of elements on each rank, but of other parameters.
    for sync, chosen in ((False, [[1], [2]]), (True, [None, None])):
        model.set_requires_gradient_sync(sync)  # type: ignore[operator]  # FSDPModule's
        torch.autograd.backward(model(ctx.batch(0, 4, 3), chosen[ctx.rank]))
        for rank in range(ctx.world):
            x = RankContext(rank, ctx.world, ctx.device, ctx.mesh).batch(0, 4, 3)
            torch.autograd.backward(plain(x, chosen[rank]) / ctx.world)
    assert_same_full(model, plain, rtol=1e-5, atol=1e-6)


def test_a_zero_gradient_is_not_taken_for_none(gangs: Gangs) -> None:
    gangs(2).run(check_zero)


def check_zero(ctx: RankContext) -> None:
    model = choice(ctx)
    ours().shard(model, mesh=ctx.mesh)
    x = torch.ones(1, 3, device=ctx.device)
    loss = model(x, [0] if ctx.rank == 0 else [])
    torch.autograd.backward(loss * 0.0)
    for name, param in model.named_parameters():
        used = name.startswith(("first", "last", "scale", "experts.0"))
        assert (param.grad is not None) == used, name
        if used:
            assert isinstance(param.grad, DTensor)
            assert not param.grad.full_tensor().any()


def test_frozen_parameters_stay_out_of_it(gangs: Gangs) -> None:
    gangs(2).run(check_frozen)


def check_frozen(ctx: RankContext) -> None:
    model = choice(ctx)
    model.first.weight.requires_grad = False
    model.experts[1].requires_grad_(requires_grad=False)
    ours().shard(model, mesh=ctx.mesh)
    for thawed in (False, True):
        model.experts[1].requires_grad_(requires_grad=thawed)
        backward(model, ctx, ctx.rank, 0, 0)
        assert model.first.weight.grad is None
        assert (model.experts[1].weight.grad is not None) == thawed


@pytest.mark.parametrize("kind", ["kept whole", "kept by replicas", "owned"])
def test_ranks_agree_on_parameters_that_were_frozen_after_a_microbatch_used_them(
    gangs: Gangs, kind: str
) -> None:
    gangs(2).run(check_frozen_since, kind)


def check_frozen_since(ctx: RankContext, kind: str) -> None:
    model, plain = choice(ctx), choice(ctx)
    case = Case(replicas=2 if kind == "kept by replicas" else 1)
    owns = (lambda param: Owned() if param.ndim == 2 else None) if kind == "owned" else None
    ours().shard(model, mesh=mesh_of(ctx, case), shard_placement_fn=owns)
    set_sync = (
        "set_requires_all_reduce" if kind == "kept by replicas" else "set_requires_gradient_sync"
    )
    # The same number of elements on each rank, but of other experts.
    for is_last, chosen in ((False, [[1], [2]]), (True, [[0], [0]])):
        getattr(model, set_sync)(is_last)
        torch.autograd.backward(model(ctx.batch(0, 4, 3), chosen[ctx.rank]))
        for rank in range(ctx.world):
            x = RankContext(rank, ctx.world, ctx.device, ctx.mesh).batch(0, 4, 3)
            torch.autograd.backward(plain(x, chosen[rank]) / ctx.world)
        for each in (model, plain):
            each.experts[1:].requires_grad_(requires_grad=False)
    expect_gradients(model, plain)
    assert model.experts[1].weight.grad is not None
    assert model.experts[3].weight.grad is None


def expect_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Those of the plain model, on the ranks that hold them."""
    params = {param.fqn: param for group in groups_of(model) for param in group.params}
    for name, expected in plain.named_parameters():
        param, grad = params[name], model.get_parameter(name).grad
        assert (grad is None) == (expected.grad is None), name
        if grad is not None and not (isinstance(param, OwnedParam) and not param.is_mine):
            assert_same_tensor(name, full(grad), expected.grad, 1e-5, 1e-6)


class Borrower(nn.Module):
    """A layer of its own, and one that it shares and may leave out."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.shared.weight = shared.weight

    def forward(self, x: torch.Tensor, *, shares: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.own(x).tanh()
        return self.shared(hidden) if shares else hidden


class Sharing(nn.Module):
    """Two units with one weight in common; the one that has charge of it comes first or last."""

    def __init__(self, *, borrower_first: bool) -> None:
        super().__init__()
        torch.manual_seed(43)
        self.lender = nn.Linear(WIDTH, WIDTH)
        self.borrower = Borrower(self.lender)
        self.borrower_first = borrower_first

    def forward(self, x: torch.Tensor, *, shares: bool) -> torch.Tensor:
        if self.borrower_first:
            x = self.lender(self.borrower(x, shares=shares).tanh())
        else:
            x = self.borrower(self.lender(x).tanh(), shares=shares)
        return x.square().mean()


@pytest.mark.parametrize("borrower_first", [False, True])
def test_ranks_may_differ_in_their_use_of_a_parameter_that_units_share(
    gangs: Gangs, *, borrower_first: bool
) -> None:
    gangs(2).run(check_sharing, borrower_first)


def check_sharing(ctx: RankContext, borrower_first: bool) -> None:  # noqa: FBT001 - shipped positionally
    for needs_grad in (False, True):
        for sync in (True, False):
            model, plain = (Sharing(borrower_first=borrower_first).to(ctx.device) for _ in range(2))
            for unit in (model.lender, model.borrower, model):
                ours().shard(unit, mesh=ctx.mesh)
            for micro in range(3):
                model.set_requires_gradient_sync(sync or micro == 2)  # type: ignore[operator]  # FSDPModule's
                for rank in range(ctx.world):
                    x = RankContext(rank, ctx.world, ctx.device, ctx.mesh).batch(micro, 4, WIDTH)
                    x.requires_grad_(needs_grad)
                    # On one rank, on the other, on none.
                    if rank == ctx.rank:
                        torch.autograd.backward(model(x, shares=rank == micro))
                    torch.autograd.backward(plain(x, shares=rank == micro) / ctx.world)
            assert_same_full(model, plain, rtol=1e-5, atol=1e-6)


class TargetsFirst(nn.Module):
    """Asks each part without gradients for a target first; ranks use different experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.first = nn.Linear(3, 3)
        self.choose = Chosen()
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        x = self.first(x)
        with torch.no_grad():
            target = self.choose(x + 1, chosen)
        hidden = self.choose(x, chosen).tanh() * target
        with torch.no_grad():
            target = self.head(hidden + 1)
        result: torch.Tensor = (self.head(hidden) * target).square().sum()
        return result


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        result: torch.Tensor = self.experts[chosen](x)
        return result


def test_ranks_agree_on_gradients_that_arrive_after_the_units_reduction(gangs: Gangs) -> None:
    gangs(2).run(check_late)


def check_late(ctx: RankContext) -> None:
    """The group's forward ends between the head's two calls: its reduction comes before the expert's."""
    model, plain = TargetsFirst().to(ctx.device), TargetsFirst().to(ctx.device)
    ours().shard([model.choose, model.head], mesh=ctx.mesh)
    ours().shard(model, mesh=ctx.mesh)
    for step in range(2):
        torch.autograd.backward(model(ctx.batch(step, 4, 3), ctx.rank))
        for rank in range(ctx.world):
            other = RankContext(rank, ctx.world, ctx.device, ctx.mesh)
            torch.autograd.backward(plain(other.batch(step, 4, 3), rank) / ctx.world)
        assert_same_full(model, plain, rtol=1e-5, atol=1e-5)
