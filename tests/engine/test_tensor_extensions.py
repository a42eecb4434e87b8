"""Tensor subclasses that decide what is gathered for them; the reference runs the same ones."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from fsdp_core import Float8Weight, Int8Weight, torch_private
from fsdp_core.errors import EngineError
from fsdp_core.low_precision import LowPrecisionWeight
from tests.engine.gang import Gangs, RankContext
from tests.engine.versus import Engine, assert_equal, engines, groups_of, ours, train

pytestmark = pytest.mark.ranks

aten = torch.ops.aten
# What sharding does to a parameter in the reference; any other operator returns plain tensors.
KEEPS_CLASS = {
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.split.Tensor,
    aten.clone.default,
}


class Wrapped(torch.Tensor):
    """fp32 values in `data_`."""

    seen: ClassVar[list[Any]] = []

    @staticmethod
    def __new__(cls: type[Wrapped], data: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=data.dtype, device=data.device
        )
        return made

    def __init__(self, data: torch.Tensor) -> None:
        self.data_ = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], _: object, *__: object
    ) -> Wrapped:
        return cls(inner["data_"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as subclasses write it
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        del types
        args, kwargs = pytree.tree_map_only(Wrapped, lambda t: t.data_, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func not in KEEPS_CLASS:
            return out
        return pytree.tree_map_only(torch.Tensor, cls, out)


def refill(out: torch.Tensor, values: torch.Tensor) -> None:
    # The reference leaves both to the subclass.
    with torch.no_grad(), torch_private.preserve_version([out]):
        out.copy_(values)


class Bf16(Wrapped):
    """The short form: one input, in another dtype."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self.data_.to(torch.bfloat16),), tuple(mesh.shape)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: Any,  # noqa: ANN401 - its own
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        Wrapped.seen.append(("refill" if out is not None else "first", metadata))
        (tensor,) = outputs
        whole = tensor.to(param_dtype)
        if out is not None:
            refill(out, whole)
            return None
        return whole, (tensor, whole)


