"""What only a GPU can show: real streams, the caching allocator, page-locked memory, graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fsdp_core.comm import DefaultAllGather, DefaultReduceScatter, DeviceStreams, streams_for
from fsdp_core.comm.strategies import ReduceOp
from tests.engine.fake_rank import FakeRank
from tests.engine.gang import Gangs, RankContext
from tests.engine.sharded import local, unit

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

WIDTH, STEPS = 256, 6
DELAY = 20_000_000
"""Clock cycles of the GPU, about 10 ms: longer than all kernels of a step."""


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def shard(
    ctx: RankContext,
    *,
    reshard: bool | None = None,
    offload: OffloadPolicy | None = None,
) -> nn.Sequential:
    model = mlp() if offload else mlp().to(ctx.device)
    for layer in (*list(model), model):
        fully_shard(
            layer,
            mesh=ctx.mesh,
            reshard_after_forward=reshard,
            offload_policy=offload or OffloadPolicy(),
        )
    return model


def train(ctx: RankContext, model: nn.Module) -> list[torch.Tensor]:
    """The losses, and at the end the parameters' slices."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = []
    for step in range(STEPS):
        loss = model(ctx.batch(step, 32, WIDTH)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        trace.append(loss.detach())
    return [tensor.cpu() for tensor in (*trace, *map(local, model.parameters()))]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.isfinite().all()


# -- Slow collectives


@pytest.fixture(scope="module")
def rank(device: str) -> Iterator[FakeRank]:
    rank = FakeRank(device)
    yield rank
    rank.close()


class Arrival:
    """The end of a collective on a stream of its own."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._end = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._end)


class Wire:
    """Does work late, or at once with the whole device waiting for it."""

    def __init__(self, *, is_slow: bool) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # PyTorch's
        self._is_slow = is_slow

    def carry(self, work: Callable[[], object]) -> Arrival:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._is_slow:
                torch.cuda._sleep(DELAY)  # type: ignore[no-untyped-call]  # PyTorch's
            work()
        if not self._is_slow:
            torch.cuda.synchronize()
        return Arrival(self._stream)


class WiredAllGather(DefaultAllGather):
    """As if all ranks had sent what this one sends."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __call__(  # type: ignore[override]  # an arrival is all the engine asks of a work object
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
    ) -> Arrival:
        del async_op
        rows = output_tensor.view(group.size(), -1)
        return self._wire.carry(lambda: rows.copy_(input_tensor.clone()))


