"""The two collectives of sharded training, over a process group or over one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class Collectives(Protocol):
    """Asynchronous collectives of one group.

    A returned work object is waited for exactly once; None means the result is already there.
    """

    @property
    def name(self) -> str:
        """Under which name the group's collectives are counted."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    @property
    def rank(self) -> int:
        """This process's place in the group."""

    def all_gather(self, output: torch.Tensor, contribution: torch.Tensor) -> dist.Work | None:
        """Fills `output` (1D, size * n) from all ranks.

        `contribution` (1D, n) is this rank's row of `output` itself, already written.
        """

    def reduce_scatter(
        self, output: torch.Tensor, contribution: torch.Tensor, op: dist.ReduceOp.RedOpType
    ) -> dist.Work | None:
        """Reduces `contribution` (1D, size * n) over ranks; `output` (1D, n) gets this row."""


class GroupCollectives:
    """Collectives of a `torch.distributed` process group.

    The functions are looked up on the `torch.distributed` module at each call, so that users
    can wrap them.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self._name = name
        self._group = group

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

    def all_gather(self, output: torch.Tensor, contribution: torch.Tensor) -> dist.Work | None:
        """Gathers by `all_gather_single`, which older PyTorch calls `all_gather_into_tensor`."""
        gather = _current_name("all_gather_single", "all_gather_into_tensor")
        return gather(output, contribution, group=self._group, async_op=True)

    def reduce_scatter(
        self, output: torch.Tensor, contribution: torch.Tensor, op: dist.ReduceOp.RedOpType
    ) -> dist.Work | None:
        """Reduces by `reduce_scatter_single`, which older PyTorch calls `..._tensor`."""
        reduce = _current_name("reduce_scatter_single", "reduce_scatter_tensor")
        return reduce(output, contribution, op=op, group=self._group, async_op=True)


class LoopbackCollectives:
    """A group of one rank: what would travel is already here."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """Name of the mesh axis."""
        return self._name

    @property
    def size(self) -> int:
        """One."""
        return 1

    @property
    def rank(self) -> int:
        """Zero."""
        return 0

    def all_gather(self, output: torch.Tensor, contribution: torch.Tensor) -> dist.Work | None:
        """Nothing to do: the contribution is the whole output."""
        del output, contribution
        return None

    def reduce_scatter(
        self, output: torch.Tensor, contribution: torch.Tensor, op: dist.ReduceOp.RedOpType
    ) -> dist.Work | None:
        """Copies: the sum and the mean of one summand are the summand."""
        del op
        output.copy_(contribution)
        return None


def _current_name(new: str, old: str) -> Callable[..., dist.Work | None]:
    # PyTorch 2.13 renamed both collectives and warns at the old names; 2.11 has only those.
    function = getattr(dist, new if hasattr(dist, new) else old)
    return cast("Callable[..., dist.Work | None]", function)
