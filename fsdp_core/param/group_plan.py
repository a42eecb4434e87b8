"""What a group of plain parameters does at every step, worked out once.

Most groups hold parameters whose whole is a plain tensor: no tensor class of its own, no smaller mesh,
no axes besides those of data parallelism. For those all that a step does with a parameter is to register
one object or the other and to move its gradient, and which objects these are hardly ever changes. So
they are looked up once, and a step goes through lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

import torch

from fsdp_core import torch_private
from fsdp_core.layout import Slicing
from fsdp_core.param.grad_batch import GradBatch, PlainGrads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from fsdp_core.param.fsdp_param import FSDPParam
    from fsdp_core.param.unsharded_param import UnshardedParam


@dataclass(frozen=True)
class _Forms:
    """The objects of one parameter."""

    param: FSDPParam
    sharded: nn.Parameter
    whole: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]


class GroupPlan:
    """Registers all parameters of a group, and takes all their gradients.

    Args:
        params: Of the group, in packing order; each has been whole before.
    """

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        self._changes = [param.changes for param in params]
        self._params = params
        self._unsharded = [cast("UnshardedParam", param.unsharded()) for param in params]
        self._forms = [
            _Forms(param, param.sharded_param, whole.parameter, param.slot.places)
            for param, whole in zip(params, self._unsharded, strict=True)
        ]
        self._freed = [whole for whole in self._unsharded if not whole.is_shared]
        self._known_grads: dict[tuple[int, ...], PlainGrads] = {}

    @classmethod
    def of(cls, params: Sequence[FSDPParam]) -> Self | None:
        """The plan of a group; None if some parameter is more than plain."""
        return (
            cls(params) if all(param.is_plain and not param.has_axes for param in params) else None
        )

    @property
    def is_current(self) -> bool:
        """Whether all objects are still those that it was made for."""
        return [param.changes for param in self._params] == self._changes

    def register_whole(self) -> None:
        """Registers the whole parameters, already filled."""
        for forms in self._forms:
            if forms.whole.requires_grad != forms.sharded.requires_grad:
                forms.param.to_unsharded()  # frozen, or trainable again, since
                continue
            for module, name in forms.places:
                torch_private.set_parameter(module, name, forms.whole)

    def register_slices(self) -> None:
        """Registers the slices and frees the whole parameters."""
        for forms in self._forms:
            for module, name in forms.places:
                torch_private.set_parameter(module, name, forms.sharded)
        for whole in self._freed:
            whole.free()

    def take_grads(self, *, is_agreed: bool) -> GradBatch | None:
        """Removes all whole gradients.

        Args:
            is_agreed: See `GradBatch`.

        Returns:
            None, and nothing was removed, if a trainable parameter has none, or if they are of several
            dtypes or of a tensor class: then each has to be asked.
        """
        grads: list[torch.Tensor] = []
        given: list[int] = []
        for index, forms in enumerate(self._forms):
            grad = forms.whole.grad
            if grad is None:
                if forms.param.may_have_grad:
                    return None
            elif type(grad) is not torch.Tensor or (grads and grad.dtype != grads[0].dtype):
                return None
            else:
                grads.append(grad)
                given.append(index)
        if not grads:
            return None
        for index in given:
            self._forms[index].whole.grad = None
        plain = self._plain(tuple(given))
        return GradBatch(
            list(plain.params),
            [
                self._params[index].in_memory_order(grad)
                for index, grad in zip(given, grads, strict=True)
            ],
            [1] * len(grads),
            [True] * len(grads),
            is_agreed,
            self._params[given[0]].reduce_dtype or grads[0].dtype,
            plain,
        )

    def _plain(self, given: tuple[int, ...]) -> PlainGrads:
        if (known := self._known_grads.get(given)) is None:
            params = tuple(self._params[index] for index in given)
            slicings = tuple(param.slicing for param in params)
            flags = Slicing.of((len(params),), None, slicings[0].parts)
            known = self._known_grads[given] = PlainGrads(params, slicings, (*slicings, flags))
        return known
