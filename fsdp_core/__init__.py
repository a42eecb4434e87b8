"""Fully-sharded data parallelism: parameters live as slices and are whole only while they compute.

The names below are loaded on first use (PEP 562), so that a process without torch may import the
engine's arithmetic, `fsdp_core.layout` and `fsdp_core.plan.model`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_core.api import (
        AllGather,
        CPUOffloadPolicy,
        DataParallelMeshDims,
        DDPMeshInfo,
        DTensorExtensions,
        Float8Weight,
        FSDPExtensions,
        FSDPMeshInfo,
        FSDPModule,
        FSDPParam,
        FSDPParamGroup,
        FSDPState,
        HSDPMeshInfo,
        Int8Weight,
        MixedPrecisionPolicy,
        Observer,
        OffloadPolicy,
        Owned,
        QuantizedReduceScatter,
        ReduceScatter,
        ShardedState,
        ShardPlacementResult,
        SharedMemoryPolicy,
        TrainingState,
        UnshardHandle,
        clip_grad_norm_,
        disable_fsdp_module_new_init,
        fully_shard,
        gather_in_low_precision,
        get_cls_to_fsdp_cls,
        observe,
        register_fsdp_forward_method,
        share_comm_ctx,
    )

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "DDPMeshInfo",
    "DTensorExtensions",
    "DataParallelMeshDims",
    "FSDPExtensions",
    "FSDPMeshInfo",
    "FSDPModule",
    "FSDPParam",
    "FSDPParamGroup",
    "FSDPState",
    "Float8Weight",
    "HSDPMeshInfo",
    "Int8Weight",
    "MixedPrecisionPolicy",
    "Observer",
    "OffloadPolicy",
    "Owned",
    "QuantizedReduceScatter",
    "ReduceScatter",
    "ShardPlacementResult",
    "ShardedState",
    "SharedMemoryPolicy",
    "TrainingState",
    "UnshardHandle",
    "clip_grad_norm_",
    "disable_fsdp_module_new_init",
    "fully_shard",
    "gather_in_low_precision",
    "get_cls_to_fsdp_cls",
    "observe",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module("fsdp_core.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
