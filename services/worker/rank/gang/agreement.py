"""Step agreement: an order that reaches one rank takes effect at one step on all of them.

Each step starts a MAX all-reduce of three small integers while it computes, and reads the result at
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
    """What all ranks do at this step's end: checkpoint, or stop, or one after the other.

    ``trace``: some rank begins or ends to record, and the others wait for it.
    """

    checkpoint: bool
    stop: bool
    trace: bool = False


class Proposal:
    """An agreement in flight.

    Args:
        wishes: The reduction of three integers: checkpoint, stop, trace.
    """

    def __init__(self, wishes: PendingReduction) -> None:
        self._wishes = wishes

    def outcome(self) -> Agreed:
        """Waits for all ranks' wishes."""
        checkpoint, stop, trace = self._wishes.wait().tolist()
        return Agreed(checkpoint=bool(checkpoint), stop=bool(stop), trace=bool(trace))


def propose(orders: Sequence[RankOrder], control: ControlChannel, *, trace: bool) -> Proposal:
    """Starts the agreement on whatever any rank's agent has asked for since the last one.

    Args:
        orders: What this rank's own has.
        control: Among all ranks.
        trace: Whether this rank begins or ends to record at the step's end.
    """
    checkpoint, stop = (any(o.checkpoint for o in orders), any(o.stop for o in orders))
    wishes = torch.tensor([checkpoint, stop, trace], dtype=torch.int32)
    return Proposal(control.all_reduce(wishes, dist.ReduceOp.MAX))
