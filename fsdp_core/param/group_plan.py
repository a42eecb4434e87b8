"""What a group of plain parameters does at every step, worked out once.

Most groups hold parameters whose whole is a plain tensor: no tensor class of its own, no smaller mesh,
no axes besides those of data parallelism. For those all that a step does with a parameter is to register
one object or the other and to move its gradient, and which objects these are hardly ever changes. So
they are looked up once, and a step goes through lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Self, TypeAlias, TypeVar, cast

import torch

from fsdp_core import torch_private
from fsdp_core.errors import StateError
from fsdp_core.layout import Packing, Slicing
from fsdp_core.param.gather import COMMON_DTYPES
from fsdp_core.param.grads import GradBatch, PlainGrads
from fsdp_core.param.registration import replaced_unseen
from fsdp_core.param.unsharded import WholeMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from fsdp_core.param.fsdp_param import FSDPParam
    from fsdp_core.param.unsharded import UnshardedParam


_MOST_KNOWN: Final = 32
"""Sets of parameters with a gradient for which is kept what was worked out."""

Where = TypeVar("Where")
_Registration: TypeAlias = "tuple[Where, str, nn.Parameter, nn.Parameter]"
"""Where, under which name, and what is registered while the parameter is sharded and while it is whole."""


@dataclass(frozen=True)
class _Forms:
    """The objects of one parameter."""

    param: FSDPParam
    sharded: nn.Parameter
    whole: nn.Parameter


@dataclass(frozen=True)
class _SlicesToSend:
    """Slices of one dtype that rows end to end make whole.

    Attributes:
        tensors: This rank's, padded, 1D.
        dtype: Theirs, and of the whole parameters.
        packing: How they lie in a row.
        wholes: Of the whole parameters, (ranks, elements).
    """

    tensors: list[torch.Tensor]
    dtype: torch.dtype
    packing: Packing
    wholes: list[torch.Tensor]

    @classmethod
    def of(cls, params: Sequence[FSDPParam], wholes: Sequence[UnshardedParam]) -> Self | None:
        dtypes = {param.compute_dtype for param in params} | {param.orig_dtype for param in params}
        is_simple = all(param.slicing.leads and not param.is_offloaded for param in params)
        if len(dtypes) > 1 or not is_simple or not dtypes <= COMMON_DTYPES:
            return None
        slicings = [param.slicing for param in params]
        return cls(
            [param.send_data for param in params],
            dtypes.pop(),
            Packing.of([each.row for each in slicings], slicings[0].parts),
            [
                whole.flat[: each.row * each.parts].view(each.parts, each.row)
                for whole, each in zip(wholes, slicings, strict=True)
            ],
        )

    def pack(self, row: torch.Tensor) -> None:
        """Copies the slices into this rank's row of a gather's buffer."""
        torch_private.cat_into(row, self.tensors)

    def copy_out(self, rows: torch.Tensor) -> None:
        torch.split_with_sizes_copy(rows, list(self.packing.sizes), dim=1, out=self.wholes)


class GroupPlan:
    """Gathers and registers all parameters of a group, and takes all their gradients.

    Args:
        params: Of the group, in packing order; all are whole.
        rank: Of this process among those that hold slices.

    Attributes:
        slices: What a gather sends; None if each parameter has to be asked.
        is_all_here: Whether this rank's slices are the whole parameters.
    """

    def __init__(self, params: Sequence[FSDPParam], rank: int) -> None:
        self._changes = [param.changes for param in params]
        self._params = params
        self._rank = rank
        self._unsharded = [cast("UnshardedParam", param.unsharded()) for param in params]
        self._forms = [
            _Forms(param, param.sharded_param, whole.parameter)
            for param, whole in zip(params, self._unsharded, strict=True)
        ]
        self._tables: list[_Registration[dict[str, nn.Parameter | None]]] = []
        self._attributes: list[_Registration[nn.Module]] = []
        for forms in self._forms:
            for module, name in forms.param.slot.places:
                table = torch_private.parameter_table(module)
                if table is None:
                    self._attributes.append((module, name, forms.sharded, forms.whole))
                else:
                    self._tables.append((table, name, forms.sharded, forms.whole))
        self._memory = WholeMemory(self._unsharded)
        self.slices = _SlicesToSend.of(params, self._unsharded)
        is_alone = all(param.slicing.parts == 1 and param.slicing.leads for param in params)
        self.is_all_here = is_alone and not any(param.is_offloaded for param in params)
        self._own = [param.send_data for param in params] if self.is_all_here else []
        self._wholes = [
            whole.flat[: slices.numel()]
            for whole, slices in zip(self._unsharded, self._own, strict=False)
        ]
        self._known_grads: dict[tuple[int, ...], PlainGrads] = {}

    @classmethod
    def of(cls, params: Sequence[FSDPParam], rank: int) -> Self | None:
        """The plan of a group; None if some parameter is more than plain."""
        is_plain = all(param.is_plain and not param.has_axes for param in params)
        return cls(params, rank) if is_plain else None

    @property
    def is_current(self) -> bool:
        """Whether all objects are still those that it was made for."""
        return [param.changes for param in self._params] == self._changes

    def register_whole(self) -> None:
        """Registers the whole parameters, already filled; see `FSDPParam.to_unsharded`."""
        for forms in self._forms:
            if forms.whole.requires_grad != forms.sharded.requires_grad:
                forms.param.to_unsharded()  # frozen, or trainable again, since
        for table, name, sharded, whole in self._tables:
            if (there := table.get(name)) is not sharded and there is not whole:
                raise self._replaced_unseen()
            table[name] = whole
        for module, name, sharded, whole in self._attributes:
            held = torch_private.parameter_at(module, name)
            if held is not sharded and held is not whole:
                raise self._replaced_unseen()
            torch_private.set_parameter(module, name, whole)

    def _replaced_unseen(self) -> StateError:
        forms = self._forms
        return replaced_unseen(
            next(f.param.fqn for f in forms if not f.param.slot.holds(f.sharded, f.whole))
        )

    def register_slices(self) -> None:
        """Registers the slices and frees the whole parameters."""
        for table, name, sharded, _ in self._tables:
            table[name] = sharded
        for module, name, sharded, _ in self._attributes:
            torch_private.set_parameter(module, name, sharded)
        self._memory.free()

    def fill(self, rows: torch.Tensor) -> None:
        """Makes the parameters whole.

        Args:
            rows: (ranks, elements), each as `slices` lays out this rank's.
        """
        if self.slices is None:
            raise StateError("Parameters of several dtypes have no row in common.")
        self._memory.fill(partial(self.slices.copy_out, rows))

    def fill_alone(self) -> None:
        """Makes the parameters whole from this rank's slices, where these are all."""
        self._memory.fill(partial(torch_private.foreach_copy, self._wholes, self._own))

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
            elif (
                type(grad) is not torch.Tensor
                or (grads and grad.dtype != grads[0].dtype)
                or grad.layout is not torch.strided
            ):
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
            packing = Packing.of([each.row for each in slicings], flags.parts)
            views = packing.views([each.shape_of(self._rank) for each in slicings])
            known = PlainGrads(params, slicings, (*slicings, flags), views)
            if (
                len(self._known_grads) >= _MOST_KNOWN
            ):  # as where other parameters are frozen at every step
                self._known_grads.clear()
            self._known_grads[given] = known
        return known
