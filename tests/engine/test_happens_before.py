"""Memory that changes hands between streams is ordered, checked without a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core import MixedPrecisionPolicy, fully_shard, observe
from fsdp_core.comm import QuantizedReduceScatter
from fsdp_core.low_precision import Int8Weight
from fsdp_core.runtime import NullObserver
from tests.engine.gang import Gangs, RankContext
from tests.engine.happens_before import Simulation, simulated
from tests.engine.sharded import unit

pytestmark = pytest.mark.ranks

WIDTH, STEPS = 6, 2
NAME = attrgetter("__name__")
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
HALF_REDUCE = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


@cache
def two_axes(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def shard(model: nn.Sequential, **how: Any) -> nn.Sequential:  # noqa: ANN401 - passed on
    for layer in (*model, model):
        fully_shard(layer, **how)
    return model


def train(
    ctx: RankContext, simulation: Simulation, model: nn.Sequential, *, micro: int = 1
) -> None:
    simulation.takes(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for step in range(STEPS):
        for each in range(micro):
            unit(model).set_requires_all_reduce(each == micro - 1)
            torch.autograd.backward(model(ctx.batch(step, 2, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def sharded(ctx: RankContext, simulation: Simulation) -> None:
    train(ctx, simulation, shard(mlp(), mesh=ctx.mesh))


def mixed_precision(ctx: RankContext, simulation: Simulation) -> None:
    train(ctx, simulation, shard(mlp(), mesh=ctx.mesh, mp_policy=HALF))


def replicated(ctx: RankContext, simulation: Simulation) -> None:
    train(ctx, simulation, shard(mlp(), mesh=two_axes(ctx.world), mp_policy=HALF_REDUCE))


def replicas_average_late(ctx: RankContext, simulation: Simulation) -> None:
    train(ctx, simulation, shard(mlp(), mesh=two_axes(ctx.world), mp_policy=HALF_REDUCE), micro=2)


def smaller_mesh(ctx: RankContext, simulation: Simulation) -> None:
    train(ctx, simulation, shard(mlp(), mesh=ctx.mesh, reshard_after_forward=2))


def hook_on_a_stream_of_its_own(ctx: RankContext, simulation: Simulation) -> None:
    model = shard(mlp(), mesh=ctx.mesh, mp_policy=HALF_REDUCE)
    stream = simulation.own_stream("USER")
    for layer in (*model, model):
        if list(layer.parameters(recurse=layer is not model)):
            unit(layer).set_all_reduce_hook(halve, stream=stream)
    train(ctx, simulation, model)


def halve(grads: torch.Tensor) -> None:
    grads.mul_(0.5)


def two_reductions_in_flight(ctx: RankContext, simulation: Simulation) -> None:
    model = shard(mlp(), mesh=ctx.mesh)
    unit(model).set_reduce_scatter_max_input_buffers(2)
    train(ctx, simulation, model)


def quantized_gradients(ctx: RankContext, simulation: Simulation) -> None:
    model = shard(mlp(), mesh=ctx.mesh)
    for layer in model:
        unit(layer).set_custom_reduce_scatter(QuantizedReduceScatter(4))
    train(ctx, simulation, model)


def gathers_on_the_current_stream(ctx: RankContext, simulation: Simulation) -> None:
    model = shard(mlp(), mesh=ctx.mesh)
    unit(model)._set_unshard_async_op(True)  # noqa: FBT003 - the reference's signature
    train(ctx, simulation, model)


class HalfUsed(nn.Sequential):
    """All but the first layer run on every rank; that one where rank and step are odd or even together."""

    def __init__(self, rank: int) -> None:
        super().__init__(*mlp())
        self._rank, self._step = rank, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self
        x = first(x) if self._step % 2 == self._rank % 2 else torch.tanh(x)
        self._step += 1
        for layer in others:
            x = layer(x)
        return x


def unused_on_some_ranks(ctx: RankContext, simulation: Simulation) -> None:
    model = HalfUsed(ctx.rank)
    fully_shard(model, mesh=ctx.mesh)
    train(ctx, simulation, model)


def unused_where_replicas_average(ctx: RankContext, simulation: Simulation) -> None:
    model = HalfUsed(ctx.rank)
    fully_shard(model, mesh=two_axes(ctx.world), mp_policy=HALF_REDUCE)
    train(ctx, simulation, model)


class FaultError(Exception):
    """What the user's code raises."""