class WiredReduceScatter(DefaultReduceScatter):
    """As if all ranks had sent what this one sends: their mean."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __call__(  # type: ignore[override]  # as above
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
    ) -> Arrival:
        del op, async_op
        own = input_tensor.view(group.size(), -1)[group.rank()]
        return self._wire.carry(lambda: output_tensor.copy_(own))


Case = Literal["sharded", "replicated", "hook"]


@pytest.mark.parametrize("case", ["sharded", "replicated", "hook"])
def test_slow_collectives_change_no_bit(rank: FakeRank, case: Case) -> None:
    rank.run(4, check_slow, case)


def check_slow(ctx: RankContext, case: Case) -> None:
    assert_same(train_wired(ctx, case, is_slow=True), train_wired(ctx, case, is_slow=False))


def train_wired(ctx: RankContext, case: Case, *, is_slow: bool) -> list[torch.Tensor]:
    mesh = ctx.mesh
    if case == "replicated":
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicas", "shards"))
    # A dtype of its own, so that what was reduced is freed while later streams may still read it.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = mlp().to(ctx.device)
    for layer in (*list(model), model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    wire, after = Wire(is_slow=is_slow), Wire(is_slow=is_slow)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # PyTorch's

    def hook(grads: torch.Tensor) -> None:
        after.carry(lambda: grads.mul_(0.5)).wait()

    for layer in list(model):
        unit(layer).set_custom_all_gather(WiredAllGather(wire))
        unit(layer).set_custom_reduce_scatter(WiredReduceScatter(wire))
        if case == "replicated":
            unit(layer).set_all_reduce_hook(hook)
        elif case == "hook":
            unit(layer).set_all_reduce_hook(hook, stream=stream)
    return train(ctx, model)


# -- One rank with NCCL


def test_an_accelerator_has_streams(gangs: Gangs) -> None:
    gangs(1).run(check_streams)


def check_streams(ctx: RankContext) -> None:
    assert isinstance(streams_for(ctx.device), DeviceStreams)


def test_a_divide_factor_of_ones_own_goes_with_the_reduction(gangs: Gangs) -> None:
    gangs(1).run(check_divide_factor)


def check_divide_factor(ctx: RankContext) -> None:
    grads = []
    for factor in (None, 4.0):
        model = shard(ctx)
        for layer in (*model, model):
            if factor is not None:
                unit(layer).set_gradient_divide_factor(factor)
        torch.autograd.backward(model(ctx.batch(0, 32, WIDTH)).square().mean())
        grads.append([local(param.grad) for param in model.parameters() if param.grad is not None])
    for plain, divided in zip(*grads, strict=True):
        assert torch.equal(plain, 4 * divided)


def test_training_equals_that_of_one_process(gangs: Gangs) -> None:
    gangs(1).run(check_plain)


def check_plain(ctx: RankContext) -> None:
    plain = mlp().to(ctx.device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = plain(ctx.batch(step, 32, WIDTH)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    expected = [tensor.cpu() for tensor in (*losses, *(p.detach() for p in plain.parameters()))]
    assert_same(train(ctx, shard(ctx)), expected)


def test_the_users_own_event_orders_the_gathers(gangs: Gangs) -> None:
    gangs(1).run(check_event)


def check_event(ctx: RankContext) -> None:
    model = shard(ctx)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # PyTorch's
    batch = ctx.batch(0, 32, WIDTH)
    with torch.no_grad():
        model(batch)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(DELAY)  # type: ignore[no-untyped-call]  # PyTorch's
            for param in model.parameters():
                local(param).zero_()
            unit(model).set_post_optim_event(side.record_event())
        assert not model(batch).any()


def test_a_step_never_makes_the_host_wait(gangs: Gangs) -> None:
    gangs(1).run(check_no_wait)


def check_no_wait(ctx: RankContext) -> None:
    model, batch = shard(ctx), ctx.batch(0, 32, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        # The first step makes what later ones use again.
        set_sync_debug_mode("error" if step else "default")
        try:
            torch.autograd.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        finally:
            set_sync_debug_mode("default")


def set_sync_debug_mode(mode: Literal["default", "error"]) -> None:
    with warnings.catch_warnings():
        # PyTorch's own, at each call.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


def test_offloaded_gradients_have_arrived_when_backward_returns(gangs: Gangs) -> None:
    gangs(1).run(check_offload)


def check_offload(ctx: RankContext) -> None:
    model = shard(ctx, offload=CPUOffloadPolicy())
    torch.autograd.backward(model(ctx.batch(0, 32, WIDTH)).square().mean())
    for param in model.parameters():
        assert local(param).is_pinned()
        assert param.grad is not None
        assert param.grad.device.type == "cpu"
    # What the host reads at once is what arrives in the end.
    early = [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
    torch.cuda.synchronize()
    late = [local(p.grad) for p in model.parameters() if p.grad is not None]
    assert_same(early, late)


def test_a_step_can_be_captured_in_a_graph(gangs: Gangs) -> None:
    gangs(1).run(check_graph)


def check_graph(ctx: RankContext) -> None:
    model, batch = shard(ctx, reshard=False), ctx.batch(0, 32, WIDTH)

    def step() -> None:
        model.zero_grad()
        torch.autograd.backward(model(batch).square().mean())

    def grads() -> list[torch.Tensor]:
        return [local(p.grad).cpu() for p in model.parameters() if p.grad is not None]

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # PyTorch's
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    batch.copy_(ctx.batch(1, 32, WIDTH))
    graph.replay()
    replayed = grads()
    assert len(replayed) == 2 * len(model)
    step()
    assert_same(replayed, grads())
