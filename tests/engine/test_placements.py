"""Parameters sharded on any dim, uneven ones too, in whatever order they lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_core import fully_shard
from fsdp_core.errors import EngineError
from fsdp_core.options import PlacementFn
from tests.engine.gang import Gangs, RankContext
from tests.engine.versus import (
    assert_equal,
    assert_same_full,
    engines,
    groups_of,
    local,
    train,
)

pytestmark = pytest.mark.ranks


class Mixed(nn.Module):
    """Parameters of one to four dims; all sizes on dims above 0 are even for 2 and 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.middle = nn.Parameter(torch.randn(3, 8, 12))
        self.conv = nn.Conv2d(1, 4, (4, 8), bias=False)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bi,kji->bkj", self.first(x).tanh(), self.middle)
        grown = nn.functional.pad(hidden, (0, 0, 0, 1)).unsqueeze(1)
        seen = self.conv(grown).flatten(1)
        result: torch.Tensor = self.last(torch.cat([seen, seen], 1))
        return result.square().mean()


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def from_the_end(param: nn.Parameter) -> Shard | None:
    return {1: None, 2: Shard(-1), 3: Shard(-2), 4: Shard(-4)}[param.ndim]


@pytest.mark.parametrize("world", [2, 4])
def test_dims_above_0_train_as_in_the_reference(gangs: Gangs, world: int) -> None:
    gangs(world).run(compare_dims)


def compare_dims(ctx: RankContext) -> None:
    for placement_of in (last_dim, from_the_end):
        traces = []
        for engine in engines():
            torch.manual_seed(3)
            model = Mixed().to(ctx.device)
            for unit in (model.first, model):
                engine.shard(unit, mesh=ctx.mesh, shard_placement_fn=placement_of)
            traces.append(train(model, lambda m, step: m(ctx.batch(step, 2, 8))))
        assert_equal(*traces)


class Odd(nn.Module):
    """Nothing here is even, dense from left to right, or of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.transposed = nn.Parameter(torch.randn(7, 3).t())
        self.permuted = nn.Parameter(torch.randn(4, 3, 5).permute(1, 2, 0))
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # PyTorch's stub lacks it
        self.gaps = nn.Parameter(torch.randn(5, 8)[:, ::2])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.narrow = nn.Parameter(torch.randn(1, 5))
        self.frozen = nn.Parameter(torch.randn(5, 4).t(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(self.up(x).tanh(), self.transposed)
        mixed = torch.einsum("bi,ijk->bjk", hidden, self.permuted) @ self.frozen
        image = mixed[:, None, :, :].expand(-1, 3, -1, -1)
        seen = self.conv(image.to(memory_format=torch.channels_last)).mean((2, 3))
        result: torch.Tensor = (seen * self.narrow) @ self.gaps * self.scale
        return result.square().mean()


def strided(param: nn.Parameter) -> Shard | None:
    return Shard(param.ndim - 1) if param.ndim else None


PLACEMENTS: list[PlacementFn | None] = [None, strided, lambda p: Shard(-2 if p.ndim > 1 else 0)]


def odd(ctx: RankContext) -> Odd:
    torch.manual_seed(5)
    return Odd().to(ctx.device)


def batch(ctx: RankContext, step: int) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(ctx.device)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_uneven_and_strided_parameters_train_as_one_process_does(gangs: Gangs, world: int) -> None:
    gangs(world).run(compare_with_one_process)


def compare_with_one_process(ctx: RankContext) -> None:
    for placement_of in PLACEMENTS:
        plain, model = odd(ctx), odd(ctx)
        fully_shard(model.conv, mesh=ctx.mesh, shard_placement_fn=placement_of)
        fully_shard(model, mesh=ctx.mesh, shard_placement_fn=placement_of)
        check_forms(model, plain)
        optimizers = [
            torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
            torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False),
        ]
        for step in range(3):
            x = batch(ctx, step)
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                torch.autograd.backward(each(x))
                optimizer.step()
            check_forms(model, plain)
            assert_same_full(model, plain, rtol=1e-4, atol=1e-6)
        check_optimizer_state(*optimizers)
        check_whole(ctx, model, plain)


def check_forms(model: nn.Module, plain: nn.Module) -> None:
    """Global shapes and strides, and those of slices, are the plain parameter's."""
    for (name, mine), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(mine, DTensor), name
        assert mine.shape == whole.shape, name
        dense = torch.empty_like(whole)
        assert mine.stride() == dense.stride(), name
        check_slice(name, mine, whole)
        if whole.grad is not None:
            assert isinstance(mine.grad, DTensor), name
            assert mine.grad.stride() == dense.stride(), name
            assert strides(mine.grad) == strides(mine), name
            assert mine.grad.placements == mine.placements


