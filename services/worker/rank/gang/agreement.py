"""Step agreement: an order that reaches one rank takes effect at one step on all of them.

Each step starts a MAX all-reduce of two small integers while it computes, and reads the result at
its end. All ranks read the same numbers at the same step boundary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from services.contract.messages.rank_pipe import RankOrder
from services.worker.rank.gang.control import ControlChannel, PendingReduction


@dataclass(frozen=True)
class Agreed:
    """What all ranks do at this step's end: checkpoint, or stop, or one after the other."""

    checkpoint: bool
    stop: bool


class Proposal:
    """An agreement in flight.

    Args:
        wishes: The reduction of two integers: checkpoint, stop.
    """

    def __init__(self, wishes: PendingReduction) -> None:
        self._wishes = wishes

    def outcome(self) -> Agreed:
        """Waits for all ranks' wishes."""
        checkpoint, stop = self._wishes.wait().tolist()
        return Agreed(checkpoint=bool(checkpoint), stop=bool(stop))


def propose(orders: Sequence[RankOrder], control: ControlChannel) -> Proposal:
    """Starts the agreement on whatever any rank's agent has asked for since the last one.

    Args:
        orders: What this rank's own has.
        control: Among all ranks.
    """
    wishes = torch.tensor(
        [any(order.checkpoint for order in orders), any(order.stop for order in orders)],
        dtype=torch.int32,
    )
    return Proposal(control.all_reduce(wishes, dist.ReduceOp.MAX))
