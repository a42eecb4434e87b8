"""Sums over shards that still wait for the sum over replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fsdp_core.errors import StateError

if TYPE_CHECKING:
    from fsdp_core.param.grad_batch import GradBatch, GradTarget


class PartialReduce:
    """What reduce-scatters left while all-reduces were turned off, by the dtype they travel in."""

    def __init__(self) -> None:
        self._sums: dict[torch.dtype, tuple[torch.Tensor, list[GradTarget]]] = {}
        self._present: dict[torch.dtype, list[bool]] = {}

    def keep(self, result: torch.Tensor, batch: GradBatch) -> None:
        """Adds `result` to what waits; it is kept, not copied, if nothing does."""
        dtype = batch.reduce_dtype
        known = self._of(batch)
        if known is None:
            self._sums[dtype] = (result, list(batch.params))
            self._present[dtype] = list(batch.present)
        else:
            known += result
            self._present[dtype] = _either(self._present[dtype], batch.present)

    def add_to(self, result: torch.Tensor, batch: GradBatch) -> None:
        """Adds what waits to `result`, and forgets it."""
        known = self._of(batch)
        if known is not None:
            result += known
            batch.present = _either(self._present[batch.reduce_dtype], batch.present)
            del self._sums[batch.reduce_dtype], self._present[batch.reduce_dtype]

    def clear(self) -> None:
        """Forgets everything."""
        self._sums.clear()
        self._present.clear()

    def _of(self, batch: GradBatch) -> torch.Tensor | None:
        found = self._sums.get(batch.reduce_dtype)
        if found is None:
            return None
        kept, params = found
        if params != batch.params:
            raise StateError(
                "Gradients that wait for the all-reduce belong to "
                f"{[param.fqn for param in params]}, but this backward gave "
                f"{[param.fqn for param in batch.params]}. Use the same parameters in every "
                "microbatch, or leave set_agree_on_unused_params on."
            )
        return kept


def _either(one: list[bool], other: list[bool]) -> list[bool]:
    return [a or b for a, b in zip(one, other, strict=True)]
