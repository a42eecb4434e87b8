"""The total norm is that of the unsharded model on every mesh, and no gradient is made whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

from fsdp_core import clip_grad_norm_
from fsdp_core.errors import ArgumentError, NonFiniteNormError, UnsupportedError
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import decoder, loss_of, tokens_of
from tests.engine.sharded import backward_once, shard_decoder

Kind = Literal["hsdp", "tp", "hsdp_tp", "ep"]
NORMS = [2.0, 1.0, 3.0, math.inf, -math.inf]
assert_tight = partial(torch.testing.assert_close, rtol=1e-6, atol=0.0)


@dataclass(frozen=True)
class Lying:
    """How one hand-made parameter lies, and whether it has a gradient."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...] | None
    axes: tuple[str, ...] = ("a", "b")
    has_grad: bool = True


MESHES: dict[Kind, tuple[tuple[int, ...], list[Lying]]] = {
    "hsdp": (
        (2, 2),
        [
            Lying((5, 3), (Replicate(), Shard(0))),
            Lying((1,), (Replicate(), Shard(0))),  # one rank of the axis is empty
            Lying((4, 2), (Replicate(), Shard(0)), has_grad=False),
        ],
    ),
    "tp": (
        (2, 2),
        [
            Lying((5, 4), (Shard(0), Shard(1))),
            Lying((6, 4), (Shard(0), Shard(0))),
            Lying((7,), (Shard(0), Replicate())),
            Lying((3, 5), (Replicate(), Shard(1))),
            Lying((3,), (Replicate(), Replicate())),
            Lying((2, 2), None),
        ],
    ),
    "hsdp_tp": (
        (2, 2, 1),
        [
            Lying((5, 4), (Replicate(), Shard(0), Shard(1)), ("a", "b", "c")),
            Lying((3,), (Replicate(), Shard(0), Replicate()), ("a", "b", "c")),
        ],
    ),
    "ep": (
        (2, 2),
        [
            Lying((5, 4), (Shard(0),), ("a",)),
            Lying((6, 3), (Shard(0),), ("b",)),
            Lying((4, 4), (Shard(0), Shard(1))),
            Lying((2, 3), (Shard(0),), ("b",), has_grad=False),
        ],
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_sharded_model_is_clipped_as_the_whole_one_is(gangs: Gangs, world: int) -> None:
    totals = gangs(world).run(clip_the_decoder)
    assert all(each == totals[0] for each in totals)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", MESHES)
def test_every_mesh_counts_each_element_once(gangs: Gangs, kind: Kind) -> None:
    totals = gangs(4).run(clip_on_mesh, kind)
    assert all(each == totals[0] for each in totals)


@pytest.mark.ranks
def test_the_total_costs_one_all_reduce_an_axis_and_no_gather(gangs: Gangs) -> None:
    gangs(4).run(count_collectives)


@pytest.mark.ranks
def test_ranks_that_lack_a_gradient_agree_with_those_that_have_one(gangs: Gangs) -> None:
    totals = gangs(2).run(clip_where_one_rank_has_none)
    assert totals[0] == totals[1] == pytest.approx(5.0)


@pytest.mark.ranks
def test_nan_on_one_rank_is_seen_by_all(gangs: Gangs) -> None:
    gangs(3).run(clip_nan)


@pytest.mark.ranks
def test_the_library_function_clips_our_gradients_too(gangs: Gangs) -> None:
    gangs(2).run(clip_with_torch)


@pytest.mark.ranks
def test_a_partial_gradient_is_refused_by_name(gangs: Gangs) -> None:
    gangs(2).run(clip_partial)


@pytest.mark.parametrize("order", NORMS)
def test_plain_tensors_are_clipped_as_the_library_does(order: float) -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    torch.autograd.backward(model(torch.randn(4, 5)).square().sum())
    twin = with_grads(copy.deepcopy(model), model)
    total = clip_grad_norm_(model.parameters(), 0.1, order)
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1, order)
    assert_tight(total, expected)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_tight(mine.grad, theirs.grad)


def test_a_small_norm_changes_no_gradient() -> None:
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.tensor([3.0, 0.0, 4.0])
    assert clip_grad_norm_(param, 6.0).item() == 5.0
    assert param.grad.tolist() == [3.0, 0.0, 4.0]


@pytest.mark.parametrize("largest", [4.0, math.inf, math.nan])
def test_without_a_bound_the_norm_is_only_measured(largest: float) -> None:
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.tensor([3.0, 0.0, largest])
    version = param.grad._version
    total = clip_grad_norm_(param, math.inf)
    assert total.item() == pytest.approx(math.hypot(3.0, largest), nan_ok=True)
    assert param.grad._version == version
    assert param.grad[:2].tolist() == [3.0, 0.0]


def test_a_parameter_given_twice_counts_once() -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([param, param], 2.5, foreach=False).item() == 5.0
    torch.testing.assert_close(param.grad, torch.tensor([1.5, 2.0]))


def test_without_gradients_the_norm_is_zero() -> None:
    total = clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0)
    assert (total.item(), total.shape, total.dtype) == (0.0, (), torch.float32)
    assert clip_grad_norm_([], 1.0, math.inf).item() == 0.0