def strides(tensor: torch.Tensor) -> list[int]:
    """Of this rank's slice, for the dims where they mean something."""
    part = local(tensor)
    return [stride for stride, size in zip(part.stride(), part.shape, strict=True) if size > 1]


def check_slice(name: str, mine: DTensor, whole: torch.Tensor) -> None:
    (placement,) = mine.placements
    part = local(mine)
    if whole.ndim == 0:
        assert placement == Replicate()
        assert part.shape == ()
        return
    assert isinstance(placement, Shard)
    dim, rank = placement.dim, mine.device_mesh.get_local_rank()
    chunks = list(torch.chunk(whole.detach(), mine.device_mesh.size(), dim))
    expected = chunks[rank] if rank < len(chunks) else whole.detach().narrow(dim, 0, 0)
    assert part.shape == expected.shape, name
    # Fused optimizers read the memory from end to end.
    assert torch.empty_like(part).stride() == part.stride() or not part.numel(), name


def check_optimizer_state(mine: torch.optim.Optimizer, plain: torch.optim.Optimizer) -> None:
    for a, b in zip(mine.state.values(), plain.state.values(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(a[key], DTensor)
            assert a[key].stride() == torch.empty_like(b[key]).stride()
            torch.testing.assert_close(a[key].full_tensor(), b[key], rtol=1e-4, atol=1e-6)


def check_whole(ctx: RankContext, model: Odd, plain: Odd) -> None:
    """Unsharded parameters have the form of the original, without its gaps."""
    model.unshard()  # type: ignore[operator]  # FSDPModule's
    model.conv.unshard()  # type: ignore[operator]  # FSDPModule's
    for (name, mine), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert not isinstance(mine, DTensor)
        assert mine.stride() == torch.empty_like(whole).stride(), name
        assert mine.device == ctx.device
        torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-6)
    model.reshard()  # type: ignore[operator]  # FSDPModule's
    model.conv.reshard()  # type: ignore[operator]  # FSDPModule's


@pytest.mark.parametrize("world", [2, 3])
def test_state_dicts_of_strided_parameters_round_trip(gangs: Gangs, world: int) -> None:
    gangs(world).run(check_round_trips)


def check_round_trips(ctx: RankContext) -> None:
    x = batch(ctx, 1)
    for placement_of in PLACEMENTS:
        plain = odd(ctx)
        source = odd(ctx)
        fully_shard(source, mesh=ctx.mesh, shard_placement_fn=placement_of)
        saved = source.state_dict()
        for name, whole in plain.state_dict().items():
            assert torch.equal(saved[name].full_tensor(), whole), name
        for fill in (load, load_assign, load_into_meta):
            model = make_other(ctx, placement_of, on_meta=fill is load_into_meta)
            fill(ctx, model, saved)
            check_forms(model, plain)
            torch.testing.assert_close(model(x), plain(x))
            torch.autograd.backward(model(x))
            for param in model.parameters():
                if param.requires_grad:
                    assert isinstance(param.grad, DTensor)
                    assert strides(param.grad) == strides(param)


def make_other(ctx: RankContext, placement_of: PlacementFn | None, *, on_meta: bool) -> Odd:
    with torch.device("meta" if on_meta else ctx.device):
        model = Odd()
    fully_shard(model, mesh=ctx.mesh, shard_placement_fn=placement_of)
    return model


def load(ctx: RankContext, model: Odd, saved: dict[str, torch.Tensor]) -> None:
    del ctx
    model.load_state_dict(saved)


def load_assign(ctx: RankContext, model: Odd, saved: dict[str, torch.Tensor]) -> None:
    del ctx
    model.load_state_dict({n: t.detach().clone() for n, t in saved.items()}, assign=True)


def load_into_meta(ctx: RankContext, model: Odd, saved: dict[str, torch.Tensor]) -> None:
    model.to_empty(device=ctx.device)
    model.load_state_dict(saved)


def test_changes_of_dtype_and_device_keep_the_form(gangs: Gangs) -> None:
    gangs(3).run(check_apply)


def check_apply(ctx: RankContext) -> None:
    plain, model = odd(ctx).double(), odd(ctx)
    fully_shard(model, mesh=ctx.mesh, shard_placement_fn=strided)
    model.double()
    check_forms(model, plain)
    x = batch(ctx, 1).double()
    for each in (model, plain):
        torch.autograd.backward(each(x))
    assert_same_full(model, plain, rtol=1e-9, atol=1e-12)


def test_padding_never_reaches_a_user(gangs: Gangs) -> None:
    gangs(3).run(check_padding)


def check_padding(ctx: RankContext) -> None:
    model = odd(ctx)
    fully_shard(model, mesh=ctx.mesh, shard_placement_fn=strided)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    torch.autograd.backward(model(torch.ones(4, 5, device=ctx.device)))
    whole = odd(ctx)
    with torch.no_grad():
        for param in whole.parameters():
            param.fill_(1.0)
    torch.autograd.backward(whole(torch.ones(4, 5, device=ctx.device)))
    assert_same_full(model, whole, rtol=1e-5, atol=1e-6)
    for group in groups_of(model):
        for managed in group.params:
            assert local(managed.sharded_param).numel() <= managed.slicing.row


def test_bad_placements_are_refused_by_name(gangs: Gangs) -> None:
    gangs(2).run(check_refusals)


def refuse(
    ctx: RankContext, kind: type[Exception], message: str, placement_of: Callable[..., object]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(kind, match=message) as caught:
        fully_shard(model, mesh=ctx.mesh, shard_placement_fn=cast("PlacementFn", placement_of))
    assert isinstance(caught.value, EngineError)
    # Nothing was half done: the module is as it was.
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    assert fully_shard.state(model) is None
    fully_shard(model, mesh=ctx.mesh)


def check_refusals(ctx: RankContext) -> None:
    invalid = "Shard dim {} is invalid for {}D tensor: parameter '0.{}'"
    refuse(ctx, AssertionError, invalid.format(2, 2, "weight"), lambda _: Shard(2))
    refuse(ctx, AssertionError, invalid.format(-3, 2, "weight"), lambda _: Shard(-3))
    refuse(ctx, AssertionError, invalid.format(1, 1, "bias"), lambda _: Shard(1))
    refuse(ctx, ValueError, "Invalid shard_placement_fn result", lambda _: 0)
    refuse(ctx, ValueError, "Invalid shard_placement_fn result", lambda _: Replicate())


def test_one_group_may_shard_on_several_dims_of_a_mesh_with_names(gangs: Gangs) -> None:
    gangs(2).run(check_one_group)


def check_one_group(ctx: RankContext) -> None:
    mesh = init_device_mesh(ctx.device.type, (ctx.world,), mesh_dim_names=("dp",))
    model = odd(ctx)
    fully_shard(model, mesh=mesh, shard_placement_fn=strided)
    (group,) = groups_of(model)
    assert {param.slicing.dim for param in group.params} >= {None, 0, 1}


class Bearing(nn.Module):
    """A linear layer and one more parameter beside it, which the output repeats."""

    def __init__(self, extra: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.extra = nn.Parameter(extra, requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.extra.clone()


RARE_DTYPES = (torch.bool, torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn)


def test_frozen_parameters_may_have_dtypes_that_the_backend_does_not_know(gangs: Gangs) -> None:
    gangs(2).run(check_rare_dtypes)


def check_rare_dtypes(ctx: RankContext) -> None:
    for dtype in RARE_DTYPES:
        extra = (torch.arange(10) % 2).to(dtype).to(ctx.device)
        model = Bearing(extra.clone())
        fully_shard(model.linear, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)  # the extra parameter travels alone
        _, whole = model(torch.ones(2, 4, device=ctx.device))
        assert torch.equal(whole.view(torch.uint8), extra.view(torch.uint8)), dtype


def test_parameters_without_elements_take_part(gangs: Gangs) -> None:
    gangs(2).run(check_without_elements)


def check_without_elements(ctx: RankContext) -> None:
    for shape in ((0,), (0, 4), (4, 0)):
        for alone in (True, False):
            model = Bearing(torch.zeros(shape, device=ctx.device)).to(ctx.device)
            model.extra.requires_grad = True
            if alone:
                fully_shard(model.linear, mesh=ctx.mesh)
            fully_shard(model, mesh=ctx.mesh)
            for _ in range(2):
                computed, extra = model(torch.ones(2, 4, device=ctx.device))
                assert extra.shape == shape
                torch.autograd.backward(computed.sum() + extra.sum())
            assert model.linear.weight.grad is not None
            assert model.extra.grad is not None
            assert model.extra.grad.shape == shape
