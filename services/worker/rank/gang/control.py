"""Small CPU tensors among all ranks, beside the engine's collectives, and counted as they are."""

from typing import Final, Protocol

import torch
import torch.distributed as dist

CONTROL_GROUP: Final = "control"


class CollectiveListener(Protocol):
    """Told of every collective, as the engine's observer is."""

    def on_issue(self, group: str, sequence: int) -> None:
        """Collective number ``sequence`` of ``group`` was started."""
        ...

    def on_complete(self, group: str, sequence: int) -> None:
        """It was waited for."""
        ...


class PendingReduction:
    """An all-reduce in flight.

    Args:
        work: The backend's.
        tensor: Reduced in place.
        sequence: Its number in the group.
        listener: Told when it was waited for.
    """

    def __init__(
        self, work: dist.Work, tensor: torch.Tensor, sequence: int, listener: CollectiveListener
    ) -> None:
        self._work = work
        self._tensor = tensor
        self._sequence = sequence
        self._listener = listener

    def wait(self) -> torch.Tensor:
        """The reduced tensor, the same on all ranks.

        Raises:
            RuntimeError: A rank is gone.
        """
        self._work.wait()
        self._listener.on_complete(CONTROL_GROUP, self._sequence)
        return self._tensor


class ControlChannel:
    """A gloo group over all ranks.

    It is a group of its own, because collectives of one group must be started in one order on all
    ranks, and these run while the engine's come and go.

    Args:
        group: The group.
        listener: Told of each collective.
    """

    def __init__(self, group: dist.ProcessGroup, listener: CollectiveListener) -> None:
        self._group = group
        self._listener = listener
        self._sequence = 0

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> PendingReduction:
        """Starts to reduce ``tensor`` (on the CPU) in place; all ranks call in the same order."""
        work = dist.all_reduce(tensor, op, group=self._group, async_op=True)
        if work is None:
            raise RuntimeError("this process is not in the control group")
        self._sequence += 1
        self._listener.on_issue(CONTROL_GROUP, self._sequence)
        return PendingReduction(work, tensor, self._sequence, self._listener)

    def agree_on(self, value: bytes) -> bool:
        """Whether every rank passed the same ``value``, which is as long on each."""
        low = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(torch.int32)
        high = low.clone()
        lowest = self.all_reduce(low, dist.ReduceOp.MIN).wait()
        return torch.equal(lowest, self.all_reduce(high, dist.ReduceOp.MAX).wait())

    def meet(self) -> None:
        """Waits until every rank is here.

        Raises:
            RuntimeError: A rank is gone.
        """
        self.all_reduce(torch.zeros(1)).wait()
