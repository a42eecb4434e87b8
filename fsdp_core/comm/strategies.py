"""Collectives and the allocation of their buffers, which users may replace."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist

from fsdp_core import torch_private
from fsdp_core.errors import ArgumentError, UnsupportedError

SYMMETRIC_BACKEND = "NCCL"

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType


class Comm(ABC):
    """A collective together with the allocation of its buffers."""

    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer of undefined content: new at each call, or one that is used again.

        It is in use until the group's collective has been waited for and its result copied out.
        With prefetch the gathers of two groups are in flight at once, so groups that use the
        same memory again need a strategy each.
        """


class AllGather(Comm):
    """Fills a buffer with the contributions of all ranks, in rank order."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers.

        Args:
            output_tensor: 1D, ranks * n elements, from `allocate`.
            input_tensor: 1D, n elements: this rank's row of `output_tensor` itself.
            group: Ranks that take part.
            async_op: Whether to return a work object instead of waiting.

        Returns:
            Waited for exactly once; None if the result is there.
        """


class ReduceScatter(Comm):
    """Reduces a buffer over ranks and leaves each rank its row."""

    @property
    def granularity(self) -> int:
        """Elements of a row, counted from its start, that share a rounding error.

        1 for an exact reduction. Beside a large value a small one may be rounded to zero, so flags are
        packed into a block of their own.
        """
        return 1

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces.

        Args:
            output_tensor: 1D, n elements, from `allocate`.
            input_tensor: 1D, ranks * n elements, from `allocate`.
            group: Ranks that take part.
            op: Sum, mean or scaled sum.
            async_op: Whether to return a work object instead of waiting.

        Returns:
            Waited for exactly once; None if the result is there.
        """


class OrdinaryMemory(Comm):
    """Buffers that are new at each call."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """From PyTorch's own allocator."""
        return torch.empty(tuple(size), dtype=dtype, device=device)


class DefaultAllGather(OrdinaryMemory, AllGather):
    """The backend's all-gather.

    The function is looked up on `torch.distributed` at each call, so that users can wrap it.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers by `all_gather_single`, which older PyTorch calls `all_gather_into_tensor`."""
        gather = _current_name("all_gather_single", "all_gather_into_tensor")
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class DefaultReduceScatter(OrdinaryMemory, ReduceScatter):
    """The backend's reduce-scatter, looked up in the same way."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces by `reduce_scatter_single`, which older PyTorch calls `..._tensor`."""
        reduce = _current_name("reduce_scatter_single", "reduce_scatter_tensor")
        return reduce(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


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


class _SymmetricMemory(Comm):
    """Symmetric memory of NCCL; lets its copy engines and symmetric kernels do the collective.

    Raises:
        ArgumentError: Another backend of symmetric memory than NCCL's.
        UnsupportedError: The process group does not communicate through NCCL.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str = SYMMETRIC_BACKEND) -> None:
        if backend != SYMMETRIC_BACKEND:
            raise ArgumentError(
                f"Symmetric memory is supported for {SYMMETRIC_BACKEND!r}, not {backend!r}."
            )
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
            torch_private.set_symmetric_backend(SYMMETRIC_BACKEND)
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
        async_op: bool = False,
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
        async_op: bool = False,
    ) -> dist.Work | None:
        """Makes both buffers known to all ranks, and reduces."""
        torch_private.meet_in_memory(input_tensor, group)
        torch_private.meet_in_memory(output_tensor, group)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def _current_name(new: str, old: str) -> Callable[..., dist.Work | None]:
    # PyTorch 2.13 renamed both collectives and warns at the old names; 2.11 has only those.
    function = getattr(dist, new if hasattr(dist, new) else old)
    return cast("Callable[..., dist.Work | None]", function)
