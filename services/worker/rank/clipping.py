"""The norm of the whole gradient, and scaling the gradient down to a limit."""

from collections.abc import Iterable
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

# As in torch.nn.utils.clip_grad_norm_: a zero gradient must not divide by zero.
_EPSILON: Final = 1e-6


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], limit: float | None, shards: dist.ProcessGroup
) -> torch.Tensor:
    """Scales the gradients so that their norm over all ranks is at most ``limit``.

    Works on the local slices: one small all-reduce in all, where DTensor operations would
    dispatch per parameter.

    Args:
        parameters: Sharded over ``shards``; those without a gradient are left out.
        limit: Largest Euclidean norm. None only measures.
        shards: The ranks that together hold every parameter once.

    Returns:
        The norm before scaling, an fp64 scalar on the gradients' device, equal on all ranks.
    """
    slices = [_local(p.grad) for p in parameters if p.grad is not None]
    device = slices[0].device if slices else torch.device("cpu")
    squares = [piece.square().sum(dtype=torch.float64) for piece in slices]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    total = total.to(device)
    dist.all_reduce(total, group=shards)
    norm = total.sqrt()
    if limit is not None:
        scale = (limit / (norm + _EPSILON)).clamp(max=1.0)
        for piece in slices:
            piece.mul_(scale)
    return norm


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
