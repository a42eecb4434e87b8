"""What the trainer asks of a model.

A model factory is a callable that takes the arguments of ``model.args`` and returns an
``nn.Module``. What ``forward`` is called with, and where the loss comes from, ``models.loss`` says.
Two things a model may add:

- a method ``loss(batch)``. It is called instead of ``forward`` with the batch as the data gives it, and
  returns the mean loss over it, or a dict with it as ``loss`` and with metrics. The engine gathers
  parameters around it exactly as around ``forward``.
- the attribute ``meta_init = True``. It promises that every submodule which directly owns
  parameters or buffers has a ``reset_parameters()`` that gives all of them their values. The
  model is then built on the meta device, sharded, and only then filled, one submodule at a time,
  so that no rank ever holds all of it. Without the promise, every rank builds the whole model in
  host memory under the job's seed, and the engine keeps this rank's slices.

Either way the values depend on the job's seed alone, not on the number of ranks.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn


class TokenModel(Protocol):
    """A model by ``forward``.

    ``tokens``: int64 ``[batch, length]``. Returns logits, floating, ``[batch, length, vocab]``.
    """

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the token after each given one."""
        ...


@runtime_checkable
class LossModel(Protocol):
    """A model that computes its own loss."""

    def loss(self, batch: Any) -> Any:  # noqa: ANN401 (whatever the data gives)
        """Mean loss over the batch, a scalar, or a dict with it as ``loss`` and with metrics."""
        ...


@runtime_checkable
class MetaInit(Protocol):
    """A model that may be built on the meta device (see the module's text)."""

    meta_init: ClassVar[bool]


class FirstValues(Protocol):
    """How a model that was built on the meta device gets its values, group by group."""

    def groups(self, model: nn.Module) -> Iterable[tuple[str, nn.Module, bool]]:
        """Modules to fill at once: name, module, and whether all below it come along."""
        ...

    def fill(self, name: str, module: nn.Module, *, below: bool) -> None:
        """Gives all parameters and buffers of a group, whole and on the host, their first values."""
        ...

    def read(self, fqn: str, slices: tuple[slice, ...]) -> torch.Tensor | None:
        """The values of a part of a tensor, where they need no drawing."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """What belongs beside the exported weights, by file name."""
        ...


@runtime_checkable
class HasFirstValues(Protocol):
    """A model that says how it gets its values."""

    first_values: FirstValues


@runtime_checkable
class Resettable(Protocol):
    """A module that can fill its own parameters and buffers, and those of no submodule."""

    def reset_parameters(self) -> None:
        """Gives every parameter and buffer that the module directly owns its first value."""
        ...
