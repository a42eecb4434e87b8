"""Gradients that are not reduced yet.

In the order in which one passes: what autograd left on a whole parameter (`UnreducedGrad`), the whole gradients
that one reduction takes (`GradBatch`), and sums over shards that still wait for the sum over replicas
(`PartialReduce`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from fsdp_core.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from fsdp_core.comm import CommContext, Stream
    from fsdp_core.layout import Slicing, View


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

    def convert(self, whole: nn.Parameter | None, dtype: torch.dtype) -> None:
        """Keeps all of it in `dtype`, apart from `whole`, which is given up."""
        grad = self.take(whole)
        self._sum = None if grad is None else grad.to(dtype)

    def drop(self, whole: nn.Parameter | None) -> None:
        """Forgets it."""
        self._sum = None
        if whole is not None:
            whole.grad = None

    def _add_to_sum(self, whole: nn.Parameter | None) -> None:
        if self._sum is not None and whole is not None and whole.grad is not None:
            self._sum += whole.grad
            whole.grad = None


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
        self, row: torch.Tensor, present: Sequence[bool], comm: CommContext, stream: Stream
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

    def add_own_grad(self, own: torch.Tensor, comm: CommContext, stream: Stream) -> None:
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
        label: Whose gradients they are; the same on all ranks.
    """

    params: list[GradTarget]
    grads: list[torch.Tensor]
    flag_counts: list[int]
    present: list[bool]
    is_agreed: bool
    reduce_dtype: torch.dtype
    plain: PlainGrads | None = None
    label: str = ""


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


@dataclass
class _Sum:
    """What reduce-scatters of the same parameters left.

    Attributes:
        total: Their rows, then one flag for each of `present` if `is_agreed`.
        params: In packing order.
        present: Whether this rank had a gradient.
        is_agreed: See `GradBatch`.
    """

    total: torch.Tensor
    params: list[GradTarget]
    present: list[bool]
    is_agreed: bool

    def is_like(self, batch: GradBatch) -> bool:
        """Whether the batch's result lies as this one."""
        return self.params == batch.params and self.is_agreed == batch.is_agreed


class PartialReduce:
    """What reduce-scatters left while all-reduces were turned off, by the dtype they travel in.

    A backward may reduce some parameters twice: those that other units share, when the whole
    backward has ended.
    """

    def __init__(self) -> None:
        self._sums: dict[torch.dtype, list[_Sum]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._sums

    def keep(self, result: torch.Tensor, batch: GradBatch) -> None:
        """Adds `result` to what waits; it is kept, not copied, if nothing like it does."""
        sums = self._sums.setdefault(batch.reduce_dtype, [])
        for known in sums:
            if known.is_like(batch):
                known.total += result
                known.present = _either(known.present, batch.present)
                return
        sums.append(_Sum(result, list(batch.params), list(batch.present), batch.is_agreed))

    def add_to(self, result: torch.Tensor, batch: GradBatch) -> None:
        """Adds what waits to `result`, and forgets it.

        Raises:
            StateError: Gradients of parameters wait that the batch does not cover, or in another dtype.
        """
        self._check_dtype(batch)
        for known in self._sums.pop(batch.reduce_dtype, ()):
            if known.is_like(batch):
                result += known.total
                batch.present = _either(known.present, batch.present)
            elif set(known.params) <= set(batch.params):
                _add_rows(known, result, batch)
            else:
                raise StateError(
                    "Gradients that wait for the all-reduce belong to "
                    f"{[param.fqn for param in known.params]}, but this backward gave "
                    f"{[param.fqn for param in batch.params]}. Use the same parameters in every "
                    "microbatch, or leave set_agree_on_unused_params on."
                )

    def _check_dtype(self, batch: GradBatch) -> None:
        # Sums of another dtype may be divided already, or not yet.
        others = {d: sums for d, sums in self._sums.items() if d != batch.reduce_dtype}
        for dtype, sums in others.items():
            late = [p.fqn for known in sums for p in known.params if p in batch.params]
            if late:
                raise StateError(
                    f"Gradients of {late} wait for the all-reduce in {dtype}, but are reduced in "
                    f"{batch.reduce_dtype} now. Convert a model between steps, not while "
                    "set_requires_all_reduce(False) keeps gradients."
                )

    def clear(self) -> None:
        """Forgets everything."""
        self._sums.clear()


def _add_rows(known: _Sum, result: torch.Tensor, batch: GradBatch) -> None:
    """Adds a sum of fewer parameters, each where the batch has it."""
    rows = _starts([param.slicing.row for param in batch.params])
    flags = _starts(batch.flag_counts)
    first_flag = len(result) - len(batch.present)
    present, start, known_flag = list(batch.present), 0, 0
    for param in known.params:
        place = batch.params.index(param)
        size, count, flag = param.slicing.row, batch.flag_counts[place], flags[place]
        result.narrow(0, rows[place], size).add_(known.total.narrow(0, start, size))
        theirs = known.present[known_flag : known_flag + count]
        present[flag : flag + count] = _either(theirs, present[flag : flag + count])
        if batch.is_agreed:
            mine = result.narrow(0, first_flag + flag, count)
            if known.is_agreed:
                there = len(known.total) - len(known.present) + known_flag
                mine.add_(known.total.narrow(0, there, count))
            else:
                mine.add_(1)  # all ranks had one, or it would not have been reduced
        start, known_flag = start + size, known_flag + count
    batch.present = present


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


def _either(one: list[bool], other: list[bool]) -> list[bool]:
    return [a or b for a, b in zip(one, other, strict=True)]
