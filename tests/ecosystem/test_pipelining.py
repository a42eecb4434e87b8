"""Pipelines of our stages train as pipelines of the reference's stages, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_core import FSDPModule, fully_shard
from fsdp_core.errors import UnsupportedError
from tests.engine.gang import Gangs, RankContext
from tests.engine.sharded import local

pytestmark = pytest.mark.ranks

Schedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"]
Place = Literal["held", "held at first", "before", "around an evaluation"]
WIDTH, MICROBATCHES = 6, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Part(nn.Module):
    """Two layers, and a parameter of the part's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.norm(x)
        return y


@dataclass(frozen=True)
class Engine:
    """What a script takes from one engine or the other."""

    shard: Callable[..., object]
    make_stage: Callable[..., Any]
    prepare: Callable[[object], None]


@dataclass
class Trace:
    losses: list[float] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    unsharded_after: list[bool] = field(default_factory=list)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_two_stages_on_two_ranks_equal_the_reference(gangs: Gangs, schedule: Schedule) -> None:
    losses = gangs(2).run(compare, schedule, reshard=False)
    assert losses[1][0] > losses[1][-1] > 0


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_two_stages_times_two_shards_equal_the_reference(gangs: Gangs, schedule: Schedule) -> None:
    gangs(4).run(compare, schedule, reshard=True)


def test_split_backwards_equal_the_reference(gangs: Gangs) -> None:
    gangs(2).run(compare, "InterleavedZeroBubble", reshard=False)


@pytest.mark.parametrize("bridged", [False, True])
def test_split_backwards_of_stages_that_reshard_lose_no_gradient(
    gangs: Gangs, *, bridged: bool
) -> None:
    gangs(4).run(check_split_backwards, bridged=bridged)


