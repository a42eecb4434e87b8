"""Sums over shards that still wait for the sum over replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fsdp_core.errors import StateError

if TYPE_CHECKING:
    from fsdp_core.param.grad_batch import GradBatch, GradTarget


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
            StateError: Gradients of parameters wait that the batch does not cover.
        """
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
