"""The two residents of `Collectives` pass one suite; order and counts are seen from outside."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp_core import TrainingState, observe
from fsdp_core.comm import (
    Axis,
    Collectives,
    GroupCollectives,
    LoopbackCollectives,
    Reduction,
    collectives,
    collectives_on,
    mesh_info_of,
)
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import BLOCKS, Decoder, Recompute, decoder
from tests.engine.sharded import backward_once, shard_decoder

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("on_stream", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_collectives_gather_rows_and_reduce_them(
    gangs: Gangs, world: int, *, on_stream: bool
) -> None:
    gangs(world).run(check_residents, on_stream)


def check_residents(ctx: RankContext, on_stream: bool) -> None:  # noqa: FBT001 - passed on
    chosen = collectives_on(mesh_info_of(ctx.mesh).shard)
    is_alone = ctx.world == 1 and not collectives.by_group_on_one_rank
    assert isinstance(chosen, LoopbackCollectives if is_alone else GroupCollectives)
    check_collectives(ctx, chosen, on_stream=on_stream)
    if ctx.world == 1:
        check_collectives(
            ctx, GroupCollectives("dp_shard", ctx.mesh.get_group(0)), on_stream=on_stream
        )


def check_collectives(ctx: RankContext, group: Collectives, *, on_stream: bool) -> None:
    assert (group.name, group.size, group.rank) == ("dp_shard", ctx.world, ctx.rank)
    buffer = group.gather_buffer(2 * ctx.world, torch.float32, ctx.device).fill_(-1.0)
    row = buffer.narrow(0, 2 * ctx.rank, 2)
    row.copy_(torch.tensor([ctx.rank, ctx.rank + 0.5]))
    wait(group.all_gather(buffer, row, on_stream=on_stream))
    assert buffer.tolist() == [half for rank in range(ctx.world) for half in (rank, rank + 0.5)]
    grads = group.reduce_buffer(2 * ctx.world, torch.float32, ctx.device)
    grads.copy_(torch.arange(2.0 * ctx.world) + ctx.rank)
    mean = group.reduce_buffer(2, torch.float32, ctx.device)
    reduction = Reduction.of(torch.float32, shards=ctx.world)
    wait(group.reduce_scatter(mean, grads, reduction.scatter_op, on_stream=on_stream))
    offset = (ctx.world - 1) / 2
    assert mean.tolist() == [2 * ctx.rank + offset, 2 * ctx.rank + 1 + offset]
    wait(group.all_reduce(mean, dist.ReduceOp.SUM, on_stream=on_stream))
    assert mean.tolist() == [
        sum(2 * rank + odd + offset for rank in range(ctx.world)) for odd in (0, 1)
    ]


def test_an_axis_that_the_mesh_lacks_is_one_rank() -> None:
    assert isinstance(collectives_on(Axis.alone("dp_replicate")), LoopbackCollectives)


def wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_reduction_divides_by_the_ranks(dtype: torch.dtype, ranks: int) -> None:
    mean = Reduction.of(dtype, shards=ranks)
    assert divided_by(mean, ranks, 1) == ranks
    assert mean.pre_divide >= 1
    assert mean.post_divide >= 1


@pytest.mark.parametrize("force_sum", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("factor", [None, 2.0, 3.0, 10.0])
@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (2, 1), (1, 2), (2, 4), (3, 5)])
def test_a_reduction_divides_by_what_it_is_told(
    shards: int, replicas: int, factor: float | None, dtype: torch.dtype, *, force_sum: bool
) -> None:
    reduction = Reduction.of(
        dtype, shards=shards, replicas=replicas, divide_factor=factor, force_sum=force_sum
    )
    expected = shards * replicas if factor is None else factor
    assert divided_by(reduction, shards, replicas) == expected
    if force_sum:
        assert {reduction.scatter_op, reduction.replica_op} == {dist.ReduceOp.SUM}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_backend_with_a_scaled_sum_divides_by_a_factor_itself(replicas: int) -> None:
    def reduction(dtype: torch.dtype, *, scales_sums: bool) -> Reduction:
        return Reduction.of(
            dtype, shards=4, replicas=replicas, divide_factor=3.0, scales_sums=scales_sums
        )

    by_backend = reduction(torch.bfloat16, scales_sums=True)
    assert by_backend.scatter_op == dist.ReduceOp.PREMUL_SUM
    assert by_backend.replica_op == dist.ReduceOp.SUM
    assert by_backend.pre_divide == by_backend.post_divide == 1
    # What is divided around the sum stays so, as in the reference.
    narrow = reduction(torch.float16, scales_sums=True)
    assert narrow == reduction(torch.float16, scales_sums=False)


def test_gloo_has_no_scaled_sum(cpu_gangs: Gangs) -> None:
    cpu_gangs(2).run(check_scaled_sum, scales=False)


@pytest.mark.gpu
def test_nccl_has_a_scaled_sum(gangs: Gangs) -> None:
    gangs(1).run(check_scaled_sum, scales=True)


def check_scaled_sum(_: RankContext, *, scales: bool) -> None:
    group = GroupCollectives("data", dist.group.WORLD or dist.new_group())
    assert group.scales_sums(torch.device("cuda")) == scales
    assert not group.scales_sums(torch.device("cpu"))


def divided_by(reduction: Reduction, shards: int, replicas: int) -> float:
    divided = reduction.pre_divide * reduction.post_divide
    divided *= shards if reduction.scatter_op == dist.ReduceOp.AVG else 1
    return divided * (replicas if reduction.replica_op == dist.ReduceOp.AVG else 1)


class Recorder:
    """Remembers what the engine told, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.issued: list[tuple[str, int]] = []
        self.completed: list[tuple[str, int]] = []

    def on_state(self, state: TrainingState, unit_index: int, unit_fqn: str) -> None:
        assert unit_fqn == ("" if unit_index == 0 else f"blocks.{unit_index - 1}")
        self.events.append(f"{state.name} {unit_index}")

    def on_issue(self, group: str, sequence: int) -> None:
        self.issued.append((group, sequence))
        self.events.append(f"issue {sequence}")

    def on_complete(self, group: str, sequence: int) -> None:
        self.completed.append((group, sequence))
        self.events.append(f"complete {sequence}")


