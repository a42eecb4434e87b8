"""The gradients that one reduction takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fsdp_core.param.fsdp_param import FSDPParam


@dataclass
class GradBatch:
    """Whole gradients of one dtype, in packing order.

    Ranks that used different parameters of a unit must still reduce the same ones. So a batch
    may cover parameters that have no gradient on this rank, with zeros, and `is_agreed` says
    that one flag for each parameter travels with them: it tells whether any rank had one.

    Attributes:
        params: Those that the reduction covers.
        grads: Theirs, as `FSDPParam.take_grad` returns them; emptied when they are packed.
        present: Whether this rank had a gradient.
        is_agreed: Whether flags travel.
        reduce_dtype: In which the gradients travel.
    """

    params: list[FSDPParam]
    grads: list[torch.Tensor]
    present: list[bool]
    is_agreed: bool
    reduce_dtype: torch.dtype


def batches_of(
    params: Sequence[FSDPParam], *, covers_unused: bool, is_agreed: bool
) -> list[GradBatch]:
    """Takes the gradients of `params`, one batch for each dtype they travel in.

    Args:
        params: In packing order.
        covers_unused: Whether trainable parameters without a gradient take part with zeros.
        is_agreed: Whether those that no rank had a gradient for are to stay without one.
    """
    batches: dict[torch.dtype, GradBatch] = {}
    for param in params:
        grad = param.take_grad()
        had_one = grad is not None
        if grad is None:
            if not covers_unused or not param.is_trainable:
                continue
            grad = param.zero_grad()
        dtype = param.reduce_dtype or grad.dtype
        batch = batches.setdefault(dtype, GradBatch([], [], [], is_agreed, dtype))
        batch.params.append(param)
        batch.grads.append(grad)
        batch.present.append(had_one)
    return list(batches.values())
