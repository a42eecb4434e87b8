"""Parameters: as a slice, as a whole, and the group that communicates together."""

from __future__ import annotations

from fsdp_core.param.fsdp_param import FSDPParam
from fsdp_core.param.naming import name_from_root
from fsdp_core.param.owned_param import OwnedParam, owned_over
from fsdp_core.param.ownership import Charge, charge_of, claim
from fsdp_core.param.param_group import FSDPParamGroup
from fsdp_core.param.reduce import PendingReduce
from fsdp_core.param.slot import ParamSlot, find_slots

__all__ = [
    "Charge",
    "FSDPParam",
    "FSDPParamGroup",
    "OwnedParam",
    "ParamSlot",
    "PendingReduce",
    "charge_of",
    "claim",
    "find_slots",
    "name_from_root",
    "owned_over",
]