def backward_that_fails(ctx: RankContext, simulation: Simulation, at: int) -> None:
    """Backward ends before layer `at`; what other layers have in flight is dropped."""
    # Without gathers in backward: waiting for one would order everything before it as well.
    model = shard(mlp(), mesh=ctx.mesh, mp_policy=HALF, reshard_after_forward=False)
    simulation.takes(model)

    def fail(_: torch.Tensor) -> None:
        raise FaultError

    def fail_in_backward(_: nn.Module, __: object, output: torch.Tensor) -> None:
        output.register_hook(fail)  # type: ignore[no-untyped-call]  # PyTorch's

    handle = model[at].register_forward_hook(fail_in_backward)
    loss = model(ctx.batch(0, 2, WIDTH)).square().mean()
    with pytest.raises(FaultError):
        torch.autograd.backward(loss)
    handle.remove()
    unit(model).reset_iter_state()
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()
    train(ctx, simulation, model)


def fault_after_gradients_arrived(ctx: RankContext, simulation: Simulation) -> None:
    backward_that_fails(ctx, simulation, 0)


def fault_before_any_gradient_arrived(ctx: RankContext, simulation: Simulation) -> None:
    backward_that_fails(ctx, simulation, 1)


class Scaled(Int8Weight):
    """Passes a tensor on to itself, beside what travels."""

    def fsdp_pre_all_gather(self, *place: Any) -> Any:  # noqa: ANN401 - passed on
        inputs, sent = super().fsdp_pre_all_gather(*place)
        return inputs, (sent, torch.ones(8))

    # The protocol counts parameters.
    fsdp_pre_all_gather.__signature__ = signature(Int8Weight.fsdp_pre_all_gather)  # type: ignore[attr-defined]  # of a function

    def fsdp_post_all_gather(  # type: ignore[override]  # it gets more metadata
        self,
        outputs: tuple[torch.Tensor, torch.Tensor],
        metadata: tuple[Any, torch.Tensor],
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> object:
        sent, factor = metadata
        made = super().fsdp_post_all_gather(outputs, sent, dtype, out=out)
        whole = out if made is None else made[0]
        assert whole is not None
        whole.mul_(factor[0])
        return made


def low_precision_weights(ctx: RankContext, simulation: Simulation) -> None:
    model = mlp()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Scaled(module.weight.detach()))
    train(ctx, simulation, shard(model, mesh=ctx.mesh))


Scenario = Callable[[RankContext, Simulation], None]

# The orderings, by the function that asks for each, and a scenario that goes wrong without it.
NEEDED: dict[str, tuple[Scenario, int]] = {
    "RootContext._follow_optimizer: PACK after COMPUTE": (sharded, 4),
    "PendingGather.issue: GATHER after PACK": (sharded, 4),
    # Where no work object stands for the collective.
    "PendingGather._arrive: COMPUTE after GATHER": (sharded, 1),
    "CommContext.let_go_gathered: PACK after COMPUTE": (low_precision_weights, 4),
    "FSDPParamGroup.issue_unshard: PACK after COMPUTE": (smaller_mesh, 4),
    "PendingReduce.issue: REDUCE after COMPUTE": (sharded, 4),
    "PendingReduce.land: COMPUTE after REDUCE": (sharded, 4),
    "PendingReduce.drop: COMPUTE after REDUCE": (fault_before_any_gradient_arrived, 4),
    "PendingReduce._finish: ALL_REDUCE after REDUCE": (replicated, 4),
    "PendingReduce.give: ALL_REDUCE after REDUCE": (hook_on_a_stream_of_its_own, 4),
    "PendingReduce._run_hook: USER after ALL_REDUCE": (hook_on_a_stream_of_its_own, 4),
    "PendingReduce._run_hook: ALL_REDUCE after USER": (hook_on_a_stream_of_its_own, 4),
    "CommContext._let_go: REDUCE after ALL_REDUCE": (replicated, 4),
    "CommContext.end_backward: COMPUTE after REDUCE": (mixed_precision, 4),
    "CommContext.end_backward: COMPUTE after ALL_REDUCE": (replicated, 4),
}
# GATHER follows PACK before each gather, and makes no memory of its own. They are for a custom
# all-gather that does.
SPARE = {
    "RootContext._follow_optimizer: GATHER after COMPUTE",
    "CommContext.let_go_gathered: GATHER after COMPUTE",
}


def run(ctx: RankContext, scenario: Scenario, deaf_to: str | None = None) -> Simulation:
    with simulated(deaf_to) as simulation:
        scenario(ctx, simulation)
    return simulation


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("scenario", [sharded, mixed_precision, low_precision_weights], ids=NAME)
def test_every_use_of_memory_is_ordered(cpu_gangs: Gangs, scenario: Scenario, world: int) -> None:
    cpu_gangs(world).run(check_order, scenario)


@pytest.mark.parametrize(
    "scenario",
    [
        replicated,
        replicas_average_late,
        smaller_mesh,
        hook_on_a_stream_of_its_own,
        two_reductions_in_flight,
        quantized_gradients,
        gathers_on_the_current_stream,
        fault_after_gradients_arrived,
        fault_before_any_gradient_arrived,
    ],
    ids=NAME,
)
def test_every_use_of_memory_is_ordered_on_four_ranks(cpu_gangs: Gangs, scenario: Scenario) -> None:
    cpu_gangs(4).run(check_order, scenario)


