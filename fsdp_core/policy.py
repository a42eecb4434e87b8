"""What the user decides once per unit: precision and where the slices live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of one unit. Sharded parameters, gradients and optimizer state keep the original.

    Attributes:
        param_dtype: Of the unsharded parameter, so of the all-gather and the computation.
            None, or the original dtype, means no cast.
        reduce_dtype: Of the reduce-scatter, and of gradients accumulated without a reduction.
            None, or `param_dtype`, means the dtype in which autograd produced them.
        output_dtype: To which floating-point forward outputs are cast. None leaves them.
        cast_forward_inputs: Whether floating-point forward inputs are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """Slices stay on the mesh's device. Base of the policies that move them."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Slices, their gradients and optimizer state live in host memory.

    Attributes:
        pin_memory: Whether that memory is page-locked, which lets copies overlap computation.
    """

    pin_memory: bool = True
