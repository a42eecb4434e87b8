"""Collectives whose buffers lie at the same place on all ranks, mapped into each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp_core import torch_private
from fsdp_core.comm.strategies import Comm, DefaultAllGather, DefaultReduceScatter, ReduceOp
from fsdp_core.errors import ArgumentError, UnsupportedError

BACKEND = "NCCL"


class _SymmetricMemory(Comm):
    """Symmetric memory of NCCL; lets its copy engines and symmetric kernels do the collective.

    Raises:
        ArgumentError: Another backend of symmetric memory than NCCL's.
        UnsupportedError: The process group does not communicate through NCCL.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str = BACKEND) -> None:
        if backend != BACKEND:
            raise ArgumentError(f"Symmetric memory is supported for {BACKEND!r}, not {backend!r}.")
        if "nccl" not in str(dist.get_backend_config(group)):
            raise UnsupportedError(
                "Symmetric memory needs a process group of NCCL, but this one has "
                f"{dist.get_backend_config(group)}. Leave set_symm_mem_for_comm out on this device."
            )
        self._group = group
        self._is_connected = False

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """From a pool of symmetric memory, which is used again."""
        if not self._is_connected:
            torch_private.set_symmetric_backend(BACKEND)
            # Ranks meet through the group's communicator, which its first collective makes.
            dist.barrier(group=self._group)
            self._is_connected = True
        with torch.cuda.use_mem_pool(torch_private.symmetric_pool(device)):
            return torch.empty(tuple(size), dtype=dtype, device=device)


class SymmetricAllGather(_SymmetricMemory, DefaultAllGather):
    """The backend's all-gather, in symmetric memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
    ) -> dist.Work | None:
        """Makes the output known to all ranks (the input is a part of it), and gathers."""
        torch_private.meet_in_memory(output_tensor, group)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class SymmetricReduceScatter(_SymmetricMemory, DefaultReduceScatter):
    """The backend's reduce-scatter, in symmetric memory; NCCL does sums only."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
    ) -> dist.Work | None:
        """Makes both buffers known to all ranks, and reduces."""
        torch_private.meet_in_memory(input_tensor, group)
        torch_private.meet_in_memory(output_tensor, group)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)