def check_order(ctx: RankContext, scenario: Scenario) -> None:
    simulation = run(ctx, scenario)
    assert not simulation.races, simulation.races
    assert simulation.watch.host_reads == []
    assert simulation.edges <= {*NEEDED, *SPARE}


@pytest.mark.parametrize(
    "scenario", [unused_on_some_ranks, unused_where_replicas_average], ids=NAME
)
def test_the_host_waits_for_flags_of_unused_parameters_only_where_backward_ends(
    cpu_gangs: Gangs, scenario: Scenario
) -> None:
    cpu_gangs(4).run(check_waits, scenario)


def check_waits(ctx: RankContext, scenario: Scenario) -> None:
    simulation = run(ctx, scenario)
    assert not simulation.races, simulation.races
    # Each rank leaves the first layer out in one of the two steps.
    assert simulation.device.host_waits == ["CommContext.decide"]
    assert set(simulation.watch.host_reads) <= {"PendingReduce._with_grad"}
    assert simulation.edges <= {*NEEDED, *SPARE}


class Board(NullObserver):
    def __init__(self) -> None:
        self.issued: list[tuple[str, int]] = []
        self.completed: list[tuple[str, int]] = []

    def on_issue(self, group: str, sequence: int) -> None:
        self.issued.append((group, sequence))

    def on_complete(self, group: str, sequence: int) -> None:
        self.completed.append((group, sequence))


def test_a_collective_has_completed_when_the_device_says_so(cpu_gangs: Gangs) -> None:
    cpu_gangs(4).run(check_completion)


def check_completion(ctx: RankContext) -> None:
    board = Board()
    with simulated() as simulation:
        model = shard(mlp(), mesh=ctx.mesh)
        observe(model, board)
        simulation.takes(model)
        simulation.device.is_idle = False
        torch.autograd.backward(model(ctx.batch(0, 2, WIDTH)).square().mean())
        in_step = list(board.issued)
        assert in_step
        assert board.completed == []
        simulation.device.is_idle = True
        with torch.no_grad():
            model(ctx.batch(1, 2, WIDTH))
    assert board.completed[: len(in_step)] == in_step
    assert board.completed == board.issued


@pytest.mark.parametrize(
    ("scenario", "streams"),
    [
        (sharded, {"GATHER", "REDUCE"}),
        (quantized_gradients, {"GATHER", "REDUCE"}),
        (replicated, {"GATHER", "REDUCE", "ALL_REDUCE"}),
    ],
    ids=["sharded", "quantized", "replicated"],
)
def test_collectives_are_work_of_their_streams(
    cpu_gangs: Gangs, scenario: Scenario, streams: set[str]
) -> None:
    cpu_gangs(4).run(check_streams, scenario, streams)


def check_streams(ctx: RankContext, scenario: Scenario, streams: set[str]) -> None:
    assert {each.stream for each in run(ctx, scenario).device.collectives} == streams


def test_in_forward_a_gather_overlaps_the_copy_out_of_the_one_before(cpu_gangs: Gangs) -> None:
    cpu_gangs(4).run(check_overlap)


def check_overlap(ctx: RankContext) -> None:
    with simulated() as simulation:
        model = shard(mlp(), mesh=ctx.mesh)
        simulation.takes(model)
        with torch.no_grad():
            for step in range(2):
                model(ctx.batch(step, 2, WIDTH))
    device = simulation.device
    # The second pass knows what follows. Only its first gather follows the pass before.
    gathers = device.collectives[-len(model) :]
    copies = device.copies_out[-len(model) :]
    assert all(each.name.startswith("all_gather") for each in gathers)
    for gather, copy_before in zip(gathers[1:], copies, strict=False):
        assert gather.after < copy_before
    assert not simulation.races


@pytest.mark.parametrize("scenario", [sharded, mixed_precision, replicated], ids=NAME)
def test_rows_of_a_reduction_are_aligned_whatever_the_flags_add(
    cpu_gangs: Gangs, scenario: Scenario
) -> None:
    cpu_gangs(4).run(check_aligned, scenario)


def check_aligned(ctx: RankContext, scenario: Scenario) -> None:
    collectives = run(ctx, scenario).device.collectives
    rows = {each.result_bytes for each in collectives if each.name.startswith("reduce_scatter")}
    assert rows
    assert {row % 128 for row in rows} == {0}


@pytest.mark.parametrize("edge", NEEDED)
def test_without_one_ordering_memory_is_used_too_early(cpu_gangs: Gangs, edge: str) -> None:
    scenario, world = NEEDED[edge]
    cpu_gangs(world).run(check_that_it_matters, scenario, edge)


def check_that_it_matters(ctx: RankContext, scenario: Scenario, edge: str) -> None:
    assert run(ctx, scenario, deaf_to=edge).races