def test_low_precision_gradients_are_summed_in_fp32() -> None:
    param = nn.Parameter(torch.zeros(3000, dtype=torch.bfloat16))
    param.grad = torch.full_like(param, 0.01)
    total = clip_grad_norm_(param, 1e9)
    assert total.dtype == torch.float32
    expected = param.grad.double().norm()
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=0.0)


def test_norms_whose_squares_overflow_fp32_are_still_finite() -> None:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for param, value in zip(params, (3e25, 4e25), strict=True):
        param.grad = torch.tensor([value])
    assert clip_grad_norm_(params, 1.0).item() == pytest.approx(5e25, rel=1e-6)
    assert params[0].grad is not None
    assert params[0].grad.item() == pytest.approx(0.6, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_total_that_is_not_finite_raises_only_if_asked(bad: float) -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([1.0, bad])
    with pytest.raises(NonFiniteNormError, match="non-finite") as caught:
        clip_grad_norm_(param, 1.0, error_if_nonfinite=True)
    assert isinstance(caught.value, RuntimeError)
    assert param.grad[0] == 1.0
    assert not clip_grad_norm_(param, 1.0).isfinite()


def test_an_order_that_is_no_norm_is_refused() -> None:
    for order in (0.0, math.nan):
        with pytest.raises(ArgumentError, match="norm_type"):
            clip_grad_norm_([], 1.0, order)


def clip_the_decoder(ctx: RankContext) -> list[float]:
    totals = []
    for order in (2.0, math.inf):
        whole = decoder().to(ctx.device)
        for rank in range(ctx.world):
            loss = loss_of(whole, tokens_of(0, rank).to(ctx.device)) / ctx.world
            torch.autograd.backward(loss)
        model = shard_decoder(ctx)
        backward_once(ctx, model)
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05, order)
        with forbid_full_tensors():
            total = clip_grad_norm_(model.parameters(), 0.05, order)
        assert not isinstance(total, DTensor)
        # Sums over ranks run in another order than one process adds them up in.
        assert_tight(total, expected)
        assert_same_grads(model, whole)
        totals.append(total.item())
    return totals


def assert_same_grads(model: nn.Module, whole: nn.Module) -> None:
    expected = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        grad, other = param.grad, expected[name].grad
        if other is None:
            assert grad is None, name
            continue
        assert isinstance(grad, DTensor), name
        torch.testing.assert_close(grad.full_tensor(), other, rtol=2e-5, atol=1e-8)


def clip_on_mesh(ctx: RankContext, kind: Kind) -> list[float]:
    shape, lying = MESHES[kind]
    mesh = init_device_mesh(ctx.device.type, shape, mesh_dim_names=("a", "b", "c")[: len(shape)])
    totals = []
    for order in NORMS:
        for foreach in (None, False):
            params, whole = make_params(ctx, mesh, lying)
            with forbid_full_tensors():
                total = clip_grad_norm_(params, 0.5, order, foreach=foreach)
            expected = torch.nn.utils.clip_grad_norm_(whole, 0.5, order)
            assert_tight(total, expected)
            assert type(total) is torch.Tensor
            assert total.shape == ()
            assert_same_values(params, whole)
            totals.append(total.item())
    return totals


