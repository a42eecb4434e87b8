"""Every function of the 2D extension system gives what PyTorch's gives, on a 2x2 mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fsdp_core.errors import EngineError
from fsdp_core.fsdp1 import (
    boxes,
    dispatch,
    flattening,
    one_axis,
    sharded_metadata,
    two_axes,
)
from fsdp_core.torch_private.sharded_tensor import ChunkShardingSpec, RemoteDevice, ShardedTensor
from tests.engine.gang import Gangs, RankContext
from tests.extensions.grid import (
    Raised,
    Reference,
    assert_same,
    grid,
    numbered,
    outcome,
    outdated_words,
    reference,
)

pytestmark = pytest.mark.ranks

# Lengths of dim 0: divided by all, by the tensor-parallel axis only, by none, less than ranks.
LENGTHS = [8, 6, 7, 1]
TP: list[Placement] = [Shard(0), Shard(1), Replicate()]


def test_plain_tensors_are_chunked_and_gathered_as_by_the_reference(gangs: Gangs) -> None:
    gangs(4).run(check_one_axis)


def check_one_axis(ctx: RankContext) -> None:
    them = reference()
    mesh = grid(ctx)
    flat = ctx.mesh
    for length in LENGTHS:
        whole = numbered(ctx, length, 3).requires_grad_()
        plain = whole.detach()
        for group in (mesh["dp_shard"].get_group(), flat.get_group()):
            for device in (None, ctx.device):
                place = dist.get_rank(group), dist.get_world_size(group), 8, group, device
                with outdated_words():
                    theirs = them.shard._create_chunk_sharded_tensor(plain, *place)
                assert_same(one_axis._create_chunk_sharded_tensor(plain, *place), theirs)
        for over in (flat, mesh):
            theirs = them.shard._create_chunk_dtensor(whole, ctx.rank, over)
            ours = one_axis._create_chunk_dtensor(whole, ctx.rank, over)
            assert_same(ours, theirs)
            gathered = one_axis._all_gather_dtensor(ours, over)
            assert_same(gathered, them.shard._all_gather_dtensor(theirs, over))
            assert torch.equal(gathered, whole)
            ours.to_local().zero_()
            assert torch.equal(gathered, whole), "chunks share no memory with the whole"


def test_boxes_and_their_descriptions_are_those_of_the_reference(gangs: Gangs) -> None:
    gangs(4).run(check_boxes)


def check_boxes(ctx: RankContext) -> None:
    them = reference().tensor_parallel
    mesh = grid(ctx)
    group = mesh["tp"].get_group()
    first_row = ctx.rank < 2
    for shape, placement in [((8, 4), p) for p in TP] + [((6, 2), p) for p in TP]:
        dt = distribute_tensor(numbered(ctx, *shape), mesh["tp"], [placement])
        assert boxes._get_box(dt) == them._get_box(dt)
        assert boxes._get_local_box(dt) == them._get_local_box(dt)
        for index in range(2 if placement.is_shard() else 1):
            assert boxes._get_box_for(dt, index) == them._get_box_for(dt, index)
        for rank in (0, 3):
            ours = sharded_metadata._create_shard_md_from_dt(dt, rank)
            assert ours == them._create_shard_md_from_dt(dt, rank)
        assert sharded_metadata._get_dt_pg(dt) is them._get_dt_pg(dt)
        described = sharded_metadata._create_sharded_tensor_md_from_dt(dt, group)
        theirs = them._create_sharded_tensor_md_from_dt(dt, group)
        if not first_row:
            # It numbers ranks within the group, and means global numbers.
            for shard in theirs.shards_metadata:
                shard.placement = RemoteDevice(
                    f"rank:{dist.get_global_rank(group, shard.placement.rank())}/{ctx.device}"
                )
        assert described == theirs


def test_uneven_chunks_have_the_boxes_that_dtensor_gives_them(gangs: Gangs) -> None:
    gangs(4).run(check_uneven_boxes)


def check_uneven_boxes(ctx: RankContext) -> None:
    over = ctx.mesh
    for length in (6, 7, 5, 1):
        whole = numbered(ctx, length, 3)
        dt = distribute_tensor(whole, over, [Shard(0)])
        (start, _), size = boxes._get_local_box(dt)
        assert size == dt.to_local().shape
        assert torch.equal(whole[start : start + size[0]], dt.to_local())
        sizes = [boxes._get_box_for(dt, index)[1] for index in range(4)]
        assert sum(each[0] for each in sizes) == length


def test_tensor_parallel_parameters_are_chunked_as_by_the_reference(gangs: Gangs) -> None:
    gangs(4).run(check_chunk_tensor)


@outdated_words()
def check_chunk_tensor(ctx: RankContext) -> None:
    them = reference()
    chunk = them.tensor_parallel._chunk_tensor
    mesh = grid(ctx)
    place = mesh["dp_shard"].get_local_rank(), 2, 8, mesh["dp_shard"].get_group()
    for length in LENGTHS:
        whole = numbered(ctx, length, 4)
        assert_same(two_axes._chunk_tensor(whole, *place), chunk(whole, *place))
        for placement in TP:
            dt = distribute_tensor(whole, mesh["tp"], [placement])
            ours = two_axes._chunk_tensor(dt, *place)
            theirs = outcome(partial(chunk, dt, *place))
            # It takes chunks to be of one size, and numbers in the group for global ones.
            refused = (placement == Shard(0) and length % 2 == 1) or ctx.rank > 1
            assert isinstance(theirs, Raised) == refused
            if not refused:
                assert_same(ours, theirs)
            check_unwrapped(them, ours, dt.to_local())


def test_a_sharded_tensor_is_chunked_within_as_by_the_reference(gangs: Gangs) -> None:
    gangs(4).run(check_chunk_sharded_tensor)


@outdated_words()
def check_chunk_sharded_tensor(ctx: RankContext) -> None:
    them = reference()
    mesh = grid(ctx)
    columns = mesh["tp"].get_local_rank(), 2, 8, mesh["tp"].get_group()
    rows = mesh["dp_shard"].get_local_rank(), 2, 8, mesh["dp_shard"].get_group()
    for length in (8, 6, 7):
        tensor = one_axis._create_chunk_sharded_tensor(numbered(ctx, length, 4), *columns)
        ours = two_axes._chunk_tensor(tensor, *rows)
        assert_same(ours, them.tensor_parallel._chunk_tensor(tensor, *rows))
        check_unwrapped(them, ours, tensor.local_tensor())


def check_unwrapped(them: Reference, outer: ShardedTensor, local: torch.Tensor) -> None:
    """The chunks within are the tensor-parallel shard's, on every row of the mesh."""
    inner, shards = two_axes._pre_load_state_dict(outer)
    theirs, their_shards = them.tensor_parallel._pre_load_state_dict(outer)
    assert inner is theirs
    assert shards == their_shards
    assert inner.size() == local.size()
    for shard in shards:
        start, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        assert torch.equal(shard.tensor, local[start : start + rows])
    plain, own = two_axes._pre_load_state_dict(inner)
    assert plain is inner
    assert own == them.tensor_parallel._pre_load_state_dict(inner)[1]


