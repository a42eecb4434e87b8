"""What stays in memory: nothing whole after backward, and nothing more after fifty steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_core import SharedMemoryPolicy, fully_shard
from tests.engine.gang import Gangs, RankContext
from tests.engine.grid.cell import MESH_RANKS, RESHARD_SIZE, Cell
from tests.engine.grid.engines import OURS
from tests.engine.grid.model import tokens_of
from tests.engine.grid.training import backwards_of_step, sgd, sharded_net
from tests.engine.versus import groups_of, local
from tests.waiting import until

pytestmark = pytest.mark.ranks

WAYS = [
    Cell(2),
    Cell(2, accumulate="with sync"),
    Cell(2, accumulate="without sync"),
    Cell(2, precision="bf16", accumulate="without sync"),
    Cell(2, checkpointed=True),
    Cell(2, grouped=True),
    Cell(2, weights="unused"),
]
RESHARDS = [
    *(replace(way, reshard=reshard) for way in WAYS for reshard in (None, True, False)),
    Cell(MESH_RANKS, reshard=RESHARD_SIZE),
    Cell(MESH_RANKS, reshard=RESHARD_SIZE, weights="uneven", accumulate="without sync"),
]


@dataclass(frozen=True)
class Census:
    """The tensors that this process can reach, and the memory behind them."""

    tensors: int
    storage_bytes: int

    @classmethod
    def take(cls, besides: Sequence[torch.Tensor] = ()) -> Census:
        others = {id(tensor) for tensor in besides}
        found = [tensor for tensor in reachable() if id(tensor) not in others]
        storages = {
            storage._cdata: storage.nbytes()
            for tensor in found
            if not tensor.is_meta and tensor.layout is torch.strided
            for storage in [tensor.untyped_storage()]
        }
        return cls(len(found), sum(storages.values()))

    def is_within(self, other: Census) -> bool:
        """Whether neither figure is larger."""
        return self.tensors <= other.tensors and self.storage_bytes <= other.storage_bytes


def reachable() -> list[torch.Tensor]:
    """The tensors that own storage: of a DTensor, the one within it."""
    gc.collect()
    # Not isinstance: it would ask objects that answer with a warning.
    return [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]


class Storage:
    """The bytes that tensors made from here on have.

    Those of earlier tests are kept until the end: a backend's thread may let go of them at any
    time, which would make what is counted here smaller than before.
    """

    def __init__(self) -> None:
        self._earlier = reachable()

    def bytes(self) -> int:
        return Census.take(self._earlier).storage_bytes

    def comes_to(self, expected: int) -> None:
        """Wait for so many bytes: a backend's thread lets go of buffers just after it has told."""
        until(lambda: self.bytes() == expected)


def test_the_census_counts_each_storage_once() -> None:
    before = Census.take()
    tensor = torch.empty(1000)
    view = tensor[1:]
    after = Census.take()
    assert after.tensors == before.tensors + 2
    assert after.storage_bytes == before.storage_bytes + 4000
    tensor.untyped_storage().resize_(0)
    assert Census.take().storage_bytes == before.storage_bytes
    assert view.numel() == 999


@pytest.mark.parametrize("cell", RESHARDS, ids=str)
def test_nothing_whole_is_left_after_backward(gangs: Gangs, cell: Cell) -> None:
    gangs(cell.world).run(check_nothing_whole, cell)


def check_nothing_whole(ctx: RankContext, cell: Cell) -> None:
    storage = Storage()
    model = sharded_net(ctx, cell, OURS)
    sharded = storage.bytes()
    for step in range(2):
        backwards_of_step(ctx, cell, model, step)
        storage.comes_to(sharded + bytes_of_gradients(ctx, model))
        model.zero_grad()
        storage.comes_to(sharded)


