"""How a collective is done and where its buffers come from: what users may replace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType


class Comm(ABC):
    """A collective together with the allocation of its buffers."""

    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer of undefined content: new at each call, or one that is used again.

        It is in use until the group's collective has been waited for and its result copied out.
        With prefetch the gathers of two groups are in flight at once, so groups that lend the
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
        async_op: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
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
        """Within this many elements of a row, from its start, large ones may drown small ones.

        1 for an exact reduction. What must not be lost is packed into a stretch of its own.
        """
        return 1

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
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
        async_op: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
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
        async_op: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
    ) -> dist.Work | None:
        """Reduces by `reduce_scatter_single`, which older PyTorch calls `..._tensor`."""
        reduce = _current_name("reduce_scatter_single", "reduce_scatter_tensor")
        return reduce(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _current_name(new: str, old: str) -> Callable[..., dist.Work | None]:
    # PyTorch 2.13 renamed both collectives and warns at the old names; 2.11 has only those.
    function = getattr(dist, new if hasattr(dist, new) else old)
    return cast("Callable[..., dist.Work | None]", function)
