"""What users may change about the reduction of gradients, and about the collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_core.comm import AllGather, FSDPMeshInfo, ReduceScatter, ShardPlacementResult
from fsdp_core.comm.strategies import ReduceOp
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import Decoder, decoder, loss_of, tokens_of
from tests.engine.versus import (
    Engine,
    Trace,
    assert_close,
    assert_equal,
    assert_same_full,
    engines,
    groups_of,
    ours,
    train,
)

pytestmark = pytest.mark.ranks


def sharded(
    ctx: RankContext, engine: Engine, mesh: DeviceMesh | None = None, **options: object
) -> Decoder:
    model = decoder().to(ctx.device)
    for unit in (*model.blocks, model):
        engine.shard(unit, mesh=mesh or ctx.mesh, **options)
    return model


def set_options(model: nn.Module, **options: object) -> None:
    for group in groups_of(model):
        for name, value in options.items():
            assert hasattr(group.options, name)
            setattr(group.options, name, value)


def loss_on(ctx: RankContext, model: nn.Module, step: int) -> torch.Tensor:
    return loss_of(model, tokens_of(step, ctx.rank).to(ctx.device))


def sgd(ctx: RankContext, model: nn.Module, *, steps: int = 2, microbatches: int = 1) -> Trace:
    return train(
        model,
        lambda m, step: loss_on(ctx, m, step),
        steps=steps,
        microbatches=microbatches,
        optimizer=torch.optim.SGD,
    )


def test_forced_sums_and_factors_are_the_references(gangs: Gangs) -> None:
    gangs(4).run(compare_sums)


def compare_sums(ctx: RankContext) -> None:
    grid = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for mesh in (ctx.mesh, grid):
        # With forced sums, and in fp16, the reference needs no scaled sum, which gloo lacks.
        for factor, reduce_dtype in ((None, None), (3.0, None), (4.0, torch.bfloat16)):
            compare_options(ctx, mesh, reduce_dtype, factor, force_sum=True)
        for factor in (6.0, 0.5, 16.0):
            compare_options(ctx, mesh, torch.float16, factor, force_sum=False)
        compare_options(ctx, mesh, None, float(mesh.size(-1)), force_sum=False)


def compare_options(
    ctx: RankContext,
    mesh: DeviceMesh,
    reduce_dtype: torch.dtype | None,
    factor: float | None,
    *,
    force_sum: bool,
) -> None:
    traces = []
    for engine in engines():
        policy = engine.precision(reduce_dtype=reduce_dtype)
        model: Any = sharded(ctx, engine, mesh, mp_policy=policy)
        if engine.is_ours:
            set_options(model, divide_factor=factor, force_sum=force_sum)
        else:
            for module in model.modules():
                if hasattr(module, "set_force_sum_reduction_for_comms"):
                    module.set_force_sum_reduction_for_comms(force_sum)
                    if factor is not None:
                        module.set_gradient_divide_factor(factor)
        traces.append(sgd(ctx, model, steps=1))
    assert_equal(*traces)


def test_a_factor_divides_on_every_backend(gangs: Gangs) -> None:
    gangs(4).run(check_factor)


def check_factor(ctx: RankContext) -> None:
    grid = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for mesh in (ctx.mesh, grid):
        for factor in (1.0, 2.0, 3.0, 4.0):
            model, plain = sharded(ctx, ours(), mesh), decoder().to(ctx.device)
            set_options(model, divide_factor=factor)
            torch.autograd.backward(loss_on(ctx, model, 0))
            for rank in range(ctx.world):
                loss = loss_of(plain, tokens_of(0, rank).to(ctx.device))
                torch.autograd.backward(loss / factor)
            assert_same_full(model, plain, rtol=1e-4, atol=1e-6)


def test_a_hook_sees_the_sums_of_its_ranks(gangs: Gangs) -> None:
    gangs(4).run(check_hooks)


def check_hooks(ctx: RankContext) -> None:
    grid = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    pair = grid["dp_shard"]
    replicas = grid.get_group(0)

    def average(grads: torch.Tensor) -> None:
        # What a fault-tolerant replica group of one's own would do.
        dist.all_reduce(grads, op=dist.ReduceOp.AVG, group=replicas)

    by_hook, by_mesh = sharded(ctx, ours(), pair), sharded(ctx, ours(), grid)
    set_options(by_hook, all_reduce_hook=average)
    traces = [sgd(ctx, model, microbatches=2) for model in (by_hook, by_mesh)]
    assert_close(*traces, rtol=1e-5, atol=1e-6)

    # After the all-reduce of a grid; and every element belongs to a gradient.
    seen: list[torch.Tensor] = []

    def double(grads: torch.Tensor) -> None:
        seen.append(grads.clone())
        grads.mul_(2)

    doubled, plain = sharded(ctx, ours(), grid), sharded(ctx, ours(), grid)
    set_options(doubled, all_reduce_hook=double)
    for model in (doubled, plain):
        torch.autograd.backward(loss_on(ctx, model, 0))
    for mine, other in zip(doubled.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None and other.grad is not None:
            assert torch.equal(mine.grad.to_local(), 2 * other.grad.to_local())  # type: ignore[attr-defined]  # a DTensor's
    assert len(seen) == len(list(groups_of(doubled)))
    for group, grads in zip(reversed(list(groups_of(doubled))[1:]), seen, strict=False):
        rows = [param.slicing.row for param in group.params if param.is_trainable]
        assert grads.shape == (sum(rows),)


def test_a_hook_runs_on_the_stream_it_was_given(gangs: Gangs) -> None:
    gangs(2).run(compare_hooks)


def compare_hooks(ctx: RankContext) -> None:
    module = torch.get_device_module(ctx.device)
    traces, streams = [], []
    for engine in engines():
        stream = module.Stream()

        def double(grads: torch.Tensor) -> None:
            streams.append(module.current_stream())
            grads.mul_(2)

        model: Any = sharded(ctx, engine)
        for unit in (*model.blocks, model):
            unit.set_all_reduce_hook(double, stream=stream)
        traces.append(sgd(ctx, model))
        assert all(used is stream for used in streams) == (ctx.device.type == "cpu")
        assert len(streams) == 2 * len([*model.blocks, model])
        streams.clear()
    assert_equal(*traces)


class Pool:
    """Memory of one's own, new each time."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def take(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        memory = torch.full(tuple(size), 77, dtype=dtype, device=device)
        self.given.append(memory)
        return memory

    def owns(self, tensor: torch.Tensor) -> bool:
        return any(m.data_ptr() == tensor.data_ptr() for m in self.given)