def test_dtensors_are_chunked_and_gathered_as_by_the_reference(gangs: Gangs) -> None:
    gangs(4).run(check_chunk_dtensor)


def check_chunk_dtensor(ctx: RankContext) -> None:
    them = reference().tensor_parallel
    for shape in ((2, 2), (2, 1, 2), (1, 2, 2)):
        mesh = grid(ctx, shape)
        for length in LENGTHS:
            whole = numbered(ctx, length, 4)
            check_both_ways(whole, ctx.rank, mesh, them._chunk_dtensor, them._all_gather_dtensor)
            for placement in TP:
                dt = distribute_tensor(whole, mesh["tp"], [placement])
                uneven = placement == Shard(0) and length % 2
                if uneven:  # the reference takes each rank's own chunk for half of the whole
                    ours = two_axes._chunk_dtensor(dt, ctx.rank, mesh["dp_shard"])
                    assert ours.shape == whole.shape
                    assert torch.equal(two_axes._all_gather_dtensor(ours, mesh), dt.to_local())
                else:
                    check_both_ways(
                        dt, ctx.rank, mesh, them._chunk_dtensor, them._all_gather_dtensor
                    )


def check_both_ways(
    tensor: torch.Tensor,
    rank: int,
    mesh: DeviceMesh,
    chunk: Callable[[torch.Tensor, int, DeviceMesh], DTensor],
    gather: Callable[[DTensor, DeviceMesh], torch.Tensor],
) -> None:
    theirs = chunk(tensor, rank, mesh["dp_shard"])
    ours = two_axes._chunk_dtensor(tensor, rank, mesh["dp_shard"])
    assert_same(ours, theirs)
    gathered = two_axes._all_gather_dtensor(ours, mesh)
    assert_same(gathered, gather(theirs, mesh))
    assert torch.equal(gathered, tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def test_flattening_and_back_is_that_of_the_reference(gangs: Gangs) -> None:
    gangs(4).run(check_flattening)


def check_flattening(ctx: RankContext) -> None:
    them = reference()
    mesh = grid(ctx)["tp"]
    plain = numbered(ctx, 4, 4)
    assert flattening._flatten_tensor(plain) == (plain, None)
    for length in LENGTHS:
        for placement in TP:
            dt = distribute_tensor(numbered(ctx, length, 4), mesh, [placement])
            local, spec = flattening._flatten_tensor(dt)
            their_local, their_spec = them.flatten._flatten_tensor(dt)
            assert local is their_local
            assert local.requires_grad
            assert spec is not None
            assert spec is their_spec
            for stream in (None, torch.get_device_module(ctx.device).current_stream()):
                handle = torch.get_device_module(ctx.device)
                grads, results = [], []
                for unflatten in (flattening._unflatten_tensor, them.flatten._unflatten_tensor):
                    leaf = local.detach().clone().requires_grad_()
                    result = unflatten(leaf, spec, device_handle=handle, compute_stream=stream)
                    results.append(result)
                    squares = cast("DTensor", (result * result).sum())
                    torch.autograd.backward(squares.full_tensor())
                    grads.append(leaf.grad)
                assert grads[0] is not None
                assert torch.equal(grads[0], 2 * local)
                assert_same(*grads)
                assert_same(*results)
                assert_same(results[0].detach(), dt.detach())
            frozen = flattening._unflatten_tensor(local.detach(), spec)
            assert not frozen.requires_grad


def test_a_promised_gradient_is_waited_for(gangs: Gangs) -> None:
    gangs(4).run(check_promised_gradient)


def check_promised_gradient(ctx: RankContext) -> None:
    from torch.distributed._functional_collectives import (  # noqa: PLC0415 - private, of the oracle
        AsyncCollectiveTensor,
        all_reduce,
    )

    handle = torch.get_device_module(ctx.device)
    promise = all_reduce(torch.ones(4, device=ctx.device), "sum", ctx.mesh)
    assert isinstance(promise, AsyncCollectiveTensor)
    for stream in (None, handle.current_stream()):
        grad = flattening._waited_gradient(promise, handle, stream)
        assert not isinstance(grad, AsyncCollectiveTensor)
        assert torch.equal(grad, torch.full((4,), 4.0, device=ctx.device))


def test_a_spec_follows_its_tensor_to_another_device_as_in_the_reference(gangs: Gangs) -> None:
    gangs(4).run(check_rewrite)


def check_rewrite(ctx: RankContext) -> None:
    them = reference().tensor_parallel
    tensor = torch.ones(2)
    elsewhere = ChunkShardingSpec(0, [f"rank:{rank}/cuda:{rank}" for rank in range(4)])
    here = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)])
    for rank in range(4):
        ours = sharded_metadata._rewrite_spec_if_needed(elsewhere, tensor, rank)
        assert ours == them._rewrite_spec_if_needed(elsewhere, tensor, rank)
        assert isinstance(ours, ChunkShardingSpec)
        devices = [str(cast("RemoteDevice", each).device()) for each in ours.placements]
        assert devices == [("cpu" if r == rank else f"cuda:{r}") for r in range(4)]
        assert sharded_metadata._rewrite_spec_if_needed(here, tensor, rank) is here
    group = ctx.mesh.get_group()
    other = one_axis._create_chunk_sharded_tensor(numbered(ctx, 4, 2), ctx.rank, 4, 8, group)
    spec = other.sharding_spec()
    if not isinstance(spec, ChunkShardingSpec):
        assert sharded_metadata._rewrite_spec_if_needed(spec, tensor, ctx.rank) is spec