def bytes_of_gradients(ctx: RankContext, model: Any) -> int:  # noqa: ANN401 - of the engine's class
    """Of slices, in full precision and padded. Those of a unit share one buffer with a flag for each."""
    alignment = 4 if ctx.device.type == "cpu" else 128
    total = 0
    for group in groups_of(model):
        trained = [param.sharded_param for param in group.params]
        trained = [param for param in trained if param.requires_grad]
        size = sum(local(param).untyped_storage().nbytes() + 4 for param in trained)
        total += -(-size // alignment) * alignment
    return total


def test_nothing_whole_is_left_after_evaluation(gangs: Gangs) -> None:
    gangs(2).run(check_evaluation)


def check_evaluation(ctx: RankContext) -> None:
    storage = Storage()
    model = sharded_net(ctx, Cell(2), OURS).eval()
    sharded = storage.bytes()
    for step in range(3):
        with torch.no_grad():
            evaluate(ctx, model, step)
        storage.comes_to(sharded)
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        evaluate(ctx, model, 3)
    assert storage.bytes() > sharded  # what the user set, until they set another
    for module in (*model.blocks, model):
        module.reshard()
    storage.comes_to(sharded)


def evaluate(ctx: RankContext, model: Any, step: int) -> None:  # noqa: ANN401 - of the engine's class
    model(tokens_of(step, 0, ctx.rank).to(ctx.device))


@pytest.mark.parametrize("cell", WAYS, ids=str)
def test_fifty_steps_leave_what_five_left(gangs: Gangs, cell: Cell) -> None:
    gangs(2).run(check_fifty_steps, cell)


def check_fifty_steps(ctx: RankContext, cell: Cell) -> None:
    model = sharded_net(ctx, cell, OURS)
    optimizer = sgd(model)
    at_five = Census(0, 0)
    for step in range(1, 51):
        backwards_of_step(ctx, cell, model, step)
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            at_five = Census.take()
    until(lambda: Census.take().is_within(at_five))


def test_fifty_steps_with_explicit_prefetch_leave_what_five_left(gangs: Gangs) -> None:
    gangs(2).run(check_prefetch)


def check_prefetch(ctx: RankContext) -> None:
    cell = Cell(2)
    model = sharded_net(ctx, cell, OURS)
    for earlier, later in pairwise(model.blocks):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])
    at_five = Census(0, 0)
    for step in range(1, 51):
        backwards_of_step(ctx, cell, model, step)
        model.zero_grad()
        if step == 5:
            at_five = Census.take()
    until(lambda: Census.take().is_within(at_five))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fifty_evaluations_leave_what_five_left(gangs: Gangs, mode: Callable[[], Any]) -> None:
    gangs(2).run(check_fifty_evaluations, mode)


def check_fifty_evaluations(ctx: RankContext, mode: Callable[[], Any]) -> None:
    model = sharded_net(ctx, Cell(2, reshard=None), OURS).eval()
    at_five = Census(0, 0)
    for step in range(1, 51):
        with mode():
            evaluate(ctx, model, step)
        if step == 5:
            at_five = Census.take()
    until(lambda: Census.take().is_within(at_five))


def test_alternating_training_and_evaluation_leaves_nothing_more(gangs: Gangs) -> None:
    gangs(2).run(check_alternation)


def check_alternation(ctx: RankContext) -> None:
    cell = Cell(2, reshard=None)
    model = sharded_net(ctx, cell, OURS)
    at_five = Census(0, 0)
    for step in range(1, 21):
        backwards_of_step(ctx, cell, model, step)
        model.zero_grad()
        with torch.no_grad():
            evaluate(ctx, model.eval(), step)
        model.train().reshard()
        if step == 5:
            at_five = Census.take()
    until(lambda: Census.take().is_within(at_five))


def test_what_is_worked_out_for_frozen_parameters_is_forgotten_in_time(
    gangs: Gangs, device: str
) -> None:
    if device != "cpu":
        pytest.skip("memory of the host is shared by CPU ranks")
    gangs(2).run(check_frozen_in_turn)


def check_frozen_in_turn(ctx: RankContext) -> None:
    """Training that freezes other parameters at each step never comes to an end of sets of them."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(7)))
    fully_shard(model, mesh=ctx.mesh, shared_memory=SharedMemoryPolicy())
    params = list(model.parameters())
    before, sets = plans_held(), 48
    for chosen in range(1, sets + 1):
        for bit, param in enumerate(params):
            param.requires_grad_(bool(chosen >> bit & 1))
        torch.autograd.backward(model(ctx.batch(chosen, 2, 2)).sum())
    for kind, count in plans_held().items():
        assert 0 < count - before[kind] < sets, kind


def plans_held() -> dict[str, int]:
    gc.collect()
    held = [type(each).__name__ for each in gc.get_objects()]
    return {kind: held.count(kind) for kind in ("PlainGrads", "_Rows")}
