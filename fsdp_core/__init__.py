"""Fully sharded data parallelism: parameters are slices, and whole only during computation.

The names below are loaded on first use (PEP 562), so that a process without torch may import the
engine's arithmetic, `fsdp_core.layout` and `fsdp_core.plan.model`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_core.comm import (
        AllGather,
        DDPMeshInfo,
        FSDPMeshInfo,
        HSDPMeshInfo,
        QuantizedReduceScatter,
        ReduceScatter,
        ShardPlacementResult,
    )
    from fsdp_core.fsdp1 import DTensorExtensions, FSDPExtensions
    from fsdp_core.low_precision import Float8Weight, Int8Weight, gather_in_low_precision
    from fsdp_core.param import FSDPParam, FSDPParamGroup
    from fsdp_core.policy import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
        Owned,
        SharedMemoryPolicy,
    )
    from fsdp_core.runtime import (
        FSDPModule,
        FSDPState,
        Observer,
        UnshardHandle,
        clip_grad_norm_,
        disable_fsdp_module_new_init,
        fully_shard,
        get_cls_to_fsdp_cls,
        observe,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from fsdp_core.states import ShardedState, TrainingState

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


_OWNERS = ("runtime", "param", "comm", "policy", "states", "low_precision", "fsdp1")
"""Modules that own a public name, the one that imports the others first."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    owners = (importlib.import_module(f"{__name__}.{owner}") for owner in _OWNERS)
    value: object = next(getattr(owner, name) for owner in owners if hasattr(owner, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