# The second step of a root and three blocks; every gather but the first two of forward and
# the first of backward is under way while something computes, and so is every reduction.
SECOND_STEP = """
FORWARD 0, issue 12, complete 12, issue 13,
FORWARD 1, complete 13, issue 14, IDLE 1,
FORWARD 2, complete 14, issue 15, IDLE 2,
FORWARD 3, complete 15, IDLE 3,
IDLE 0,
PRE_BACKWARD 0, issue 16,
PRE_BACKWARD 3, complete 16, issue 17, POST_BACKWARD 3, issue 18,
PRE_BACKWARD 2, complete 17, issue 19, POST_BACKWARD 2, complete 18, issue 20,
PRE_BACKWARD 1, complete 19, POST_BACKWARD 1, complete 20, issue 21,
POST_BACKWARD 0, complete 21, issue 22, complete 22,
IDLE 0, IDLE 1, IDLE 2, IDLE 3
"""


@pytest.mark.parametrize("world", [1, 2])
def test_an_observer_sees_every_state_and_collective_in_order(gangs: Gangs, world: int) -> None:
    gangs(world).run(check_observed)


def check_observed(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    seen = Recorder()
    observe(model, seen)
    train_steps(ctx, model, 1)
    seen.events.clear()
    train_steps(ctx, model, 1)
    expected = SECOND_STEP.replace("\n", " ").strip().split(", ")
    if ctx.device.type != "cpu":
        # One has ended when the device says so, which the engine asks now and then.
        seen.events, expected = (
            [event for event in events if not event.startswith("complete")]
            for events in (seen.events, expected)
        )
    assert seen.events == expected
    # Per step a gather per unit in forward, one per block again in backward, a reduction each.
    count = 2 * ((BLOCKS + 1) + BLOCKS + (BLOCKS + 1))
    assert seen.issued == [("dp_shard", number) for number in range(1, count + 1)]
    if ctx.device.type != "cpu":
        torch.accelerator.synchronize()
        backward_once(ctx, model)  # what it starts has the engine ask the device
    assert sorted(seen.completed)[:count] == seen.issued[:count]


@pytest.mark.parametrize("recompute", ["block", "all"])
def test_recomputation_gathers_no_more_than_backward_alone(
    gangs: Gangs, recompute: Recompute
) -> None:
    gangs(2).run(check_recompute_count, recompute)


def check_recompute_count(ctx: RankContext, recompute: Recompute) -> None:
    model = shard_decoder(ctx, decoder(recompute=recompute).to(ctx.device))
    seen = Recorder()
    observe(model, seen)
    train_steps(ctx, model, 2)
    assert len(seen.issued) == 2 * ((BLOCKS + 1) + BLOCKS + (BLOCKS + 1))


def train_steps(ctx: RankContext, model: Decoder, steps: int) -> None:
    for step in range(steps):
        backward_once(ctx, model, step)


def test_users_can_wrap_the_collectives_of_torch_distributed(gangs: Gangs) -> None:
    gangs(2).run(check_wrapping)


def check_wrapping(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    calls: list[str] = []
    original = getattr(dist, name)

    def wrapped(*args: object, **kwargs: object) -> object:
        calls.append(name)
        return original(*args, **kwargs)

    setattr(dist, name, wrapped)
    try:
        backward_once(ctx, model)
    finally:
        setattr(dist, name, original)
    assert len(calls) == (BLOCKS + 1) + BLOCKS
