"""What the reference's setters write and the phases read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class UnitOptions:
    """The one configuration object of a unit; read at phase boundaries, so a change counts then.

    Attributes:
        reshard_after_forward: None means yes, except for the root.
        reshard_after_backward: False keeps the whole parameters over microbatches.
        reduce_grads: False accumulates whole gradients without communication.
        unshard_in_backward: False if backward does not read the parameters (an embedding).
        is_last_backward: Read from the root: whether the end of backward waits for reductions
            and forgets the order of prefetching.
    """

    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    reduce_grads: bool = True
    unshard_in_backward: bool = True
    is_last_backward: bool = True
