"""Units that write into the containers that they are given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import nn

from fsdp_core.errors import ArgumentError
from tests.engine.gang import Gangs, RankContext
from tests.engine.versus import assert_same_full, ours

pytestmark = pytest.mark.ranks

WIDTH = 5


class OwnDict(dict[str, Any]):
    """Its keys are its attributes."""

    def __init__(self, **values: object) -> None:
        super().__init__(values)
        self.__dict__ = self


class NotedDict(dict[str, Any]):
    """Has attributes besides its keys."""

    note: torch.Tensor | None = None


class NotedList(list[torch.Tensor]):
    """Has attributes besides its items."""

    note: torch.Tensor | None = None


@dataclass(slots=True)
class Slotted:
    """Has no `__dict__`."""

    hidden: torch.Tensor


def write_attribute(layer: nn.Module, box: Any) -> None:  # noqa: ANN401 - one of the above
    box.hidden = layer(box.hidden).tanh()


def write_key(layer: nn.Module, box: dict[str, torch.Tensor]) -> None:
    box["hidden"] = layer(box["hidden"]).tanh()


def write_beside(layer: nn.Module, box: NotedDict | NotedList) -> None:
    hidden = next(iter(box.values())) if isinstance(box, dict) else box[0]
    box.note = layer(hidden).tanh() + (0.0 if box.note is None else box.note)


def write_set(layer: nn.Module, box: set[torch.Tensor]) -> None:
    hidden = layer(box.pop()).tanh()
    box.add(hidden)


def write_alias(layer: nn.Module, box: list[torch.Tensor], same: list[torch.Tensor]) -> None:
    box.append(layer(same[-1]).tanh())
    same.append(layer(box[-1]).tanh())


def write_part(layer: nn.Module, box: dict[str, Any], losses: list[torch.Tensor]) -> None:
    losses.append(layer(box["hidden"]).tanh().sum())
    box["losses"].append(layer(box["hidden"]).sum())


def write_empty(layer: nn.Module, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
    hidden: torch.Tensor = layer(x).tanh()
    losses.append(layer(hidden).sum())  # backward reaches it first
    return hidden


def write_moved(layer: nn.Module, box: dict[str, Any], empty: list[Any]) -> None:
    if not empty:
        empty.extend([box, [box]])
    for same in (box, empty[0], empty[1][0]):
        same["hidden"] = layer(same["hidden"]).tanh()


def write_order(layer: nn.Module, box: dict[str, torch.Tensor]) -> None:
    first = next(iter(box))
    box[first] = layer(box.pop(first)).tanh()


class Boxed(nn.Module):
    """Passes a box to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, write: Callable[..., object], *boxes: object) -> object:
        return write(self.layer, *boxes)


def with_losses(x: torch.Tensor) -> tuple[dict[str, Any], list[torch.Tensor]]:
    losses = [x.sum()]
    return {"hidden": x, "losses": losses}, losses


def a_noted_dict(x: torch.Tensor) -> tuple[NotedDict]:
    return (NotedDict(hidden=x),)


def moved(box: dict[str, Any], empty: list[Any]) -> torch.Tensor:
    assert empty[0] is box
    assert empty[1][0] is box
    hidden: torch.Tensor = box["hidden"]
    return hidden


def first_of(box: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([value * place for place, value in enumerate(box.values())])


BOXES: dict[str, tuple[Callable[..., object], Callable[..., Any], Callable[..., Any]]] = {
    "attribute of a dict": (write_attribute, lambda x: [OwnDict(hidden=x)], lambda b: b.hidden),
    "key of such a dict": (write_key, lambda x: [OwnDict(hidden=x)], lambda b: b.hidden),
    "beside the keys": (write_beside, a_noted_dict, lambda b: b.note),
    "beside the items": (write_beside, lambda x: [NotedList([x])], lambda b: b.note),
    "slots": (write_attribute, lambda x: [Slotted(x)], lambda b: b.hidden),
    "set": (write_set, lambda x: [{x}], lambda b: next(iter(b))),
    "one list twice": (write_alias, lambda x: [[x]] * 2, lambda b, _: torch.stack(b)),
    "empty list": (write_empty, lambda x: [x, []], lambda _, losses: torch.stack(losses)),
    "moved to an empty list": (write_moved, lambda x: [{"hidden": x}, []], moved),
    "order of keys": (write_order, lambda x: [{"a": x, "b": x * 2}], first_of),
    "a list and its owner": (write_part, with_losses, lambda _, losses: torch.stack(losses)),
}


@pytest.mark.parametrize("kind", BOXES)
def test_what_a_unit_writes_reaches_its_caller_in_every_kind_of_container(
    gangs: Gangs, kind: str
) -> None:
    gangs(2).run(check_box, kind)


def check_box(ctx: RankContext, kind: str) -> None:
    write, make, read = BOXES[kind]
    torch.manual_seed(43)
    plain = nn.ModuleList([Boxed(), Boxed()]).to(ctx.device)
    model = copy.deepcopy(plain)
    for each in model:
        ours().shard(each, mesh=ctx.mesh)

    def loss(units: nn.ModuleList, rank: int) -> torch.Tensor:
        x = RankContext(rank, ctx.world, ctx.device, ctx.mesh).batch(0, 3, WIDTH)
        boxes = make(x.requires_grad_())
        total = torch.zeros((), device=ctx.device)
        for each in units:
            if isinstance(output := each(write, *boxes), torch.Tensor):
                boxes[0], total = output, output.sum()
        return total + cast("torch.Tensor", read(*boxes)).square().sum()

    for rank in range(ctx.world):
        torch.autograd.backward(loss(plain, rank) / ctx.world)
    torch.autograd.backward(loss(model, ctx.rank))
    assert all(param.grad is not None for param in model.parameters())
    assert_same_full(model, plain, rtol=1e-5, atol=1e-6)


def test_an_input_that_a_unit_returns_in_a_list_gets_no_hook(gangs: Gangs) -> None:
    gangs(2).run(check_returned_input)


def check_returned_input(ctx: RankContext) -> None:
    def write(layer: nn.Module, x: torch.Tensor, seen: list[Any]) -> list[Any]:
        seen += [x, layer(x), [x]]
        return seen

    model = ours().shard(Boxed().to(ctx.device), mesh=ctx.mesh)
    x = ctx.batch(0, 3, WIDTH).requires_grad_()
    with pytest.warns(UserWarning, match="returned a view tensor"):
        seen = model(write, x, [])
    assert seen[0] is x
    assert seen[2][0] is x
    assert not x._backward_hooks
    torch.autograd.backward((seen[0] * seen[1]).sum())
    assert x.grad is not None


def test_a_container_that_contains_itself_is_refused(gangs: Gangs) -> None:
    gangs(1).run(check_ring)


def check_ring(ctx: RankContext) -> None:
    model = ours().shard(Boxed().to(ctx.device), mesh=ctx.mesh)
    ring: dict[str, Any] = {"hidden": ctx.batch(0, 3, WIDTH).requires_grad_()}
    ring["ring"] = ring
    with pytest.raises(ArgumentError, match="A dict that a unit takes or returns contains itself"):
        model(write_key, ring)
