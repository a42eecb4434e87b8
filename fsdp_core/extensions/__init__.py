"""How tensors of other kinds are chunked, gathered and described: the 2D extension system."""

from __future__ import annotations

from fsdp_core.extensions.low_precision import gather_in_low_precision, is_large_matrix
from fsdp_core.extensions.low_precision_weight import (
    Float8Weight,
    Int8Weight,
    LowPrecisionWeight,
    full_precision,
)

__all__ = [
    "Float8Weight",
    "Int8Weight",
    "LowPrecisionWeight",
    "full_precision",
    "gather_in_low_precision",
    "is_large_matrix",
]
