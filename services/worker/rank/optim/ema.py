"""An exponential moving average of the weights, sharded as they are.

In checkpoints the average of a parameter has its name with ``ema.`` in front, where the parameter itself
has ``model.``; an export has the average beside the weights in ``ema.safetensors``. Buffers are not
averaged: validation takes the model's own.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from services.contract.jobs.spec_parts import EmaSpec

PREFIX: Final = "ema."


class Ema:
    """The averages of a model's trained parameters. They begin as the parameters are.

    Args:
        model: Sharded, with values.
        spec: How fast they follow, and how often.
    """

    def __init__(self, model: nn.Module, spec: EmaSpec) -> None:
        self._every = spec.every
        self._average = get_ema_multi_avg_fn(spec.decay)  # type: ignore[no-untyped-call]  # PyTorch's
        self._weights = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._means = {name: each.detach().clone() for name, each in self._weights.items()}

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The averages, as a checkpoint names them."""
        return {PREFIX + name: mean for name, mean in self._means.items()}

    @torch.no_grad()
    def start_over(self) -> None:
        """They become what the parameters are."""
        for name, mean in self._means.items():
            _local(mean).copy_(_local(self._weights[name]))

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Takes in the parameters after ``step``, if it is its turn."""
        if step % self._every == 0:
            pairs = [(_local(self._means[n]), _local(w)) for n, w in self._weights.items()]
            held = [pair for pair in pairs if pair[0].numel() > 0]
            if held:
                means, weights = zip(*held, strict=True)
                self._average(list(means), list(weights), None)

    @contextlib.contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Within, the model has the averages for parameters; afterwards both are as before, bit for bit.

        No unit may be gathered at either end. An exception leaves them exchanged.
        """
        self._exchange()
        yield
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, weight in self._weights.items():
            one, other = _local(weight), _local(self._means[name])
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
