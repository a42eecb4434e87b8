"""Weights that travel as one byte an element: precision, traffic, and everything users do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_core import MixedPrecisionPolicy, fully_shard
from fsdp_core.checkpoint import load_model_state, load_optimizer_state
from fsdp_core.comm import BlockCode
from fsdp_core.errors import ArgumentError
from fsdp_core.low_precision import (
    Float8Weight,
    Int8Weight,
    LowPrecisionWeight,
    full_precision,
    gather_in_low_precision,
)
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import Decoder, decoder, loss_of, tokens_of
from tests.engine.sharded import (
    backward_once,
    held_unsharded_bytes,
    local,
    shard_decoder,
    state,
    states,
    unit,
)
from tests.engine.test_checkpoint import Stored, joined, stored

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = {"int8": Int8Weight, "float8": Float8Weight}
Kind = Literal["int8", "float8"]

FP32_ROUNDING = 1 + 1e-5


def bound_of(kind: str, exact: torch.Tensor, block_max: torch.Tensor) -> torch.Tensor:
    """The bounds that `BlockCode` states."""
    if kind == "int8":
        return block_max.expand_as(exact) / 254 * FP32_ROUNDING
    return torch.maximum(exact.abs() / 16, block_max / 448 / 1024) * FP32_ROUNDING


def code_of(kind: str, block_size: int) -> BlockCode:
    return KINDS[kind].code_of(block_size)


def round_trip(code: BlockCode, rows: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(rows.shape, dtype=code.dtype)
    scales = torch.empty(rows.size(0), code.scales_for(rows.size(1)))
    code.encode(rows, codes, scales)
    decoded = torch.empty_like(rows)
    code.decode(codes, scales, decoded)
    return decoded


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [1, 7, 8, 64, 67])
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e20])
def test_decoded_numbers_are_within_the_stated_bound(
    kind: Kind, numel: int, magnitude: float
) -> None:
    generator = torch.Generator().manual_seed(numel)
    # Magnitudes within a block spread over six decades.
    spread = 10 ** (6 * torch.rand(3, numel, generator=generator) - 6)
    exact = magnitude * spread * torch.randn(3, numel, generator=generator)
    decoded = round_trip(code_of(kind, 8), exact)
    for start in range(0, numel, 8):
        block = exact[:, start : start + 8]
        error = (decoded[:, start : start + 8] - block).abs()
        assert (error <= bound_of(kind, block, block.abs().amax(1, keepdim=True))).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_reached_so_no_smaller_one_holds(kind: Kind) -> None:
    code = code_of(kind, 2)
    # Half way between two codes, beside a maximum that makes the scale 1.
    middle = 0.5 if kind == "int8" else 1.0625
    exact = torch.tensor([[code.top, middle]])
    error = (round_trip(code, exact) - exact).abs()
    assert error[0, 1] >= 0.9 * bound_of(kind, exact, exact.amax(1, keepdim=True))[0, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_spoils_its_block_and_no_other(kind: Kind, bad: float) -> None:
    decoded = round_trip(code_of(kind, 2), torch.tensor([[1.0, bad, 3.0, 4.0]]))
    assert not decoded[0, 1].isfinite()
    assert decoded[0, 2:].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: Kind) -> None:
    assert torch.equal(round_trip(code_of(kind, 4), torch.zeros(2, 6)), torch.zeros(2, 6))
    assert round_trip(code_of(kind, 4), torch.tensor([[0.0, 5.0]]))[0, 0] == 0


def test_a_block_has_at_least_one_element() -> None:
    with pytest.raises(ArgumentError, match="block_size"):
        BlockCode.int8(0)


# -- The subclass alone


def test_a_weight_is_an_ordinary_parameter_until_it_is_sharded() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 64)
    model = copy.deepcopy(plain)
    assert gather_in_low_precision(model) == ["weight"]
    assert isinstance(model.weight, nn.Parameter)
    assert isinstance(model.weight, Int8Weight)
    assert type(model.bias) is nn.Parameter
    x = torch.ones(2, 64)
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters())
        torch.autograd.backward(each(x).sum())
        optimizer.step()
        assert not isinstance(optimizer.state[each.weight]["exp_avg"], LowPrecisionWeight)
    assert torch.equal(full_precision(model.weight.detach()), plain.weight)
    assert isinstance(copy.deepcopy(model).weight, Int8Weight)
    assert isinstance(model.to(torch.float64).weight, Int8Weight)
    assert "Int8Weight" in repr(model.weight)


def test_a_file_holds_ordinary_tensors() -> None:
    model = nn.Linear(64, 64)
    gather_in_low_precision(model, Float8Weight)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert type(read["weight"]) is torch.Tensor
    assert torch.equal(read["weight"], full_precision(model.weight.detach()))
    model.load_state_dict(read)
    assert isinstance(model.weight, Float8Weight)


def test_ties_and_the_chooser_are_heeded() -> None:
    model = decoder()
    assert gather_in_low_precision(model) == []  # all of it is small
    names = gather_in_low_precision(model, chooses=lambda name, p: p.ndim > 1 and "up" not in name)
    assert {"embed.weight", "head.weight", "blocks.0.down.weight"} <= set(names)
    assert "blocks.0.up.weight" not in names
    assert model.head.weight is model.embed.weight
    before = model.embed.weight
    assert gather_in_low_precision(model, chooses=lambda _, p: isinstance(p, Int8Weight)) == []
    assert model.embed.weight is before


# -- Sharded


def low_decoder(ctx: RankContext, kind: str, block_size: int = 8) -> Decoder:
    model = decoder().to(ctx.device)
    gather_in_low_precision(model, KINDS[kind], block_size=block_size, chooses=_is_matrix)
    return shard_decoder(ctx, model)


def _is_matrix(_: str, param: nn.Parameter) -> bool:
    return param.ndim > 1


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_whole_parameters_are_within_the_bound(gangs: Gangs, world: int, kind: Kind) -> None:
    gangs(world).run(check_precision, kind)


def check_precision(ctx: RankContext, kind: Kind) -> None:
    plain, model = decoder(), low_decoder(ctx, kind)
    with torch.inference_mode():
        model(tokens_of(0, 0).to(ctx.device))  # a first gather that training must survive
    for step in range(2):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.01 * step)
            for param in plain.parameters():
                param.add_(0.01 * step)
        for found in states(model):
            unit(found.modules[0]).unshard()
        for name, exact in plain.named_parameters():
            whole = model.get_parameter(name).detach().cpu()
            assert type(whole) is torch.Tensor
            assert whole.shape == exact.shape
            if exact.ndim == 1:
                assert torch.equal(whole, exact)
                continue
            assert not torch.equal(whole, exact), name
            assert_within(kind, whole, exact.detach(), ctx.world)
        for found in states(model):
            found.reshard()
        assert held_unsharded_bytes(model) == 0


def assert_within(kind: Kind, whole: torch.Tensor, exact: torch.Tensor, ranks: int) -> None:
    # A block is at most 8 elements of one rank's slice, in order.
    for got, want in zip(whole.chunk(ranks), exact.chunk(ranks), strict=True):
        for values, block in zip(
            torch.split(got.flatten(), 8), torch.split(want.flatten(), 8), strict=True
        ):
            assert ((values - block).abs() <= bound_of(kind, block, block.abs().amax())).all()


@pytest.mark.ranks
def test_a_gather_moves_a_quarter_of_the_bytes(gangs: Gangs) -> None:
    gangs(2).run(check_traffic)


@contextmanager
def counted(name: str, argument: int) -> Iterator[list[int]]:
    """Bytes of one tensor argument, for each call of a collective of `torch.distributed`."""
    original: Callable[..., Any] = getattr(dist, name)
    sizes: list[int] = []

    def wrapped(*args: torch.Tensor, **kwargs: object) -> object:
        sizes.append(args[argument].numel() * args[argument].itemsize)
        return original(*args, **kwargs)

    setattr(dist, name, wrapped)
    try:
        yield sizes
    finally:
        setattr(dist, name, original)


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def check_traffic(ctx: RankContext) -> None:
    sent = {}
    for kind in (None, Int8Weight, Float8Weight):
        model = nn.Linear(256, 128, bias=False).to(ctx.device)
        if kind is not None:
            gather_in_low_precision(model, kind)
        fully_shard(model, mesh=ctx.mesh)
        with counted(GATHER, 1) as sizes:
            unit(model).unshard()
        sent[kind] = sizes
    numel = 256 * 128 // ctx.world
    assert sent[None] == [4 * numel]
    assert sent[Int8Weight] == sent[Float8Weight] == [numel + 4 * numel // 256]
    assert sent[None][0] / sent[Int8Weight][0] > 3.9


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_training_loses_nearly_what_full_precision_loses(gangs: Gangs, kind: Kind) -> None:
    for low, full in gangs(3).run(losses_beside_full_precision, kind):
        assert low == pytest.approx(full, rel=0.02)
        assert low[-1] < low[0] - 0.1


def losses_beside_full_precision(ctx: RankContext, kind: Kind) -> tuple[list[float], list[float]]:
    return train(ctx, low_decoder(ctx, kind), 8)[0], train(ctx, shard_decoder(ctx), 8)[0]


def train(
    ctx: RankContext, model: Decoder, steps: int, optimizer: torch.optim.Optimizer | None = None
) -> tuple[list[float], torch.optim.Optimizer]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for step in range(steps):
        losses.append(backward_once(ctx, model, step).item())
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(
        isinstance(local(p), LowPrecisionWeight)
        == isinstance(local(model.state_dict()[name]), LowPrecisionWeight)
        for name, p in model.named_parameters()
    )
    return losses, optimizer


@pytest.mark.ranks
def test_gradients_are_those_at_the_decoded_weights(gangs: Gangs) -> None:
    gangs(2).run(check_gradients)


def check_gradients(ctx: RankContext) -> None:
    model, plain = low_decoder(ctx, "int8"), decoder().to(ctx.device)
    for found in states(model):
        unit(found.modules[0]).unshard()
    with torch.no_grad():
        for name, param in plain.named_parameters():
            param.copy_(model.get_parameter(name))
    for found in states(model):
        found.reshard()
    for each in (model, plain):
        torch.autograd.backward(loss_of(each, tokens_of(0, 0).to(ctx.device)))
    for name, param in model.named_parameters():
        expected = plain.get_parameter(name).grad
        if expected is not None:
            assert isinstance(param.grad, DTensor)
            assert type(local(param.grad)) is torch.Tensor
            torch.testing.assert_close(param.grad.full_tensor(), expected)


@pytest.mark.ranks
@pytest.mark.parametrize("source", ["int8", "full"])
def test_a_checkpoint_of_two_ranks_goes_on_at_three(gangs: Gangs, source: str) -> None:
    saved = gangs(2).run(save, source)
    assert all(type(shard.values) is torch.Tensor for rank in saved for shard in rank)
    shards = [shard for rank in saved for shard in rank]
    loaded = gangs(3).run(load, shards)
    expected, got = joined(saved), joined(loaded)
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(got[name], values), name


def save(ctx: RankContext, source: str) -> list[Stored]:
    model = low_decoder(ctx, "int8") if source == "int8" else shard_decoder(ctx)
    _, optimizer = train(ctx, model, 2)
    return stored(model, optimizer)


def load(ctx: RankContext, shards: list[Stored]) -> list[Stored]:
    """Into a model that was built on meta."""
    with torch.device("meta"):
        model = Decoder()
    model.head.weight = model.embed.weight
    gather_in_low_precision(model, block_size=8, chooses=_is_matrix)
    shard_decoder(ctx, model)
    model.to_empty(device=ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    saved = [shard.saved() for shard in shards]
    load_model_state(model, saved)
    load_optimizer_state(model, optimizer, saved)
    result = stored(model, optimizer)
    assert isinstance(local(model.embed.weight), Int8Weight)
    assert model.head.weight is model.embed.weight
    train(ctx, model, 1, optimizer)
    return result


@pytest.mark.ranks
def test_state_dicts_load_in_place_and_by_assignment(gangs: Gangs) -> None:
    gangs(2).run(check_state_dict)


def check_state_dict(ctx: RankContext) -> None:
    first, second = low_decoder(ctx, "int8"), low_decoder(ctx, "int8")
    train(ctx, first, 1)
    for assign in (False, True):
        second.load_state_dict(copy.deepcopy(first.state_dict()), assign=assign)
        for name, param in second.named_parameters():
            assert type(local(param)) is type(local(first.get_parameter(name)))
        assert backward_once(ctx, first, 3) == backward_once(ctx, second, 3)
    # An ordinary DTensor, as from a full-precision model, ends low precision for that parameter.
    plain = {
        name: distribute_tensor(param.detach(), ctx.mesh, [Shard(0)])
        for name, param in decoder().to(ctx.device).named_parameters()
    }
    second.load_state_dict({**plain, "head.weight": plain["embed.weight"]}, assign=True)
    full = shard_decoder(ctx)
    assert backward_once(ctx, full, 4) == backward_once(ctx, second, 4)


@pytest.mark.ranks
def test_dtype_changed_after_training_is_decoded_into(gangs: Gangs) -> None:
    gangs(2).run(check_dtype_change)


def check_dtype_change(ctx: RankContext) -> None:
    model = low_decoder(ctx, "int8")
    train(ctx, model, 1)
    model.to(torch.bfloat16)
    assert model(tokens_of(0, 0).to(ctx.device)).dtype == torch.bfloat16
    train(ctx, model, 1)


@pytest.mark.ranks
@pytest.mark.parametrize("dim", [0, 1])
def test_any_dim_may_be_sharded_unevenly(gangs: Gangs, dim: int) -> None:
    gangs(3).run(check_dim, dim)


def check_dim(ctx: RankContext, dim: int) -> None:
    torch.manual_seed(3)
    plain = nn.Conv1d(5, 7, 2)
    model = copy.deepcopy(plain).to(ctx.device)
    gather_in_low_precision(model, block_size=4, chooses=_is_matrix)
    fully_shard(model, mesh=ctx.mesh, shard_placement_fn=lambda p: Shard(dim if p.ndim > 1 else 0))
    for _ in range(2):
        unit(model).unshard()
        error = (model.weight - plain.weight.to(ctx.device)).abs()
        assert 0 < error.max() <= plain.weight.abs().max() / 254 * FP32_ROUNDING
        unit(model).reshard()
    torch.autograd.backward(model(torch.ones(1, 5, 4, device=ctx.device)).sum())
    assert isinstance(model.weight.grad, DTensor)
    assert model.weight.grad.placements == (Shard(dim),)


@pytest.mark.ranks
def test_mixed_precision_decodes_into_the_dtype_of_computation(gangs: Gangs) -> None:
    gangs(2).run(check_mixed_precision)


def check_mixed_precision(ctx: RankContext) -> None:
    model = nn.Linear(64, 64, bias=False).to(ctx.device)
    exact = model.weight.detach().clone()
    gather_in_low_precision(model)
    fully_shard(model, mesh=ctx.mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    unit(model).unshard()
    assert model.weight.dtype == torch.bfloat16
    bound = exact.abs().max() / 254 + exact.abs() / 256
    assert ((model.weight - exact).abs() <= bound * FP32_ROUNDING).all()
    unit(model).reshard()
    torch.autograd.backward(model(ctx.batch(0, 2, 64)).sum())
    assert isinstance(model.weight.grad, DTensor)
    assert model.weight.grad.dtype == torch.float32


@pytest.mark.ranks
def test_replicas_and_tensor_parallel_weights_take_part(gangs: Gangs) -> None:
    gangs(4).run(check_two_axes)


def check_two_axes(ctx: RankContext) -> None:
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    plain = nn.Linear(8, 6, bias=False).to(ctx.device)
    bound = plain.weight.abs().max() / 254 * FP32_ROUNDING
    replicated = copy.deepcopy(plain)
    gather_in_low_precision(replicated, chooses=_is_matrix)
    fully_shard(replicated, mesh=mesh)
    assert isinstance(replicated.weight, DTensor)
    assert replicated.weight.placements == (Replicate(), Shard(0))
    split = copy.deepcopy(plain)
    split.weight = nn.Parameter(distribute_tensor(plain.weight.detach(), mesh["tp"], [Shard(0)]))
    assert gather_in_low_precision(split, chooses=_is_matrix) == ["weight"]
    fully_shard(split, mesh=mesh["dp"])
    for _ in range(2):
        for model in (replicated, split):
            unit(model).unshard()
            whole = model.weight
            full = whole.full_tensor() if isinstance(whole, DTensor) else whole
            assert 0 < (full - plain.weight).abs().max() <= bound
            unit(model).reshard()
    assert state(split).params[0].is_trainable
