"""What users import; the same names at the top of the package."""

from __future__ import annotations

from fsdp_core.api.forward_method import register_fsdp_forward_method
from fsdp_core.api.grad_clipping import clip_grad_norm_
from fsdp_core.api.observation import observe
from fsdp_core.api.share_context import share_comm_ctx
from fsdp_core.comm import (
    AllGather,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    QuantizedReduceScatter,
    ReduceScatter,
    ShardPlacementResult,
)
from fsdp_core.extensions import (
    DTensorExtensions,
    Float8Weight,
    FSDPExtensions,
    Int8Weight,
    gather_in_low_precision,
)
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
    disable_fsdp_module_new_init,
    fully_shard,
    get_cls_to_fsdp_cls,
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
