"""Collectives whose buffers the process group itself allocates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp_core import torch_private
from fsdp_core.comm.strategies import Comm, DefaultAllGather, DefaultReduceScatter


class _ProcessGroupMemory(Comm):
    """Registered memory where the backend has some (NCCL), which saves it a copy.

    A backend without an allocator of its own gets ordinary memory: the same numbers, no gain.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """From the backend of the group for `device`; 1D."""
        allocate = torch_private.allocator_of(self._group, device)
        if allocate is None:
            return torch.empty(tuple(size), dtype=dtype, device=device)
        return allocate(math.prod(size), dtype)


class ProcessGroupAllGather(_ProcessGroupMemory, DefaultAllGather):
    """The backend's all-gather, in memory of the process group."""


class ProcessGroupReduceScatter(_ProcessGroupMemory, DefaultReduceScatter):
    """The backend's reduce-scatter, in memory of the process group."""
