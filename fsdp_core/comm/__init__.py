"""Collectives, the groups they run in, and the order in which devices execute them."""

from __future__ import annotations

from fsdp_core.comm.collectives import Collectives, GroupCollectives, LoopbackCollectives
from fsdp_core.comm.lanes import DeviceLanes, HostLanes, Lane, Lanes, Mark, lanes_for
from fsdp_core.comm.ledger import CollectiveLedger, CollectiveListener
from fsdp_core.comm.link import CommLink
from fsdp_core.comm.process_group_memory import ProcessGroupAllGather, ProcessGroupReduceScatter
from fsdp_core.comm.reduction import Reduction
from fsdp_core.comm.roles import MeshRoles
from fsdp_core.comm.strategies import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    ReduceScatter,
)
from fsdp_core.comm.symmetric_memory import SymmetricAllGather, SymmetricReduceScatter
from fsdp_core.comm.ticket import Ticket

__all__ = [
    "AllGather",
    "CollectiveLedger",
    "CollectiveListener",
    "Collectives",
    "CommLink",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "DeviceLanes",
    "GroupCollectives",
    "HostLanes",
    "Lane",
    "Lanes",
    "LoopbackCollectives",
    "Mark",
    "MeshRoles",
    "ProcessGroupAllGather",
    "ProcessGroupReduceScatter",
    "ReduceScatter",
    "Reduction",
    "SymmetricAllGather",
    "SymmetricReduceScatter",
    "Ticket",
    "lanes_for",
]
