"""Parameters: as a slice, as a whole, and the group that communicates together."""

from __future__ import annotations

from fsdp_core.param.fsdp_param import FSDPParam
from fsdp_core.param.grouping import UnitGroups, group_params
from fsdp_core.param.owned import OwnedParam, owned_over
from fsdp_core.param.param_group import FSDPParamGroup
from fsdp_core.param.reduce import PendingReduce

__all__ = [
    "FSDPParam",
    "FSDPParamGroup",
    "OwnedParam",
    "PendingReduce",
    "UnitGroups",
    "group_params",
    "owned_over",
]
