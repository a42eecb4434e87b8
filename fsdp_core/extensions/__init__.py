"""How tensors of other kinds are chunked, gathered and described: the 2D extension system."""

from __future__ import annotations

from fsdp_core.extensions.base import FSDPExtensions
from fsdp_core.extensions.dispatch import (
    _ext_all_gather_dtensor,
    _ext_chunk_dtensor,
    _ext_chunk_tensor,
    _ext_post_unflatten_transform,
    _ext_pre_flatten_transform,
    _ext_pre_load_state_dict_transform,
    _set_fsdp_extensions,
)
from fsdp_core.extensions.dtensor_extensions import DTensorExtensions
from fsdp_core.extensions.low_precision import gather_in_low_precision, is_large_matrix
from fsdp_core.extensions.low_precision_weight import (
    Float8Weight,
    Int8Weight,
    LowPrecisionWeight,
    full_precision,
)

__all__ = [
    "DTensorExtensions",
    "FSDPExtensions",
    "Float8Weight",
    "Int8Weight",
    "LowPrecisionWeight",
    "_ext_all_gather_dtensor",
    "_ext_chunk_dtensor",
    "_ext_chunk_tensor",
    "_ext_post_unflatten_transform",
    "_ext_pre_flatten_transform",
    "_ext_pre_load_state_dict_transform",
    "_set_fsdp_extensions",
    "full_precision",
    "gather_in_low_precision",
    "is_large_matrix",
]
