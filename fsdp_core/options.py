"""What a call of `fully_shard` and the setters decide; whoever acts on it reads it here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Shard

from fsdp_core.comm import ShardPlacementResult
from fsdp_core.policy import Owned

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from fsdp_core.comm import AllGather, ReduceScatter
    from fsdp_core.policy import MixedPrecisionPolicy, OffloadPolicy, SharedMemoryPolicy


PlacementFn = Callable[[nn.Parameter], Shard | Owned | ShardPlacementResult | None]


@dataclass(frozen=True)
class ShardingOptions:
    """What a call of `fully_shard` says about its parameters.

    Attributes:
        mp_policy: Dtypes.
        offload: Whether slices and their gradients live in host memory.
        reshard_to: Ranks of the smaller mesh that forward reshards to, if any.
        placement_of: See `fully_shard`.
        shared_memory: See `fully_shard`.
    """

    mp_policy: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard_to: int | None = None
    placement_of: PlacementFn | None = None
    shared_memory: SharedMemoryPolicy | None = None


@dataclass
class GroupOptions:
    """What the setters decide about a group's communication; read where a phase begins, so a change counts then.

    Attributes:
        all_gather: Replaces the collective and the allocation of its buffer; None: the default.
        reduce_scatter: The same for gradients.
        reduce_group: Process group of the reduce-scatter; None: that of the all-gather.
        all_reduce_grads: Whether replicas average; False keeps the partial sums (HSDP).
        all_reduce_hook: Called with the reduced gradients, 1D, before they are divided and cast.
        all_reduce_hook_stream: Stream for the hook; None: the stream of all-reduces.
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


@dataclass
class UnitOptions:
    """What the setters decide about a unit; read where a phase begins, so a change counts then.

    Attributes:
        reshard_after_forward: None means yes, except for the root.
        reshard_after_backward: False keeps the whole parameters over microbatches.
        reduce_grads: False accumulates whole gradients without communication.
        unshard_in_backward: False if backward does not read the parameters (an embedding).
        unshard_inline: Whether forward and backward gather on the current stream.
        max_reduces: Reductions in flight besides the one being packed; the largest of the
            root's units counts.
        is_last_backward: Read from the root: whether the end of backward forgets the order of
            prefetching, and has the compute stream wait for the gradients.
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
