"""What the reference's setters write and the phases read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class UnitOptions:
    """The one configuration object of a unit; read at phase boundaries, so a change counts then.

    What concerns the communication of a group is in `GroupOptions`.

    Attributes:
        reshard_after_forward: None means yes, except for the root.
        reshard_after_backward: False keeps the whole parameters over microbatches.
        reduce_grads: False accumulates whole gradients without communication.
        unshard_in_backward: False if backward does not read the parameters (an embedding).
        unshard_inline: Whether forward and backward gather on the current stream.
        max_reduces: Reductions in flight besides the one being packed; the largest of the
            root's units counts.
        is_last_backward: Read from the root: whether the end of backward forgets the order of
            prefetching, and has the compute lane wait for the gradients.
        post_optim_event: Read from the root, once: gathers of the next forward follow it
            instead of everything on the current stream.
    """

    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    reduce_grads: bool = True
    unshard_in_backward: bool = True
    unshard_inline: bool = False
    max_reduces: int = 1
    is_last_backward: bool = True
    post_optim_event: torch.Event | None = None