class Scaled(Wrapped):
    """The long form: int8 values and a scale for each row, padded by itself."""

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,  # noqa: ANN401 - either engine's
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert mesh.ndim == 1
        assert outer_stride == torch.empty(outer_size).stride()
        assert isinstance(module, nn.Linear)
        assert mp_policy.cast_forward_inputs
        rows = -(-outer_size[0] // mesh.size())
        data = self.data_.new_zeros(rows, *outer_size[1:])
        data[: self.size(0)] = self.data_
        scale = data.abs().amax(dim=1, keepdim=True).clamp(min=1e-6) / 127
        # Equal shapes, as an unevenly sharded parameter needs; not equal dtypes.
        return (
            (data / scale).round().to(torch.int8),
            scale.expand_as(data).contiguous(),
        ), outer_size[0]

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: Any,  # noqa: ANN401 - its own
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        Wrapped.seen.append(("refill" if out is not None else "first", metadata))
        values, scale = outputs
        assert values.dtype == torch.int8
        assert scale.dtype == torch.float32
        whole = (values * scale).to(param_dtype)[:metadata]
        if out is not None:
            refill(out, whole)
            return None
        whole = whole.clone()
        return whole, (whole,)


class Whole(Wrapped):
    """The whole parameter is of the class too, so that it has no memory of its own."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self.data_,), tuple(mesh.shape)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: Any,  # noqa: ANN401 - its own
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        del metadata, param_dtype
        # What arrived is the memory of the wrapped tensor.
        return (Whole(outputs[0]), outputs) if out is None else None


class OneMethod(Wrapped):
    """Half of the protocol."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        raise NotImplementedError(mesh)


class WrongForm(Bf16):
    """Two arguments: neither form."""

    def fsdp_pre_all_gather(  # type: ignore[override]  # wrong on purpose
        self, mesh: DeviceMesh, other: object
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        raise NotImplementedError(mesh, other)


class Unpadded(Scaled):
    """Forgets that the last slice is smaller."""

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,  # noqa: ANN401 - either engine's
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        del mesh, outer_stride, module, mp_policy
        return (self.data_, self.data_), outer_size[0]


def net(kind: type[Wrapped] | type[LowPrecisionWeight], *, rows: int = 6) -> Any:  # noqa: ANN401 - a Sequential whose layers mypy does not know
    torch.manual_seed(15)
    layers = [nn.Linear(4, rows), nn.Linear(rows, 4)]
    for layer in layers:
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def sharded(ctx: RankContext, engine: Engine, model: Any, **options: Any) -> Any:  # noqa: ANN401 - as in `net`
    options = {"mesh": ctx.mesh, **options}
    engine.shard(model[0], **options)
    engine.shard(model, **options)
    return model


def loss_on(ctx: RankContext, model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(ctx.batch(step, 3, 4)).float().square().mean()
    return loss


# At one rank the reference hands over the first of several inputs alone.
@pytest.mark.parametrize(("world", "kind"), [(1, Bf16), (2, Bf16), (2, Scaled)])
def test_extended_parameters_train_as_in_the_reference(
    gangs: Gangs, kind: type[Wrapped], world: int
) -> None:
    gangs(world).run(compare, kind)


def compare(ctx: RankContext, kind: type[Wrapped]) -> None:
    # Bf16 leaves padding to the engine, which the protocol allows for even slices alone.
    for rows in (6,) if kind is Bf16 else (6, 5, 1):
        for dtype in (None, torch.bfloat16):
            traces, seen = [], []
            for engine in engines():
                policy = engine.precision(param_dtype=dtype, reduce_dtype=torch.float32)
                model = sharded(
                    ctx, engine, net(kind, rows=rows), mp_policy=policy, reshard_after_forward=True
                )
                Wrapped.seen.clear()
                traces.append(
                    train(
                        model,
                        lambda m, step: loss_on(ctx, m, step),
                        microbatches=2,
                        before_backward=lambda m, micro: m.set_requires_gradient_sync(micro == 1),
                        optimizer=torch.optim.SGD,
                    )
                )
                seen.append(list(Wrapped.seen))
            assert_equal(*traces)
            assert seen[0] == seen[1]
            assert {how for how, _ in seen[0]} == {"first", "refill"}


def test_one_rank_hands_over_all_inputs(gangs: Gangs) -> None:
    gangs(1).run(check_one_rank)


def check_one_rank(ctx: RankContext) -> None:
    model, plain = sharded(ctx, ours(), net(Scaled)), net(Scaled)
    for layer in (plain[0], plain[2]):
        values = layer.weight.data_.to(ctx.device)
        scale = values.abs().amax(dim=1, keepdim=True).clamp(min=1e-6) / 127
        layer.weight = nn.Parameter((values / scale).round() * scale)
    plain = plain.to(ctx.device)
    for each in (model, plain):
        torch.autograd.backward(loss_on(ctx, each, 0))
    assert torch.equal(loss_on(ctx, model, 0), loss_on(ctx, plain, 0))
    assert isinstance(model[0].weight.grad, DTensor)
    torch.testing.assert_close(model[0].weight.grad.to_local(), plain[0].weight.grad)


def test_memory_of_extended_parameters_is_given_back(gangs: Gangs) -> None:
    gangs(2).run(check_memory)


def check_memory(ctx: RankContext) -> None:
    for kind in (Bf16, Scaled):
        model = sharded(ctx, ours(), net(kind))
        kept: list[nn.Parameter] = []
        for step in range(2):
            torch.autograd.backward(loss_on(ctx, model, step))
            params = [param for group in groups_of(model) for param in group.params]
            assert all(param.unsharded().held_bytes == 0 for param in params)
            model[0].unshard()
            kept.append(model[0].weight)
            held = [param.unsharded().held_bytes for param in params]
            assert max(held) >= model[0].weight.numel() * 4
            model[0].reshard()
            assert all(param.unsharded().held_bytes == 0 for param in params)
        assert kept[0] is kept[1]


class Products(nn.Linear):
    """Computes by kernels that read the parameter itself, not by views of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(1) * self.weight).sum(dim=2) + self.bias


@pytest.mark.parametrize("kind", [Bf16, Scaled, Whole, Int8Weight, Float8Weight])
def test_a_backward_that_would_read_freed_extended_parameters_is_refused(
    gangs: Gangs, kind: type[Wrapped] | type[LowPrecisionWeight]
) -> None:
    gangs(2).run(check_freed, kind)


def check_freed(ctx: RankContext, kind: type[Wrapped] | type[LowPrecisionWeight]) -> None:
    refused = pytest.raises(RuntimeError, match="modified by an inplace operation")
    models: list[Any] = []
    for _ in range(2):
        layers = net(kind)
        for layer in (layers[0], layers[2]):
            layer.__class__ = Products
        models.append(sharded(ctx, ours(), layers))
    model, alone = models
    for step in range(2):
        x = ctx.batch(step, 3, 4).requires_grad_()
        loss = model(x).float().square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        with refused:
            torch.autograd.backward(slope.square().sum())
        # What raised leaves nothing behind.
        model.zero_grad()
        for each in (model, alone):
            torch.autograd.backward(loss_on(ctx, each, step))
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())
        alone.zero_grad()


def test_the_mesh_of_a_grid_is_its_shard_axis(gangs: Gangs) -> None:
    gangs(2).run(check_grid)


def check_grid(ctx: RankContext) -> None:
    for sizes in ((2, 1), (1, 2)):
        mesh = init_device_mesh(ctx.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard"))
        traces = []
        for engine in engines():
            model = sharded(ctx, engine, net(Bf16), mesh=mesh)
            Wrapped.seen.clear()
            traces.append(train(model, lambda m, s: loss_on(ctx, m, s), optimizer=torch.optim.SGD))
            assert {metadata for _, metadata in Wrapped.seen} == {(sizes[1],)}
        assert_equal(*traces)


def test_methods_given_to_a_slice_after_sharding_are_used(gangs: Gangs) -> None:
    gangs(2).run(check_patched)


def pre(self: torch.Tensor, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
    return (self.to(torch.bfloat16),), tuple(mesh.shape)


def check_patched(ctx: RankContext) -> None:
    traces = []
    for engine in engines():
        torch.manual_seed(16)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        sharded(ctx, engine, model)
        for layer in (model[0], model[2]):
            assert isinstance(layer.weight, DTensor)
            part: Any = layer.weight._local_tensor
            part.fsdp_pre_all_gather = MethodType(pre, part)
            part.fsdp_post_all_gather = MethodType(Bf16.fsdp_post_all_gather, part)
        Wrapped.seen.clear()
        traces.append(train(model, lambda m, s: loss_on(ctx, m, s), optimizer=torch.optim.SGD))
        assert Wrapped.seen
    assert_equal(*traces)


def test_broken_extensions_are_refused_by_name(gangs: Gangs) -> None:
    gangs(2).run(check_refusals)


def check_refusals(ctx: RankContext) -> None:
    engine = ours()
    model = net(OneMethod)
    both = "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined"
    with pytest.raises(AssertionError, match=both) as caught:
        engine.shard(model[0], mesh=ctx.mesh)
    assert isinstance(caught.value, EngineError)
    assert "'weight'" in str(caught.value)
    assert not isinstance(model[0].bias, DTensor)

    model = sharded(ctx, engine, net(WrongForm))
    with pytest.raises(AssertionError, match=r"Invalid fsdp_pre_all_gather.*'2.weight'"):
        loss_on(ctx, model, 0)

    model = net(Bf16, rows=5)
    engine.shard(model[0], mesh=ctx.mesh)
    # On all ranks, or those whose slices are not short would wait.
    with pytest.raises(AssertionError, match=r"'weight'.*takes \(self, mesh\) alone.*3, 4"):
        model[0](torch.ones(1, 4))

    model = net(Unpadded, rows=5)
    engine.shard(model[0], mesh=ctx.mesh)
    layer = model[0]
    if ctx.rank == ctx.world - 1:
        with pytest.raises(AssertionError, match=r"'weight'.*padded sharded size .*3, 4.*2, 4"):
            layer(torch.ones(1, 4))


def test_integer_reshard_of_extended_parameters_is_refused_at_the_call(gangs: Gangs) -> None:
    gangs(4).run(check_integer_reshard)


def check_integer_reshard(ctx: RankContext) -> None:
    layer = net(Bf16)[0]
    with pytest.raises(
        NotImplementedError, match=r"Resharding to smaller mesh.*'weight'"
    ) as caught:
        ours().shard(layer, mesh=ctx.mesh, reshard_after_forward=2)
    assert isinstance(caught.value, EngineError)
    ours().shard(layer, mesh=ctx.mesh)
    # A slice that takes part only later is found at the first forward.
    patched = nn.Linear(4, 4)
    ours().shard(patched, mesh=ctx.mesh, reshard_after_forward=2)
    assert isinstance(patched.weight, DTensor)
    part: Any = patched.weight._local_tensor
    part.fsdp_pre_all_gather = MethodType(pre, part)
    part.fsdp_post_all_gather = MethodType(Bf16.fsdp_post_all_gather, part)
    with pytest.raises(NotImplementedError, match=r"Resharding to smaller mesh.*'weight'"):
        patched(torch.ones(1, 4))
