"""A whole gradient between autograd and the reduction that takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn


class UnreducedGrad:
    """What autograd left on the whole parameter, and the sum of what earlier backwards did.

    The methods take the whole parameter; None if none was made yet.

    Attributes:
        on_arrival: Called with the whole parameter when autograd has added to its gradient.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._watched: nn.Parameter | None = None
        self.on_arrival: Callable[[torch.Tensor], None] | None = None

    def watch(self, whole: nn.Parameter) -> None:
        """Has `on_arrival` called each time autograd has added to the gradient of `whole`."""
        if self.on_arrival is not None and whole.requires_grad and whole is not self._watched:
            whole.register_post_accumulate_grad_hook(self.on_arrival)  # type: ignore[no-untyped-call]  # PyTorch's
            self._watched = whole

    def take(self, whole: nn.Parameter | None) -> torch.Tensor | None:
        """Removes and returns all of it."""
        self._add_to_sum(whole)
        grad, self._sum = self._sum, None
        if grad is None and whole is not None:
            grad, whole.grad = whole.grad, None
        return grad

    def keep(self, whole: nn.Parameter | None, dtype: torch.dtype | None) -> None:
        """Keeps this backward's for one that reduces, in `dtype` if one is given."""
        self._add_to_sum(whole)
        if whole is None or dtype is None:
            return
        grad = whole.grad
        if grad is not None and grad.dtype != dtype:
            whole.grad = None
            self._sum = grad.to(dtype)

    def drop(self, whole: nn.Parameter | None) -> None:
        """Forgets it."""
        self._sum = None
        if whole is not None:
            whole.grad = None

    def _add_to_sum(self, whole: nn.Parameter | None) -> None:
        if self._sum is not None and whole is not None and whole.grad is not None:
            self._sum += whole.grad
            whole.grad = None
