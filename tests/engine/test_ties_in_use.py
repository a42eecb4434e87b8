"""Ties across units under everything else that a unit can be asked to do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core import FSDPModule, fully_shard
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import Block, Decoder, Recompute, decoder, loss_of, tokens_of
from tests.engine.sharded import held_unsharded_bytes, state, unit
from tests.engine.versus import assert_same_full

pytestmark = pytest.mark.ranks

STEPS, MICROBATCHES = 3, 2


def tied(recompute: Recompute, device: torch.device) -> Decoder:
    """Head and embedding are tied, and the first block shares a matrix with the last."""
    model = decoder(recompute=recompute)
    first, *_, last = cast("list[Block]", list(model.blocks))
    last.up.weight = first.up.weight
    return model.to(device)


def sharded(model: Decoder, mesh: DeviceMesh) -> Decoder:
    for module in (model.embed, *model.blocks, model.head, model):
        fully_shard(module, mesh=mesh)
    first, *_, last = model.blocks
    assert state(last).params  # of its own, besides what it borrows
    assert cast("Block", last).up.weight is cast("Block", first).up.weight
    return model


def prefetch_explicitly(model: Decoder) -> None:
    order = [unit(m) for m in (model, model.embed, *model.blocks, model.head)]
    for here, following in pairwise(order):
        here.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([here])


def keep_whole(model: Decoder) -> None:
    unit(model).set_reshard_after_forward(False)


def nothing(_: Decoder) -> None:
    pass


Micro = Callable[[Decoder, int], None]


def synchronise_all(_: Decoder, __: int) -> None:
    """Reduces every microbatch."""


def synchronise_last(model: Decoder, micro: int) -> None:
    last = micro == MICROBATCHES - 1
    unit(model).set_requires_gradient_sync(last)
    unit(model).set_is_last_backward(last)


def stay_whole(model: Decoder, micro: int) -> None:
    synchronise_last(model, micro)
    unit(model).set_reshard_after_backward(micro == MICROBATCHES - 1)


def save(model: Decoder, _: int) -> None:
    model.state_dict()


def load(model: Decoder, _: int) -> None:
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()})


CASES: dict[str, tuple[Recompute, Callable[[Decoder], None], Micro]] = {
    "recomputed blocks": ("block", nothing, synchronise_all),
    "recomputed as a whole": ("all", nothing, synchronise_all),
    "recomputed and accumulated": ("block", nothing, synchronise_last),
    "explicit prefetch": ("no", prefetch_explicitly, synchronise_all),
    "explicit prefetch and recomputed": ("block", prefetch_explicitly, synchronise_last),
    "kept whole after forward": ("no", keep_whole, synchronise_last),
    "kept whole after backward": ("no", nothing, stay_whole),
    "saved between microbatches": ("no", nothing, save),
    "loaded between microbatches": ("no", nothing, load),
}


@pytest.mark.parametrize("case", CASES)
def test_ties_train_as_in_one_process(gangs: Gangs, case: str) -> None:
    gangs(2).run(compare, case)


@pytest.mark.parametrize("case", ["recomputed and accumulated", "explicit prefetch"])
def test_ties_over_replicas_train_as_in_one_process(gangs: Gangs, case: str) -> None:
    gangs(4).run(compare, case, replicas=2)


def compare(ctx: RankContext, case: str, *, replicas: int = 1) -> None:
    recompute, prepare, before = CASES[case]
    mesh = ctx.mesh if replicas == 1 else grid(ctx, replicas)
    expected = train_alone(ctx, tied(recompute, ctx.device))
    model = sharded(tied(recompute, ctx.device), mesh)
    prepare(model)
    train(ctx, model, before)
    expect_equal(model, expected)


def grid(ctx: RankContext, replicas: int) -> DeviceMesh:
    shape = (replicas, ctx.world // replicas)
    return init_device_mesh(ctx.device.type, shape, mesh_dim_names=("replicate", "shard"))


def train(ctx: RankContext, model: Decoder, before: Micro, after: Micro = synchronise_all) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for micro in range(MICROBATCHES):
            before(model, micro)
            number = MICROBATCHES * step + micro
            torch.autograd.backward(loss_of(model, tokens_of(number, ctx.rank).to(ctx.device)))
        assert held_unsharded_bytes(model) == 0
        optimizer.step()
        optimizer.zero_grad()
        after(model, step)


def train_alone(ctx: RankContext, model: Decoder) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for micro in range(MICROBATCHES):
            number = MICROBATCHES * step + micro
            losses = [
                loss_of(model, tokens_of(number, rank).to(ctx.device)) for rank in range(ctx.world)
            ]
            torch.autograd.backward(torch.stack(losses).mean())
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def expect_equal(model: Decoder, expected: dict[str, torch.Tensor]) -> None:
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, param in found.items():
        assert torch.allclose(param.full_tensor(), expected[name], atol=1e-6), name  # type: ignore[attr-defined]  # a DTensor


class InjectedError(Exception):
    """The fault under test."""


def fail(*_: object) -> None:
    raise InjectedError


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_fault_within_either_unit_is_survived(gangs: Gangs, where: str) -> None:
    gangs(2).run(check_fault, where)


def check_fault(ctx: RankContext, where: str) -> None:
    expected = train_alone(ctx, tied("no", ctx.device))
    model = sharded(tied("no", ctx.device), ctx.mesh)

    def fail_once(_: Decoder, step: int) -> None:
        block = cast("Block", model.blocks[0 if where == "first" else -1])
        tokens = tokens_of(90 + step, ctx.rank).to(ctx.device)
        forward = block.up.register_forward_hook(fail)
        with pytest.raises(InjectedError):
            loss_of(model, tokens)
        forward.remove()
        # The other blocks' gradients are on their way when this one's backward raises.
        backward = block.norm.register_full_backward_pre_hook(fail)
        with pytest.raises(InjectedError):
            torch.autograd.backward(loss_of(model, tokens))
        backward.remove()
        unit(model).reset_iter_state()
        model.zero_grad()  # what had been reduced before the fault
        assert held_unsharded_bytes(model) == 0

    train(ctx, model, synchronise_all, fail_once)
    expect_equal(model, expected)


class Fallback(nn.Module):
    """Goes on without its first layer, whose weight it uses too, if that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.first(x)
        except InjectedError:
            x = 2 * x
        result: torch.Tensor = self.second(x)
        return result


