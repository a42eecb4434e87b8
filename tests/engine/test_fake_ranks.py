"""What one rank of a large world holds and sends; no numbers, for its collectives do nothing."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_core import fully_shard, torch_private
from fsdp_core.comm import DefaultReduceScatter
from fsdp_core.runtime import observe
from fsdp_core.states import TrainingState
from tests.engine.fake_rank import Call, FakeRank, calls
from tests.engine.gang import RankContext
from tests.engine.sharded import held_unsharded_bytes, local, unit
from tests.engine.versus import Engine, engines

pytestmark = pytest.mark.ranks

WIDTH, HIDDEN, BLOCKS = 24, 40, 3


@pytest.fixture(scope="module")
def rank(device: str) -> Iterator[FakeRank]:
    rank = FakeRank(device)
    yield rank
    rank.close()


def units_of(model: nn.Sequential) -> list[nn.Module]:
    return [*list(model)[:BLOCKS], model]


def mlp() -> nn.Sequential:
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(BLOCKS)
        ),
        nn.Linear(WIDTH, 5),
    )


def sharded(ctx: RankContext, **how: Any) -> nn.Sequential:  # noqa: ANN401 - passed on
    model = mlp().to(ctx.device)
    for block in units_of(model):
        fully_shard(block, **{"mesh": ctx.mesh, **how})
    return model


def step(ctx: RankContext, model: nn.Module) -> None:
    torch.autograd.backward(model(torch.randn(2, WIDTH, device=ctx.device)).square().mean())


def dtensor(tensor: torch.Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


def ceil(total: int, parts: int) -> int:
    return -(-total // parts)


@pytest.mark.parametrize("world", [8, 64, 1024])
def test_a_rank_holds_its_share_and_nothing_whole(rank: FakeRank, world: int) -> None:
    rank.run(world, check_memory)
    rank.run_last(world, check_memory)


def check_memory(ctx: RankContext) -> None:
    whole = {name: param.shape for name, param in mlp().named_parameters()}
    model = sharded(ctx)
    for _ in range(2):
        step(ctx, model)
        assert held_unsharded_bytes(model) == 0
    for name, param in model.named_parameters():
        rows, rest = whole[name][0], whole[name][1:].numel()
        share = ceil(rows, ctx.world)
        mine = max(0, min(share, rows - ctx.rank * share))
        assert local(param).untyped_storage().nbytes() == share * rest * param.itemsize
        assert param.grad is not None
        for tensor in (param, param.grad, model.state_dict()[name]):
            assert isinstance(tensor, DTensor)
            assert tensor.shape == whole[name]
            assert local(tensor).shape == (mine, *whole[name][1:])
        start = min(ctx.rank * share, rows)
        if mine:
            assert torch_private.local_box(dtensor(param))[0][0] == start


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_as_many_elements_travel_as_in_the_reference(
    rank: FakeRank, world: int, *, reshard: bool
) -> None:
    ours, theirs = rank.run(world, both_engines, reshard=reshard)
    gathers = (1 + reshard) * BLOCKS + 1  # the root stays whole unless told
    gathers += reshard
    assert Counter(call.kind for call in ours) == {
        "all-gather": gathers,
        "reduce-scatter": BLOCKS + 1,
    }
    assert {call.ranks for call in ours} == {world}
    assert ours == theirs


def both_engines(ctx: RankContext, *, reshard: bool) -> list[list[Call]]:
    return [calls_of_a_step(ctx, engine, reshard=reshard) for engine in engines()]


def calls_of_a_step(ctx: RankContext, engine: Engine, *, reshard: bool) -> list[Call]:
    model = mlp().to(ctx.device)
    for block in units_of(model):
        engine.shard(block, mesh=ctx.mesh, reshard_after_forward=reshard)
    step(ctx, model)
    with calls() as seen:
        step(ctx, model)
    # Prefetch may place them otherwise among each other.
    return sorted(seen, key=str)


def test_an_observer_sees_each_collective_start_and_end(rank: FakeRank) -> None:
    rank.run(64, check_observer)


class Counting:
    def __init__(self) -> None:
        self.issued: list[tuple[str, int]] = []
        self.completed: list[tuple[str, int]] = []

    def on_state(self, state: TrainingState, unit_index: int, unit_fqn: str) -> None:
        """Not counted."""

    def on_issue(self, group: str, sequence: int) -> None:
        self.issued.append((group, sequence))

    def on_complete(self, group: str, sequence: int) -> None:
        self.completed.append((group, sequence))


def check_observer(ctx: RankContext) -> None:
    model = sharded(ctx)
    observer = Counting()
    observe(model, observer)
    with calls() as seen:
        step(ctx, model)
    issued = list(observer.issued)
    assert [number for _, number in issued] == list(range(1, len(seen) + 1))
    if ctx.device.type != "cpu":
        torch.accelerator.synchronize()
        step(ctx, model)  # what it starts has the engine ask the device
    assert sorted(observer.completed)[: len(issued)] == issued


class Tracking(DefaultReduceScatter):
    """Counts the buffers of gradients that exist at once."""

    def __init__(self, contribution: int) -> None:
        self.most = 0
        self._contribution = contribution
        self._made: list[weakref.ref[torch.Tensor]] = []

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        made = super().allocate(size, dtype=dtype, device=device)
        if made.numel() >= self._contribution:
            self._made.append(weakref.ref(made))
            self.most = max(self.most, sum(ref() is not None for ref in self._made))
        return made


@pytest.mark.parametrize("window", [1, 2])
def test_no_more_gradients_wait_than_the_window_lets_in(rank: FakeRank, window: int) -> None:
    assert rank.run(64, most_buffers, window) == window


def most_buffers(ctx: RankContext, window: int) -> int:
    model = sharded(ctx)
    tracking = Tracking(WIDTH * 5)
    for block in units_of(model):
        unit(block).set_custom_reduce_scatter(tracking)
    unit(model).set_reduce_scatter_max_input_buffers(window)
    step(ctx, model)
    return tracking.most


def test_replicas_gather_within_their_row_and_average_across(rank: FakeRank) -> None:
    rank.run(8, check_replicas)


def check_replicas(ctx: RankContext) -> None:
    mesh = init_device_mesh(ctx.device.type, (2, 4), mesh_dim_names=("replicas", "shards"))
    model = sharded(ctx, mesh=mesh)
    with calls() as seen:
        step(ctx, model)
    ranks = {"all-gather": 4, "reduce-scatter": 4, "all-reduce": 2}
    assert {call.kind: call.ranks for call in seen} == ranks
    assert Counter(call.kind for call in seen)["all-reduce"] == BLOCKS + 1
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.placements == (Replicate(), Shard(0))
        assert local(param).size(0) == min(ceil(param.size(0), 4), param.size(0))


# The last axes are named apart: DTensor remembers groups by mesh, also those that are gone.
@pytest.mark.parametrize(
    "axes", [{"shards": 4, "tp": 2}, {"replicas": 2, "shards": 2, "split": 2}], ids=len
)
def test_tensor_parallel_parameters_are_cut_twice(rank: FakeRank, axes: dict[str, int]) -> None:
    rank.run(8, check_split, axes)


def check_split(ctx: RankContext, axes: dict[str, int]) -> None:
    names, shape = tuple(axes), tuple(axes.values())
    mesh = init_device_mesh(ctx.device.type, shape, mesh_dim_names=names)
    model = mlp().to(ctx.device)
    for block in list(model)[:BLOCKS]:
        parallelize_module(block, mesh[names[-1]], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh[names[:-1]])
    fully_shard(model, mesh=mesh[names[:-1]])
    with calls() as seen:
        step(ctx, model)
    shards = shape[-2]
    assert {call.ranks for call in seen if call.kind == "all-gather"} == {shards}
    up, down = model.get_parameter("0.0.weight"), model.get_parameter("0.2.weight")
    assert torch_private.local_box(dtensor(up)) == ((0, 0), (HIDDEN // 2 // shards, WIDTH))
    assert torch_private.local_box(dtensor(down)) == ((0, 0), (WIDTH // shards, HIDDEN // 2))
    for param in (up, down):
        assert dtensor(param).device_mesh.ndim == len(shape)
        assert param.grad is not None
        assert dtensor(param.grad).placements == dtensor(param).placements


def test_backward_gathers_from_the_smaller_mesh(rank: FakeRank) -> None:
    rank.run(8, check_smaller_mesh)


def check_smaller_mesh(ctx: RankContext) -> None:
    model = sharded(ctx, reshard_after_forward=4)
    with calls() as seen:
        step(ctx, model)
    gathers = Counter(call.ranks for call in seen if call.kind == "all-gather")
    assert gathers == {8: BLOCKS + 1, 4: BLOCKS + 1}
    assert held_unsharded_bytes(model) == 0


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, WIDTH, 8))
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up.to_local() if isinstance(self.up, DTensor) else self.up
        return torch.einsum("bw,ewh->bh", self.gate(x), up)


def test_experts_travel_on_their_own_axis(rank: FakeRank) -> None:
    rank.run(8, check_experts)


def check_experts(ctx: RankContext) -> None:
    mesh = init_device_mesh(ctx.device.type, (4, 2), mesh_dim_names=("shards", "experts"))
    model = Experts().to(ctx.device)
    model.up = nn.Parameter(distribute_tensor(model.up.detach(), mesh["experts"], [Shard(0)]))
    engine = engines()[0]
    own = engine.fsdp_mesh_info(mesh=mesh["shards"], shard_mesh_dim=0)
    rest = engine.fsdp_mesh_info(mesh=ctx.mesh, shard_mesh_dim=0)
    up = model.up

    def choose(param: nn.Parameter) -> object:
        mine = param is up
        return engine.placement_result(Shard(1 if mine else 0), own if mine else rest)

    engine.shard(model, mesh=ctx.mesh, shard_placement_fn=choose)
    with calls() as seen:
        step(ctx, model)
    reduced = {call.ranks: call.numels for call in seen if call.kind == "reduce-scatter"}
    whole_gate = WIDTH * WIDTH + WIDTH
    assert reduced == {4: (2 * WIDTH * 8 // 4, 2 * WIDTH * 8), 8: (whole_gate // 8, whole_gate)}
    assert torch_private.local_box(dtensor(model.up)) == ((0, 0, 0), (2, WIDTH // 4, 8))
    assert dist.get_world_size() == ctx.world