def check_split_backwards(ctx: RankContext, *, bridged: bool) -> None:
    """In the reference the last stage has none, so that of stages that do not reshard is compared."""
    from torch.distributed.fsdp import fully_shard as theirs  # noqa: PLC0415 - only the oracle may load it
    from torch.distributed.pipelining import PipelineStage as TheirStage  # noqa: PLC0415 - it loads the oracle

    from fsdp_core.interop.pipelining import PipelineStage, bridge_schedule  # noqa: PLC0415 - it loads the oracle

    mesh = init_device_mesh(ctx.device.type, (2, ctx.world // 2), mesh_dim_names=("pp", "dp_shard"))
    ours = Engine(fully_shard, PipelineStage, bridge_schedule if bridged else lambda _: None)
    oracle = Engine(theirs, TheirStage, lambda _: None)
    mine = train(ctx, mesh, "InterleavedZeroBubble", ours, reshard=True)
    reference = train(ctx, mesh, "InterleavedZeroBubble", oracle, reshard=False)
    assert mine.losses == reference.losses
    assert len(mine.grads) == len(reference.grads) > 0
    assert all(torch.equal(a, b) for a, b in zip(mine.grads, reference.grads, strict=True))


def test_split_backwards_of_a_stage_of_which_parts_alone_are_sharded_are_refused(
    gangs: Gangs,
) -> None:
    gangs(2).run(check_parts_alone)


def check_parts_alone(ctx: RankContext) -> None:
    from fsdp_core.interop.pipelining import PipelineStage  # noqa: PLC0415 - it loads the oracle

    part = Part().to(ctx.device)
    for layer in part.layers:
        fully_shard(layer, mesh=ctx.mesh)
    mesh = init_device_mesh(ctx.device.type, (1, ctx.world), mesh_dim_names=("pp", "dp_shard"))
    stage = PipelineStage(part, 0, 1, ctx.device, group=mesh["pp"].get_group())
    for kind in ("input", "weight"):
        with pytest.raises(UnsupportedError, match="Call fully_shard on the module"):
            stage.backward_maybe_with_nosync(kind, {})


def test_a_bridged_schedule_gathers_when_it_planned_to(gangs: Gangs) -> None:
    gangs(2).run(watch_the_plan)


def test_a_step_whose_reduction_raised_leaves_nothing_to_the_next(gangs: Gangs) -> None:
    gangs(2).run(check_failed_reduction)


def check_failed_reduction(ctx: RankContext) -> None:
    expected, found = (grads_of_last_step(ctx, fails=fails) for fails in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def grads_of_last_step(ctx: RankContext, *, fails: bool) -> list[torch.Tensor]:
    """Of a stage's second step, if a hook of a parameter raised in the first, or of its only one."""
    from torch.distributed.pipelining import ScheduleGPipe  # noqa: PLC0415 - it loads the oracle

    from fsdp_core.interop.pipelining import PipelineStage  # noqa: PLC0415 - it loads the oracle

    mesh = init_device_mesh(ctx.device.type, (1, ctx.world), mesh_dim_names=("pp", "dp_shard"))
    torch.manual_seed(0)
    part = Part().to(ctx.device)
    for layer in part.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(part, mesh=mesh["dp_shard"])
    stage = PipelineStage(part, 0, 1, ctx.device, group=mesh["pp"].get_group())
    runner = ScheduleGPipe(stage, MICROBATCHES, loss_fn=mean_square)
    params = list(part.parameters())

    def go(step: int) -> None:
        x = ctx.batch(step, 2 * MICROBATCHES, WIDTH)
        runner.step(x, target=x.flip(-1))

    def once(_: torch.Tensor) -> None:
        hook.remove()
        raise ZeroDivisionError

    if fails:
        hook = params[-1].register_post_accumulate_grad_hook(once)  # type: ignore[no-untyped-call]  # PyTorch's
        with pytest.raises(ZeroDivisionError):
            go(0)
        # As an optimizer does, which holds the slices.
        for param in params:
            param.grad = None
    go(1)
    return [local(param.grad).clone() for param in params if param.grad is not None]


@pytest.mark.parametrize("place", ["held", "held at first", "before", "around an evaluation"])
def test_what_was_accumulated_before_a_step_stays(gangs: Gangs, place: Place) -> None:
    gangs(2).run(check_accumulation, place)


def check_accumulation(ctx: RankContext, place: Place) -> None:
    # PyTorch's schedules evaluate no two stages of one rank.
    count = 1 if place == "around an evaluation" else 2
    alone = [grads_of(ctx, [step], count) for step in (1, 2)]
    expected = [sum(pair) for pair in zip(*alone, strict=True)]
    found = grads_of(ctx, [1, 2], count, place)
    assert len(expected) == len(found) > 0
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)


def grads_of(
    ctx: RankContext, steps: list[int], count: int, place: Place | None = None
) -> list[torch.Tensor]:
    """What the steps of some stages accumulate, all but the last of which may run without the schedule."""
    from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B  # noqa: PLC0415 - it loads the oracle

    parts, stages = sharded_stages(ctx, count)
    # PyTorch scales all that a parameter has by then.
    runner = (
        ScheduleGPipe(stages[0], MICROBATCHES, loss_fn=mean_square, scale_grads=False)
        if count == 1
        else ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=mean_square, scale_grads=False)
    )
    params = [param for part in parts for param in part.parameters()]
    if place in {"held", "around an evaluation"}:
        runner.step(ctx.batch(0, 2 * MICROBATCHES, WIDTH), target=ctx.batch(0, 8, WIDTH))
        for param in params:
            param.grad = None
    *earlier, last = ((x := ctx.batch(step, 2 * MICROBATCHES, WIDTH), x.flip(-1)) for step in steps)
    for inputs, target in earlier:
        if place == "around an evaluation":
            runner.step(inputs, target=target)
            runner.eval(inputs, target=target)
            continue
        for part in parts if place == "held" else ():
            part.set_requires_gradient_sync(False)
            part.set_is_last_backward(False)
        with ExitStack() as stack:
            for part in parts if place == "held at first" else ():
                stack.enter_context(part.no_sync())
            loss = MICROBATCHES * mean_square(parts[1](parts[0](inputs)), target)
            loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's
    inputs, target = last
    runner.step(inputs, target=target)
    return [local(param.grad).clone() for param in params if param.grad is not None]


def test_an_evaluation_scales_no_gradient(gangs: Gangs) -> None:
    gangs(2).run(check_evaluation)


def check_evaluation(ctx: RankContext) -> None:
    from torch.distributed.pipelining import ScheduleGPipe  # noqa: PLC0415 - it loads the oracle

    (part,), (stage,) = sharded_stages(ctx, 1)
    runner = ScheduleGPipe(stage, MICROBATCHES, loss_fn=mean_square)
    x = ctx.batch(0, 2 * MICROBATCHES, WIDTH)
    runner.step(x, target=x.flip(-1))
    params = [param for param in part.parameters() if param.grad is not None]
    before = [local(param.grad).clone() for param in params]
    runner.eval(x, target=x.flip(-1))
    assert len(params) > 0
    assert all(torch.equal(a, local(param.grad)) for a, param in zip(before, params, strict=True))


def sharded_stages(ctx: RankContext, count: int) -> tuple[list[Any], list[Any]]:
    """So many modules that every rank has all of, and a stage of each."""
    from fsdp_core.interop.pipelining import PipelineStage  # noqa: PLC0415 - it loads the oracle

    mesh = init_device_mesh(ctx.device.type, (1, ctx.world), mesh_dim_names=("pp", "dp_shard"))
    group = mesh["pp"].get_group()
    parts: list[Any] = []
    for seed in range(count):
        torch.manual_seed(seed)
        part = Part().to(ctx.device)
        for layer in part.layers:
            fully_shard(layer, mesh=mesh["dp_shard"])
        parts.append(fully_shard(part, mesh=mesh["dp_shard"]))
    return parts, [
        PipelineStage(part, index, count, ctx.device, group=group)
        for index, part in enumerate(parts)
    ]


@pytest.mark.parametrize("place", ["loss", "reduction"])
def test_a_step_that_raised_before_a_stage_reduced_leaves_nothing_to_the_next(
    gangs: Gangs, place: Literal["loss", "reduction"]
) -> None:
    gangs(2).run(check_step_without_reduction, place)


def check_step_without_reduction(ctx: RankContext, place: Literal["loss", "reduction"]) -> None:
    expected, found = (grads_of_two_stages(ctx, place=each) for each in (None, place))
    assert len(expected) == len(found) > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def grads_of_two_stages(
    ctx: RankContext, *, place: Literal["loss", "reduction"] | None
) -> list[torch.Tensor]:
    """Of a rank's two stages in a step, after one that raised in the third loss or in a reduction, if any."""
    from torch.distributed.pipelining import ScheduleInterleaved1F1B  # noqa: PLC0415 - it loads the oracle

    parts, stages = sharded_stages(ctx, 2)

    def go(step: int, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        # PyTorch's schedule keeps losses of a step that raised: each step has a new one.
        runner = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss)
        x = ctx.batch(step, 2 * MICROBATCHES, WIDTH)
        runner.step(x, target=x.flip(-1))

    def third_raises(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError
        return mean_square(output, target)

    def once(_: torch.Tensor) -> None:
        hook.remove()
        raise ZeroDivisionError

    calls: list[int] = []
    params = [param for part in parts for param in part.parameters()]
    if place is not None:
        if place == "reduction":
            # Of the stage that reduces first.
            hook = params[-1].register_post_accumulate_grad_hook(once)
        with pytest.raises(ZeroDivisionError):
            go(0, third_raises if place == "loss" else mean_square)
        for param in params:
            param.grad = None
    go(1, mean_square)
    return [local(param.grad).clone() for param in params if param.grad is not None]


def compare(ctx: RankContext, schedule: Schedule, *, reshard: bool) -> list[float]:
    from torch.distributed.fsdp import fully_shard as theirs  # noqa: PLC0415 - only the oracle may load it
    from torch.distributed.pipelining import PipelineStage as TheirStage  # noqa: PLC0415 - it loads the oracle

    from fsdp_core.interop.pipelining import PipelineStage, bridge_schedule  # noqa: PLC0415 - it loads the oracle

    mesh = init_device_mesh(ctx.device.type, (2, ctx.world // 2), mesh_dim_names=("pp", "dp_shard"))
    ours = Engine(fully_shard, PipelineStage, bridge_schedule)
    oracle = Engine(theirs, TheirStage, lambda _: None)
    mine = train(ctx, mesh, schedule, ours, reshard=reshard)
    reference = train(ctx, mesh, schedule, oracle, reshard=reshard)
    assert mine.losses == reference.losses
    assert len(mine.grads) == len(reference.grads) > 0
    assert all(torch.equal(a, b) for a, b in zip(mine.grads, reference.grads, strict=True))
    assert mine.unsharded_after == reference.unsharded_after
    return mine.losses


def train(
    ctx: RankContext, mesh: DeviceMesh, schedule: Schedule, engine: Engine, *, reshard: bool
) -> Trace:
    from torch.distributed.pipelining import schedules  # noqa: PLC0415 - it loads the oracle

    per_rank = 2 if schedule.startswith("Interleaved") else 1
    pipe = mesh["pp"]
    stages = []
    for index in range(pipe.get_local_rank(), 2 * per_rank, 2):
        torch.manual_seed(index)
        part = Part().to(ctx.device)
        for layer in part.layers:
            engine.shard(layer, mesh=mesh["dp_shard"], reshard_after_forward=reshard)
        engine.shard(part, mesh=mesh["dp_shard"], reshard_after_forward=reshard)
        stages.append(
            engine.make_stage(part, index, 2 * per_rank, ctx.device, group=pipe.get_group())
        )
    kind = getattr(schedules, f"Schedule{schedule}")
    runner = kind(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=mean_square)
    engine.prepare(runner)
    params = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    trace = Trace()
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + mesh["dp_shard"].get_local_rank())
        x = torch.randn(2 * MICROBATCHES, WIDTH, generator=generator).to(ctx.device)
        losses: list[torch.Tensor] = []
        inputs = (x,) if pipe.get_local_rank() == 0 else ()
        # In each of these schedules the last stage is on the last rank.
        is_last = pipe.get_local_rank() == 1
        runner.step(
            *inputs, target=x.flip(-1) if is_last else None, losses=losses if is_last else None
        )
        trace.losses += [loss.item() for loss in losses]
        for stage in stages:
            trace.unsharded_after += [not isinstance(p, DTensor) for p in stage.submod.parameters()]
        for param in params:
            assert isinstance(param.grad, DTensor)
            trace.grads.append(param.grad.to_local().clone())
        optimizer.step()
        optimizer.zero_grad()
    return trace


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def watch_the_plan(ctx: RankContext) -> None:
    from fsdp_core.interop.pipelining import PipelineStage, bridge_schedule  # noqa: PLC0415 - it loads the oracle

    calls: list[str] = []

    def spy(runner: object) -> None:
        bridge_schedule(runner)
        for stage in runner._stages:  # type: ignore[attr-defined]  # a schedule's
            part = stage.submod
            assert isinstance(part, FSDPModule)
            note(calls, part, stage.stage_index)

    mesh = init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("pp", "dp_shard"))
    train(ctx, mesh, "Interleaved1F1B", Engine(fully_shard, PipelineStage, spy), reshard=False)
    mine = [ctx.rank, ctx.rank + 2]
    assert {f"unshard {index}" for index in mine} <= set(calls)
    for index in mine:
        assert calls.count(f"unshard {index}") >= 3  # at least once a step


def note(calls: list[str], part: Any, index: int) -> None:  # noqa: ANN401 - a class made at run time
    original = part.unshard

    def unshard(*, async_op: bool) -> object:
        calls.append(f"unshard {index}")
        return original(async_op=async_op)

    part.unshard = unshard