def test_a_fault_that_the_borrower_catches_leaves_it_whole_parameters(gangs: Gangs) -> None:
    gangs(2).run(check_caught_by_borrower)


def check_caught_by_borrower(ctx: RankContext) -> None:
    torch.manual_seed(0)
    alone = Fallback().to(ctx.device)
    torch.manual_seed(0)
    model = Fallback().to(ctx.device)
    fully_shard(model.first, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    x = torch.ones(2, 4, device=ctx.device)
    for each in (alone, model):
        each.first.register_forward_pre_hook(fail)  # after the unit's own
        torch.autograd.backward(each(x).square().sum())
    assert isinstance(model.first, FSDPModule)
    assert held_unsharded_bytes(model) == 0
    grad = model.first.weight.grad
    assert grad is not None
    assert torch.allclose(grad.full_tensor(), alone.first.weight.grad)  # type: ignore[attr-defined, arg-type]  # a DTensor; has one


class TiedWithin(nn.Module):
    """Uses its first layer's weight before and after a unit within it that shares the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.within = nn.Linear(4, 4)
        self.within.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.first(self.within(self.first(x).tanh()).tanh()).tanh()
        return result


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.tied = TiedWithin()
        self.other = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        return self.tied(x), self.other(x)


def test_a_part_of_a_group_keeps_what_a_unit_within_it_shares(gangs: Gangs) -> None:
    gangs(2).run(check_shared_within)


def check_shared_within(ctx: RankContext) -> None:
    """The unit within ends its backward before the part does, which goes backward alone."""
    alone, model = TwoHeads().to(ctx.device), TwoHeads().to(ctx.device)
    fully_shard(model.tied.within, mesh=ctx.mesh)
    fully_shard([model.tied, model.other], mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    for step in range(2):
        x = ctx.batch(step, 2, 4)
        torch.autograd.backward(model(x)[0].square().sum())
        for rank in range(ctx.world):
            other = RankContext(rank, ctx.world, ctx.device, ctx.mesh)
            torch.autograd.backward(alone(other.batch(step, 2, 4))[0].square().sum() / ctx.world)
        assert_same_full(model, alone, rtol=1e-5, atol=1e-5)
    assert held_unsharded_bytes(model) == 0
