"""How flat-parameter FSDP (FSDP1) chunks, gathers and describes tensor-parallel DTensors."""

from __future__ import annotations

from fsdp_core.fsdp1.base import FSDPExtensions
from fsdp_core.fsdp1.dispatch import (
    _ext_all_gather_dtensor,
    _ext_chunk_dtensor,
    _ext_chunk_tensor,
    _ext_post_unflatten_transform,
    _ext_pre_flatten_transform,
    _ext_pre_load_state_dict_transform,
    _set_fsdp_extensions,
)
from fsdp_core.fsdp1.dtensor_extensions import DTensorExtensions

__all__ = [
    "DTensorExtensions",
    "FSDPExtensions",
    "_ext_all_gather_dtensor",
    "_ext_chunk_dtensor",
    "_ext_chunk_tensor",
    "_ext_post_unflatten_transform",
    "_ext_pre_flatten_transform",
    "_ext_pre_load_state_dict_transform",
    "_set_fsdp_extensions",
]
