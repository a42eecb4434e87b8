"""The gradients that one reduction takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from fsdp_core.comm import CommLink, Lane
    from fsdp_core.layout import Slicing, View


class GradTarget(Protocol):
    """Where a reduced row goes: a parameter, or several that share one row."""

    @property
    def fqn(self) -> str:
        """For messages."""

    @property
    def slicing(self) -> Slicing:
        """How the whole gradient is cut into rows."""

    @property
    def orig_dtype(self) -> torch.dtype:
        """That the row is cast to."""

    def add_sharded_grads(
        self, row: torch.Tensor, present: Sequence[bool], link: CommLink, lane: Lane
    ) -> None:
        """Adds this rank's row, 1D, to the gradients of those parameters that have one."""


@dataclass(frozen=True)
class Contribution:
    """A whole gradient on its way into a batch.

    Attributes:
        target: Where its row goes.
        grad: In the order in which it lies in memory.
        present: For each parameter of the target, whether this rank had a gradient.
        reduce_dtype: In which it travels.
    """

    target: GradTarget
    grad: torch.Tensor
    present: list[bool]
    reduce_dtype: torch.dtype


class GradSource(Protocol):
    """What gives gradients: a parameter, or several that travel together."""

    def take_contribution(self, *, covers_unused: bool) -> Contribution | None:
        """Removes and returns the whole gradient; None if there is none to reduce."""


class PlainTarget(GradTarget, Protocol):
    """A parameter whose gradient is its slice."""

    def add_own_grad(self, own: torch.Tensor, link: CommLink, lane: Lane) -> None:
        """Adds the slice, in the order in which it lies in memory, without padding."""


@dataclass(frozen=True, eq=False)
class PlainGrads:
    """Parameters that all have a gradient and no other row than their slice; the same at each step.

    Attributes:
        params: In packing order.
        slicings: Theirs.
        flagged: The same, and at the end that of one flag for each.
        views: Where this rank's slices, without padding, lie in a row of `slicings`.
    """

    params: tuple[PlainTarget, ...]
    slicings: tuple[Slicing, ...]
    flagged: tuple[Slicing, ...]
    views: tuple[View, ...]


@dataclass
class GradBatch:
    """Whole gradients of one dtype, in packing order.

    Ranks that used different parameters of a unit must still reduce the same ones. So a batch
    may cover parameters that have no gradient on this rank, with zeros, and `is_agreed` says
    that one flag for each parameter travels with them: it tells whether any rank had one.

    Attributes:
        params: Those that the reduction covers.
        grads: Theirs, as `GradSource.take_contribution` gives them; emptied when packed.
        flag_counts: For each of `params`, how many of `present` are about it.
        present: Whether this rank had a gradient.
        is_agreed: Whether flags travel.
        reduce_dtype: In which the gradients travel.
        plain: The parameters, if each gives a gradient of its own; None: some may not.
    """

    params: list[GradTarget]
    grads: list[torch.Tensor]
    flag_counts: list[int]
    present: list[bool]
    is_agreed: bool
    reduce_dtype: torch.dtype
    plain: PlainGrads | None = None


def batches_of(
    sources: Sequence[GradSource], *, covers_unused: bool, is_agreed: bool
) -> list[GradBatch]:
    """Takes the gradients of `sources`, one batch for each dtype they travel in.

    Args:
        sources: In packing order.
        covers_unused: Whether trainable parameters without a gradient take part with zeros.
        is_agreed: Whether those that no rank had a gradient for are to stay without one.
    """
    batches: dict[torch.dtype, GradBatch] = {}
    for source in sources:
        taken = source.take_contribution(covers_unused=covers_unused)
        if taken is None:
            continue
        dtype = taken.reduce_dtype
        batch = batches.setdefault(dtype, GradBatch([], [], [], [], is_agreed, dtype))
        batch.params.append(taken.target)
        batch.grads.append(taken.grad)
        batch.flag_counts.append(len(taken.present))
        batch.present.extend(taken.present)
    return list(batches.values())