def test_refusals_are_of_the_references_types(gangs: Gangs) -> None:
    gangs(4).run(check_refusals)


def check_refusals(ctx: RankContext) -> None:
    them = reference()
    theirs_tp = them.tensor_parallel
    mesh = grid(ctx)
    plain = numbered(ctx, 4, 4)
    both = distribute_tensor(plain, mesh, [Shard(0), Shard(1)])
    group = mesh["tp"].get_group()
    calls: list[tuple[Callable[[], object], Callable[[], object], str]] = [
        (lambda: boxes._get_box(both), lambda: theirs_tp._get_box(both), "Only 1D"),
        (lambda: boxes._get_box_for(both, 1), lambda: theirs_tp._get_box_for(both, 1), "Only 1D"),
        (lambda: boxes._get_local_box(both), lambda: theirs_tp._get_local_box(both), "Only 1D"),
        (
            lambda: sharded_metadata._create_shard_md_from_dt(both, 0),
            lambda: theirs_tp._create_shard_md_from_dt(both, 0),
            "Only 1D",
        ),
        (
            lambda: sharded_metadata._create_sharded_tensor_md_from_dt(both, group),
            lambda: theirs_tp._create_sharded_tensor_md_from_dt(both, group),
            "Only 1D",
        ),
        (
            lambda: sharded_metadata._get_dt_pg(both),
            lambda: theirs_tp._get_dt_pg(both),
            "Only 1D DeviceMeshes currently handled",
        ),
        (
            lambda: two_axes._chunk_tensor(both, 0, 2, 8, group),
            lambda: theirs_tp._chunk_tensor(both, 0, 2, 8, group),
            "Only 1D",
        ),
        (
            lambda: two_axes._chunk_dtensor(plain, 0, None),
            lambda: theirs_tp._chunk_dtensor(plain, 0, None),
            "No parent device_mesh is found for FSDP device_mesh",
        ),
        (
            lambda: two_axes._chunk_dtensor(plain, 0, ctx.mesh),
            lambda: theirs_tp._chunk_dtensor(plain, 0, ctx.mesh),
            "Found parent device_mesh of ndim=1",
        ),
        (
            lambda: one_axis._all_gather_dtensor(both, ctx.mesh),
            lambda: them.shard._all_gather_dtensor(both, ctx.mesh),
            "should be a root mesh",
        ),
        (
            lambda: two_axes._all_gather_dtensor(both, ctx.mesh),
            lambda: theirs_tp._all_gather_dtensor(both, ctx.mesh),
            "should be a root mesh",
        ),
        (
            lambda: dispatch._ext_pre_load_state_dict_transform(plain),
            lambda: them.extensions._ext_pre_load_state_dict_transform(plain),
            "Expected ShardedTensor, got <class 'torch.Tensor'>",
        ),
    ]
    for ours, theirs, words in calls:
        mine = outcome(ours)
        assert_same(mine, outcome(theirs))
        assert issubclass(mine.kind, EngineError)
        assert words in mine.message
    with pytest.raises(EngineError, match="Expected ShardedTensor"):
        two_axes._pre_load_state_dict(plain)
    short = one_axis._create_chunk_sharded_tensor(plain[:1], ctx.rank, 4, 8, ctx.mesh.get_group())
    if ctx.rank:
        wrong = outcome(lambda: two_axes._chunk_tensor(short, 0, 2, 8, group))
        with outdated_words():
            assert_same(wrong, outcome(lambda: theirs_tp._chunk_tensor(short, 0, 2, 8, group)))
        assert issubclass(wrong.kind, EngineError)