class PooledGather(AllGather):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.pool, self.calls = Pool(), 0

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.pool.take(size, dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
    ) -> dist.Work | None:
        assert self.pool.owns(output_tensor)
        rows = output_tensor.view(group.size(), -1)
        assert input_tensor.data_ptr() == rows[group.rank()].data_ptr()
        self.calls += 1
        pieces = [torch.empty_like(row) for row in rows]
        dist.all_gather(pieces, input_tensor, group=group)
        torch.stack(pieces, out=rows)
        del async_op
        return None


class ReusedMemory(ReduceScatter):
    """Gives the same memory for the same size every time, as registered buffers are."""

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], torch.Tensor] = {}
        self.ops: list[object] = []

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        key = (tuple(size), dtype)
        if key not in self.known:
            self.known[key] = torch.empty(tuple(size), dtype=dtype, device=device)
        return self.known[key].fill_(55)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
    ) -> dist.Work | None:
        self.ops.append(op)
        work: dist.Work | None = dist.reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return work


def test_collectives_and_memory_of_ones_own_change_nothing(gangs: Gangs) -> None:
    gangs(2).run(check_custom)


def check_custom(ctx: RankContext) -> None:
    gather, reduce = PooledGather(), ReusedMemory()
    grid = init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    for mesh in (ctx.mesh, grid):
        custom, plain = sharded(ctx, ours(), mesh), sharded(ctx, ours(), mesh)
        set_options(custom, all_gather=gather, reduce_scatter=reduce)
        traces = [sgd(ctx, model, microbatches=2) for model in (custom, plain)]
        assert_equal(*traces)
    assert gather.calls > 0
    assert set(reduce.ops) == {dist.ReduceOp.AVG}


