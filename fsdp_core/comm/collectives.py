"""The collectives of sharded training on one mesh axis: over a process group, or over one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from fsdp_core.comm.desync import with_time_out
from fsdp_core.comm.strategies import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    ReduceOp,
    ReduceScatter,
)

if TYPE_CHECKING:
    from fsdp_core.comm.mesh_info import Axis

by_group_on_one_rank = False
"""Whether an axis of one rank communicates by its process group all the same. Only tests set it, so that one
accelerator suffices to run its backend."""

_ALL_GATHER = DefaultAllGather()
_REDUCE_SCATTER = DefaultReduceScatter()


class Collectives(Protocol):
    """Collectives of one axis, which the host does not wait for.

    On a stream (`on_stream`) they are work of the current one, like any kernel. Else, on a host backend for
    example, they run beside it. A returned work object is waited for exactly once; None means that the
    result is already there, or is on its way on the current stream.
    """

    @property
    def name(self) -> str:
        """Under which name the axis's collectives are counted."""

    @property
    def size(self) -> int:
        """Ranks along the axis."""

    @property
    def rank(self) -> int:
        """This process's place along the axis."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Whose ranks must keep step; None where there is but one."""

    def scales_sums(self, device: torch.device) -> bool:
        """Whether a reduce-scatter on `device` can multiply summands by a factor itself."""

    def gather_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """1D memory for the output of a gather."""

    def all_gather(
        self, output: torch.Tensor, contribution: torch.Tensor, *, on_stream: bool
    ) -> dist.Work | None:
        """Fills `output` (1D, size * n) from all ranks.

        `contribution` (1D, n) is this rank's row of `output` itself, already written.
        """

    def reduce_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """1D memory for either side of a reduce-scatter."""

    def reduce_scatter(
        self, output: torch.Tensor, contribution: torch.Tensor, op: ReduceOp, *, on_stream: bool
    ) -> dist.Work | None:
        """Reduces `contribution` (1D, size * n) over ranks; `output` (1D, n) gets this row."""

    def all_reduce(
        self, buffer: torch.Tensor, op: ReduceOp, *, on_stream: bool
    ) -> dist.Work | None:
        """Reduces `buffer` over ranks in place; every rank gets the whole."""


class GroupCollectives:
    """Collectives of a `torch.distributed` process group.

    Args:
        name: Name of the axis.
        group: Ranks along it.
        all_gather: How to gather, and from which memory; None: the backend's way.
        reduce_scatter: The same for reductions.
        reduce_group: Another group of the same ranks, for the reduce-scatter alone.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        *,
        all_gather: AllGather | None = None,
        reduce_scatter: ReduceScatter | None = None,
        reduce_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._name = name
        self._group = group
        self._reduce_group = reduce_group or group
        self._gather = all_gather or _ALL_GATHER
        self._reduce = reduce_scatter or _REDUCE_SCATTER

    @property
    def name(self) -> str:
        """Name of the mesh axis."""
        return self._name

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self._group.size()

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._group.rank()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """That of gathers and all-reduces."""
        return self._group

    def scales_sums(self, device: torch.device) -> bool:
        """Only NCCL does, among several ranks; a strategy of the user's need not know of it."""
        if self._reduce is not _REDUCE_SCATTER or device.type != "cuda" or self.size == 1:
            return False
        return "nccl" in str(dist.get_backend_config(self._reduce_group))

    def gather_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """From the strategy."""
        return self._gather.allocate((numel,), dtype=dtype, device=device)

    def all_gather(
        self, output: torch.Tensor, contribution: torch.Tensor, *, on_stream: bool
    ) -> dist.Work | None:
        """By the strategy."""
        return self._gather(output, contribution, self._group, async_op=not on_stream)

    def reduce_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """From the strategy."""
        return self._reduce.allocate((numel,), dtype=dtype, device=device)

    def reduce_scatter(
        self, output: torch.Tensor, contribution: torch.Tensor, op: ReduceOp, *, on_stream: bool
    ) -> dist.Work | None:
        """By the strategy."""
        work = self._reduce(output, contribution, self._reduce_group, op, async_op=not on_stream)
        return None if work is None else with_time_out(work, self._group, output.device)

    def all_reduce(
        self, buffer: torch.Tensor, op: ReduceOp, *, on_stream: bool
    ) -> dist.Work | None:
        """By the backend."""
        work: dist.Work | None = dist.all_reduce(
            buffer, op=op, group=self._group, async_op=not on_stream
        )
        return work


class LoopbackCollectives:
    """An axis of one rank: what would travel is already here."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """Name of the mesh axis."""
        return self._name

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Always None: nobody can fall out of step."""
        return None

    def scales_sums(self, device: torch.device) -> bool:
        """There is nothing to sum."""
        del device
        return False

    def gather_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(
        self, output: torch.Tensor, contribution: torch.Tensor, *, on_stream: bool
    ) -> dist.Work | None:
        """Nothing to do: the contribution is the whole output."""
        del output, contribution, on_stream
        return None

    def reduce_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(numel, dtype=dtype, device=device)

    def reduce_scatter(
        self, output: torch.Tensor, contribution: torch.Tensor, op: ReduceOp, *, on_stream: bool
    ) -> dist.Work | None:
        """Copies: the sum and the mean of one summand are the summand."""
        del op, on_stream
        output.copy_(contribution)
        return None

    def all_reduce(
        self, buffer: torch.Tensor, op: ReduceOp, *, on_stream: bool
    ) -> dist.Work | None:
        """Nothing to do."""
        del buffer, op, on_stream
        return None


def collectives_on(
    axis: Axis,
    *,
    all_gather: AllGather | None = None,
    reduce_scatter: ReduceScatter | None = None,
    reduce_group: dist.ProcessGroup | None = None,
) -> Collectives:
    """The collectives that suit `axis`; see `GroupCollectives` for the choices."""
    if axis.group is None or (axis.size == 1 and not by_group_on_one_rank):
        return LoopbackCollectives(axis.name)
    return GroupCollectives(
        axis.name,
        axis.group,
        all_gather=all_gather,
        reduce_scatter=reduce_scatter,
        reduce_group=reduce_group,
    )
