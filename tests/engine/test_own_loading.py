"""Modules that load in their own way: what trains them goes on with what they took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import fully_shard
from fsdp_core.checkpoint import load_model_state, model_state
from tests.engine.gang import Gangs, RankContext
from tests.engine.test_checkpoint import Stored, stored, whole_shards


class Replacing(nn.Linear):
    """Makes new parameters of what it loads, as modules do whose sizes follow from it."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, torch.Tensor],
        prefix: str,
        *others: Any,  # noqa: ANN401 torch's
    ) -> None:
        self.weight = nn.Parameter(state_dict[prefix + "weight"].detach().clone())
        super()._load_from_state_dict(state_dict, prefix, *others)


class Assigning(nn.Linear):
    """Takes what it is given for its parameters."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> nn.Module:  # type: ignore[override]  # what is tried
        super().load_state_dict(state_dict, assign=True)
        return self


class Cleared(nn.Linear):
    """Is reset by a hook before it is loaded."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_load_state_dict_pre_hook(lambda *_: nn.init.zeros_(self.weight))  # type: ignore[no-untyped-call]  # PyTorch's


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [Replacing, Assigning, Cleared])
def test_an_optimizer_trains_on_parameters_that_a_module_replaced_or_reset(
    gangs: Gangs, kind: type[nn.Linear]
) -> None:
    source = nn.Linear(2, 3)
    expected = nn.Linear(2, 3)
    expected.load_state_dict(source.state_dict())
    update(expected, torch.optim.SGD(expected.parameters(), lr=0.5))
    shards = stored(source, torch.optim.SGD(source.parameters()))
    for weight, bias in gangs(2).run(load_and_update, kind, shards):
        torch.testing.assert_close(weight, expected.weight.detach())
        torch.testing.assert_close(bias, expected.bias.detach())


def load_and_update(
    ctx: RankContext, kind: type[nn.Linear], shards: list[Stored]
) -> list[torch.Tensor]:
    model = kind(2, 3).to(ctx.device)
    fully_shard(model, mesh=ctx.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    update(model, optimizer)
    load_model_state(model, [shard.saved() for shard in shards])
    update(model, optimizer)
    model.state_dict()  # its hooks hang the slices
    return [whole(each).cpu() for each in model.parameters()]


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    device = next(model.parameters()).device
    model(torch.ones(1, 2, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


class Tied(nn.Sequential):
    """Gives one copy of its two layers' weight, under both names."""

    def __init__(self) -> None:
        first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        second.weight = first.weight
        super().__init__(first, second)
        self.register_state_dict_post_hook(self._give_one)  # type: ignore[no-untyped-call]  # PyTorch's

    @staticmethod
    def _give_one(_: nn.Module, state: dict[str, torch.Tensor], *__: object) -> None:
        copy = state["0.weight"].clone()
        state.update(dict.fromkeys(("0.weight", "1.weight"), copy))


def test_a_copy_under_two_names_is_taken_back_under_both() -> None:
    source, model = Tied(), Tied()
    expected = next(source.parameters())
    load_model_state(model, whole_shards(model_state(source)))
    assert torch.equal(next(model.parameters()), expected)
