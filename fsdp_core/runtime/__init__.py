"""What happens when: hooks, the autograd boundary, and what all units of one root share."""

from __future__ import annotations

from fsdp_core.runtime.fsdp_module import (
    FSDPModule,
    UnshardHandle,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    observe,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fsdp_core.runtime.fsdp_state import FSDPState
from fsdp_core.runtime.grad_clipping import clip_grad_norm_
from fsdp_core.runtime.observer import NullObserver, Observer
from fsdp_core.runtime.sharding import fully_shard

__all__ = [
    "FSDPModule",
    "FSDPState",
    "NullObserver",
    "Observer",
    "UnshardHandle",
    "clip_grad_norm_",
    "disable_fsdp_module_new_init",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "observe",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
