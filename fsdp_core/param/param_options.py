"""What is decided once about every parameter of a group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsdp_core.policy import MixedPrecisionPolicy, OffloadPolicy

if TYPE_CHECKING:
    from fsdp_core.comm import FSDPMeshInfo


@dataclass(frozen=True)
class ParamOptions:
    """Precision, and where slices live.

    Attributes:
        policy: Dtypes.
        offload: Whether slices and their gradients live in host memory.
        post_forward: The smaller mesh that slices are kept for between forward and backward.
    """

    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    post_forward: FSDPMeshInfo | None = None
