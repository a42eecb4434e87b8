"""Optimizers of a user's own, which keep what those of torch do not."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Named = Iterable[tuple[str, torch.nn.Parameter]]


class Lookahead(torch.optim.Optimizer):
    """Descends, and from its fourth step on goes halfway back each second step; of vectors it keeps nothing."""

    def __init__(self, parameters: Named, lr: float) -> None:
        super().__init__([each for _, each in parameters], {"lr": lr})

    @torch.no_grad()
    def step(self, _: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # the base class overloads it
        """One update."""
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(each.grad, alpha=-group["lr"])
                if each.ndim < 2:
                    continue
                state = self.state[each]
                made = state["made"] = state.get("made", 0) + 1
                if made == 4:
                    state["slow"], state["pulls"] = each.clone(), 1
                elif made > 4 and made % 2 == 0:
                    state["pulls"] += 1
                    # If it came back as a tensor, this would be a float32.
                    state["slow"].lerp_(each, (1 - 0.999 ** state["pulls"]) * 200)
                    each.copy_(state["slow"])


class Averaging(torch.optim.Optimizer):
    """Steps by a mean of all gradients so far: how many there were, and what they weigh, is kept in its groups."""

    def __init__(self, parameters: Named, lr: float) -> None:
        defaults = {"lr": lr, "made": 0, "weights": (0.0, 1.0), "note": None}
        super().__init__([each for _, each in parameters], defaults)

    @torch.no_grad()
    def step(self, _: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # the base class overloads it
        """One update."""
        for group in self.param_groups:
            group["made"] += 1
            sum_, last = group["weights"]
            group["weights"] = (sum_ + last, last * 1.1)
            for each in group["params"]:
                state: dict[str, Any] = self.state[each]
                if not state:
                    state["mean"] = torch.zeros_like(each)
                state["mean"].lerp_(each.grad, last / (sum_ + last))
                each.add_(state["mean"], alpha=-group["lr"] / group["made"] ** 0.5)


def of_the_head(parameters: Named, lr: float) -> torch.optim.Optimizer:
    """One that leaves out most parameters, which want gradients all the same."""
    return torch.optim.SGD([each for name, each in parameters if name.startswith("head")], lr=lr)


class Slicewise(torch.optim.Optimizer):
    """Computes with the slices of its rank alone: what it keeps has the shape of a slice, or none."""

    def __init__(self, parameters: Named, lr: float) -> None:
        super().__init__([each for _, each in parameters], {"lr": lr})

    @torch.no_grad()
    def step(self, _: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # the base class overloads it
        """One update."""
        for group in self.param_groups:
            for each in group["params"]:
                own, grad = _slice(each), _slice(each.grad)
                state: dict[str, Any] = self.state[each]
                if not state:
                    state["mean"], state["size"] = torch.zeros_like(own), torch.zeros(())
                state["mean"].mul_(0.9).add_(grad)
                state["size"].mul_(0.9).add_(grad.norm())
                own.add_(state["mean"] / (1 + state["size"]), alpha=-group["lr"])


def _slice(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