def test_memory_that_is_reused_does_not_reach_sums_that_wait(gangs: Gangs) -> None:
    gangs(4).run(check_reused_with_partial)


def check_reused_with_partial(ctx: RankContext) -> None:
    grid = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    custom, plain = sharded(ctx, ours(), grid), sharded(ctx, ours(), grid)
    set_options(custom, reduce_scatter=ReusedMemory())
    for micro in range(3):
        for model in (custom, plain):
            set_options(model, all_reduce_grads=micro == 2)
            torch.autograd.backward(loss_on(ctx, model, micro))
    assert_same_full(custom, plain, rtol=0.0, atol=0.0)


def test_each_of_several_groups_of_a_unit_has_its_own_choices(gangs: Gangs) -> None:
    gangs(4).run(check_several_groups)


def several_groups(ctx: RankContext, meshes: tuple[DeviceMesh, DeviceMesh]) -> Decoder:
    model = decoder().to(ctx.device)
    infos = [FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in meshes]

    def choose(param: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), infos[param.ndim % 2])

    for unit in (*model.blocks, model):
        ours().shard(unit, mesh=ctx.mesh, shard_placement_fn=choose)
    return model


def check_several_groups(ctx: RankContext) -> None:
    grid = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("outer", "inner"))
    meshes = (init_device_mesh(ctx.device.type, (4,)), grid["inner"])
    custom, plain = several_groups(ctx, meshes), several_groups(ctx, meshes)
    hooked: list[int] = []
    strategies: list[tuple[PooledGather, ReusedMemory]] = []
    for unit in (*custom.blocks, custom):
        groups = list(groups_of(unit, recurse=False))
        assert len(groups) == 2
        for group in groups:
            own = (PooledGather(), ReusedMemory())
            strategies.append(own)
            group.options.all_gather, group.options.reduce_scatter = own
            group.options.all_reduce_hook = lambda grads: hooked.append(grads.numel())
    assert_equal(*(sgd(ctx, model) for model in (custom, plain)))
    assert all(gather.calls > 0 and reduce.ops for gather, reduce in strategies)
    assert hooked


def test_reductions_may_travel_in_another_group(gangs: Gangs) -> None:
    gangs(2).run(check_reduce_group)


def check_reduce_group(ctx: RankContext) -> None:
    other = dist.new_group(list(range(ctx.world)))
    used: list[object] = []
    apart, plain = sharded(ctx, ours()), sharded(ctx, ours())

    class Watch(ReusedMemory):
        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: dist.ProcessGroup,
            op: ReduceOp,
            async_op: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
        ) -> dist.Work | None:
            used.append(group)
            return super().__call__(output_tensor, input_tensor, group, op, async_op)

    set_options(apart, reduce_group=other, reduce_scatter=Watch())
    assert_equal(*(sgd(ctx, model) for model in (apart, plain)))
    assert used
    assert all(group is other for group in used)


def test_unused_parameters_get_zeros_if_asked_as_in_the_reference(gangs: Gangs) -> None:
    gangs(3).run(compare_unused)


def compare_unused(ctx: RankContext) -> None:
    traces = []
    for engine in engines():
        model: Any = sharded(ctx, engine)
        if engine.is_ours:
            set_options(model, reduce_unused=True)
        else:
            model.set_reduce_scatter_unused_params(True)
        traces.append(sgd(ctx, model))
    assert_equal(*traces)
    never = traces[0].grads[0]["blocks.0.never"]
    assert never is not None
    assert not never.any()


def test_sums_too_large_for_fp16_are_divided_in_time(gangs: Gangs) -> None:
    gangs(4).run(check_overflow)


def check_overflow(ctx: RankContext) -> None:
    layer = nn.Linear(3, 4, bias=False).to(ctx.device)
    ours().shard(layer, mesh=ctx.mesh, mp_policy=ours().precision(None, torch.float16))
    torch.autograd.backward(layer(torch.full((1, 3), 30000.0, device=ctx.device)).sum())
    grad: Any = layer.weight.grad
    assert torch.equal(grad.full_tensor(), torch.full((4, 3), 30000.0, device=ctx.device))
