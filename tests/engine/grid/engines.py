"""The two engines under comparison, by the names that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import fsdp_core


@dataclass(frozen=True)
class Engine:
    """What a training script imports.

    Attributes:
        fully_shard: The verb.
        precision: `MixedPrecisionPolicy`.
        offload: `CPUOffloadPolicy`.
        packs_as_reference: Whether to ask ours for the reference's packing order.
    """

    fully_shard: Callable[..., Any]
    precision: Callable[..., Any]
    offload: Callable[..., Any]
    packs_as_reference: bool = False


OURS = Engine(fsdp_core.fully_shard, fsdp_core.MixedPrecisionPolicy, fsdp_core.CPUOffloadPolicy)
OURS_PACKED_AS_REFERENCE = Engine(
    fsdp_core.fully_shard,
    fsdp_core.MixedPrecisionPolicy,
    fsdp_core.CPUOffloadPolicy,
    packs_as_reference=True,
)


def ours_in(memory: fsdp_core.SharedMemoryPolicy) -> Engine:
    """Ours between ranks that share memory."""
    return Engine(
        partial(fsdp_core.fully_shard, shared_memory=memory),
        fsdp_core.MixedPrecisionPolicy,
        fsdp_core.CPUOffloadPolicy,
    )


def reference() -> Engine:
    """PyTorch's, loaded only in the ranks that compare with it."""
    from torch.distributed import fsdp  # noqa: PLC0415 - only the oracle may load it

    return Engine(fsdp.fully_shard, fsdp.MixedPrecisionPolicy, fsdp.CPUOffloadPolicy)
