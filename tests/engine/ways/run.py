"""A model that goes backward in one way, on one engine or on plain modules, and the lists of ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import backward
from torch.utils.checkpoint import (
    checkpoint,
)

from fsdp_core.param import owned_over
from tests.engine.gang import RankContext
from tests.engine.versus import full

WIDTH, CLASSES, CHUNKS = 6, 5, 2

Grads = dict[str, torch.Tensor | None]


class Net(nn.Module):
    """Two layers, a norm and a head; one weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.with_head = True
        self.recompute: dict[str, bool] = {}
        self.returns: Callable[[torch.Tensor], object] = lambda output: output

    def forward(self, x: torch.Tensor) -> object:
        for name in ("first", "second"):
            x = self._run(name, x).tanh()
        x = self._run("norm", x * self.scale)
        if self.with_head:
            x = self._run("head", x)
        return self.returns(x)

    def _run(self, name: str, x: torch.Tensor) -> torch.Tensor:
        layer = self.get_submodule(name)
        if name not in self.recompute:
            return cast("torch.Tensor", layer(x))
        return cast("torch.Tensor", checkpoint(layer, x, use_reentrant=self.recompute[name]))


@dataclass
class Run:
    """One way of going backward, on one engine or on plain modules.

    Attributes:
        grads: After each backward, averaged over ranks; None where there is none.
    """

    ctx: RankContext
    shard: Callable[..., object] | None
    grads: list[Grads] = field(default_factory=list)
    models: list[Net] = field(default_factory=list)
    params: dict[str, nn.Parameter] = field(default_factory=dict)

    def net(
        self, units: str = "first second norm,head", *, tied: bool = False, **options: object
    ) -> Any:  # noqa: ANN401 - a class of either engine
        """A model with one unit for each word of `units`, and the root."""
        torch.manual_seed(3 + len(self.models))
        model = Net().to(self.ctx.device)
        if tied:
            model.second.weight = model.first.weight
        if self.shard is not None:
            for word in units.split():
                members = [model.get_submodule(name) for name in word.split(",")]
                self.shard(members if len(members) > 1 else members[0], **options)
            self.shard(model, mesh=self.ctx.mesh)
        index = len(self.models)
        self.params |= {f"{index}.{name}": param for name, param in model.named_parameters()}
        self.models.append(model)
        return model

    def x(self, step: int = 0, *, grad: bool = False) -> torch.Tensor:
        """Input of a step, different on each rank."""
        return self.ctx.batch(step, 4, WIDTH).requires_grad_(grad)

    def note(self) -> None:
        """Notes all gradients."""
        found: Grads = {}
        for name, param in self.params.items():
            # One that was offloaded, too: the device's process group knows no memory of the host.
            grad = None if param.grad is None else full(param.grad.to(self.ctx.device)).clone()
            if self.shard is None and grad is not None:
                dist.all_reduce(grad, dist.ReduceOp.AVG)
            if owned_over(param) is not None:
                grad = _of_its_owner(self.ctx, grad)
            found[name] = grad
        self.grads.append(found)

    def backward(self, *losses: torch.Tensor, **options: bool) -> None:
        """Goes backward from the sum of squares of each, and notes the gradients."""
        backward([loss.square().sum() for loss in losses], **options)  # type: ignore[arg-type]  # PyTorch's
        self.note()

    def step(self) -> None:
        """An update."""
        if self.shard is None:
            for name, grad in self.grads[-1].items():
                self.params[name].grad = grad
        optimizer = torch.optim.SGD(self.params.values(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()


def _of_its_owner(ctx: RankContext, grad: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient that one rank has, on all of them."""
    found: list[torch.Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, None if grad is None else grad.cpu())
    held = (each.to(ctx.device) for each in found if each is not None and each.numel())
    return next(held, None)


def chunks_of(hidden: torch.Tensor, *, grad: bool = True) -> Iterator[torch.Tensor]:
    for chunk in hidden.detach().chunk(CHUNKS):
        yield chunk.clone().requires_grad_(grad)


Way = Callable[..., None]

WAYS: dict[str, Way] = {}
# Where the reference has no gradients, wrong ones, or refuses.
BEYOND: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


def way_beyond_the_reference(function: Way) -> Way:
    BEYOND[function.__name__] = function
    return function


class Raising(torch.autograd.Function):
    @classmethod
    def of(cls, tensor: torch.Tensor) -> torch.Tensor:
        return cast("Callable[[torch.Tensor], torch.Tensor]", cls.apply)(tensor)

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        del ctx, grads
        raise ZeroDivisionError


class Opaque:
    """What no engine looks into."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
