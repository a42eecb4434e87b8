"""What all ranks know at one step: what any of them was asked, and what one of them found.

An order that reaches one rank takes effect at one step on all of them. Each step starts a MAX
all-reduce of three small integers while it computes, and reads the result at its end. All ranks read
the same numbers at the same step boundary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from services.contract.messages.rank_pipe import RankOrder
from services.worker.rank.gang.control import ControlChannel, PendingReduction
from services.worker.rank.gang.groups import Gang

_TOLD_BYTES: Final = 1_024


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
        requests: The reduction of three integers: checkpoint, stop, trace.
    """

    def __init__(self, requests: PendingReduction) -> None:
        self._requests = requests

    def outcome(self) -> Agreed:
        """Waits for all ranks' requests."""
        checkpoint, stop, trace = self._requests.wait().tolist()
        return Agreed(checkpoint=bool(checkpoint), stop=bool(stop), trace=bool(trace))


def propose(orders: Sequence[RankOrder], control: ControlChannel, *, trace: bool) -> Proposal:
    """Starts the agreement on whatever any rank's agent has asked for since the last one.

    Args:
        orders: What this rank's own has.
        control: Among all ranks.
        trace: Whether this rank begins or ends to record at the step's end.
    """
    checkpoint, stop = (any(o.checkpoint for o in orders), any(o.stop for o in orders))
    requests = torch.tensor([checkpoint, stop, trace], dtype=torch.int32)
    return Proposal(control.all_reduce(requests, dist.ReduceOp.MAX))


def first_told(gang: Gang, found: str | None) -> str | None:
    """What the lowest rank found that found anything; None: none did. All ranks call it.

    Args:
        gang: The ranks.
        found: By this rank; of a long text the first 1024 bytes are told.
    """
    teller = torch.tensor([gang.world_size if found is None else gang.rank])
    first = int(gang.control.all_reduce(teller, dist.ReduceOp.MIN).wait())
    if first == gang.world_size:
        return None
    told = torch.zeros(_TOLD_BYTES, dtype=torch.int32)
    if found is not None and first == gang.rank:
        text = found.encode(errors="backslashreplace")[:_TOLD_BYTES]
        told[: len(text)] = torch.tensor(list(text), dtype=torch.int32)
    heard = gang.control.all_reduce(told, dist.ReduceOp.MAX).wait()
    return bytes(heard.tolist()).rstrip(b"\0").decode(errors="replace")