def make_params(
    ctx: RankContext, mesh: DeviceMesh, lying: Sequence[Lying]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters as they lie on the mesh, and the same whole ones."""
    generator = torch.Generator().manual_seed(3)
    params, whole = [], []
    for each in lying:
        value = torch.randn(each.shape, generator=generator).to(ctx.device)
        grad = torch.randn(each.shape, generator=generator).to(ctx.device)
        whole.append(nn.Parameter(value))
        params.append(nn.Parameter(lay(value, mesh, each)))
        if each.has_grad:
            whole[-1].grad = grad.clone()
            params[-1].grad = lay(grad, mesh, each)
    return params, whole


def lay(tensor: torch.Tensor, mesh: DeviceMesh, lying: Lying) -> torch.Tensor:
    if lying.placements is None:
        return tensor.clone()
    names = lying.axes
    return distribute_tensor(tensor.clone(), mesh[names], lying.placements)


def assert_same_values(params: Sequence[nn.Parameter], whole: Sequence[nn.Parameter]) -> None:
    for param, other in zip(params, whole, strict=True):
        grad = param.grad
        if grad is None:
            assert other.grad is None
            continue
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        assert_tight(full, other.grad)


@contextmanager
def forbid_full_tensors() -> Iterator[None]:
    """Fails if a gather happens within."""
    with CommDebugMode() as seen:  # type: ignore[no-untyped-call]  # PyTorch's
        yield
    kinds = {str(op) for op in seen.get_comm_counts()}
    assert all("allreduce" in kind for kind in kinds), kinds


def count_collectives(ctx: RankContext) -> None:
    shape, lying = MESHES["tp"]
    mesh = init_device_mesh(ctx.device.type, shape, mesh_dim_names=("a", "b"))
    params, _ = make_params(ctx, mesh, lying)
    sizes: list[int] = []
    original = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401 - passed on as they come
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting  # restored below
    try:
        clip_grad_norm_(params, 1.0)
    finally:
        dist.all_reduce = original
    # Three ways of sharding: on both axes, on "a", on "b".
    assert sizes == [2, 2]


def clip_where_one_rank_has_none(ctx: RankContext) -> float:
    param = nn.Parameter(distribute_tensor(torch.zeros(4), ctx.mesh, [Shard(0)]))
    if ctx.rank == 0:
        local = torch.tensor([3.0, 4.0], device=ctx.device)
        param.grad = DTensor.from_local(local, ctx.mesh, [Shard(0)], run_check=False)
    return clip_grad_norm_([param], 1.0).item()


def clip_nan(ctx: RankContext) -> None:
    for order in (2.0, math.inf):
        for bad in range(ctx.world):
            grad = torch.arange(6.0, device=ctx.device)
            grad[2 * bad] = math.nan
            param = nn.Parameter(distribute_tensor(torch.zeros(6), ctx.mesh, [Shard(0)]))
            param.grad = distribute_tensor(grad, ctx.mesh, [Shard(0)], src_data_rank=None)
            with pytest.raises(NonFiniteNormError):
                clip_grad_norm_(param, 1.0, order, error_if_nonfinite=True)
            assert clip_grad_norm_(param, 1.0, order).isnan()


def clip_with_torch(ctx: RankContext) -> None:
    ours, theirs = shard_decoder(ctx), shard_decoder(ctx)
    for model in (ours, theirs):
        backward_once(ctx, model)
    total = clip_grad_norm_(ours.parameters(), 0.05)
    reference = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
    assert isinstance(reference, DTensor)
    assert_tight(total, reference.full_tensor())
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if mine.grad is not None:
            assert isinstance(mine.grad, DTensor)
            assert isinstance(other.grad, DTensor)
            assert_tight(mine.grad.to_local(), other.grad.to_local())


def clip_partial(ctx: RankContext) -> None:
    param = nn.Parameter(distribute_tensor(torch.zeros(4), ctx.mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.ones(4), ctx.mesh, [Partial()], run_check=False)
    with pytest.raises(UnsupportedError, match=r"parameter 1, of shape \(4,\), is P.*axis 0"):
        clip_grad_norm_([nn.Parameter(torch.zeros(2)), param], 1.0)


def with_grads(model: nn.Sequential, source: nn.Sequential) -> nn.Sequential:
    for param, other in zip(model.parameters(), source.parameters(), strict=True):
        assert other.grad is not None
        param.grad = other.grad.clone()
    return model
