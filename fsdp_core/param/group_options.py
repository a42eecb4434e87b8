"""What the setters decide about a group's communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    import torch.distributed as dist

    from fsdp_core.comm import AllGather, ReduceScatter


@dataclass
class GroupOptions:
    """The one configuration object of a group; read at phase boundaries, so a change counts then.

    Attributes:
        all_gather: Replaces the collective and the allocation of its buffer; None: the default.
        reduce_scatter: The same for gradients.
        reduce_group: Process group of the reduce-scatter; None: that of the all-gather.
        all_reduce_grads: Whether replicas average; False keeps the partial sums (HSDP).
        all_reduce_hook: Called with the reduced gradients, 1D, before they are divided and cast.
        all_reduce_hook_stream: Stream for the hook; None: the lane of all-reduces.
        divide_factor: Gradients are divided by it instead of by the number of ranks.
        force_sum: Only sums travel, and divisions are separate.
        reduce_unused: Trainable parameters without a gradient take part with zeros, and get them.
        agree_on_unused: They take part, and get a gradient if any rank had one. False packs only
            what has a gradient here, as the reference does; ranks must then use the same.
        reshards_to_smaller_mesh: Whether an integer `reshard_after_forward` is still in force.
    """

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    reduce_group: dist.ProcessGroup | None = None
    all_reduce_grads: bool = True
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: torch.Stream | None = None
    divide_factor: float | None = None
    force_sum: bool = False
    reduce_unused: bool = False
    agree_on_unused: bool = True
    reshards_to_smaller_mesh: bool = True
