"""Collectives, the groups they run in, and the order in which devices execute them."""

from __future__ import annotations

from fsdp_core.comm.block_code import DEFAULT_BLOCK_SIZE, SCALE_DTYPE, BlockCode
from fsdp_core.comm.collectives import (
    Collectives,
    GroupCollectives,
    LoopbackCollectives,
    collectives_on,
)
from fsdp_core.comm.desync import keep_step
from fsdp_core.comm.lanes import (
    DeviceLanes,
    HostLanes,
    Lane,
    Lanes,
    Mark,
    Streams,
    lanes_for,
)
from fsdp_core.comm.ledger import CollectiveLedger, CollectiveListener
from fsdp_core.comm.link import CommLink, Lent
from fsdp_core.comm.mesh_info import (
    Axis,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    mesh_info_of,
    post_forward_mesh_info,
    resolve_placement,
)
from fsdp_core.comm.owned import Owned
from fsdp_core.comm.process_group_memory import ProcessGroupAllGather, ProcessGroupReduceScatter
from fsdp_core.comm.quantized_reduce import QuantizedReduceScatter
from fsdp_core.comm.reduction import Reduction
from fsdp_core.comm.shared_memory import (
    Counters,
    OutBox,
    SharedMemoryAxis,
    elements_of,
    shared_memory_of,
)
from fsdp_core.comm.strategies import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    ReduceScatter,
)
from fsdp_core.comm.symmetric_memory import SymmetricAllGather, SymmetricReduceScatter
from fsdp_core.comm.ticket import Ticket

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "SCALE_DTYPE",
    "AllGather",
    "Axis",
    "BlockCode",
    "CollectiveLedger",
    "CollectiveListener",
    "Collectives",
    "CommLink",
    "Counters",
    "DDPMeshInfo",
    "DataParallelMeshInfo",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "DeviceLanes",
    "FSDPMeshInfo",
    "GroupCollectives",
    "HSDPMeshInfo",
    "HostLanes",
    "Lane",
    "Lanes",
    "Lent",
    "LoopbackCollectives",
    "Mark",
    "OutBox",
    "Owned",
    "ProcessGroupAllGather",
    "ProcessGroupReduceScatter",
    "QuantizedReduceScatter",
    "ReduceScatter",
    "Reduction",
    "ShardPlacementResult",
    "SharedMemoryAxis",
    "Streams",
    "SymmetricAllGather",
    "SymmetricReduceScatter",
    "Ticket",
    "collectives_on",
    "elements_of",
    "keep_step",
    "lanes_for",
    "mesh_info_of",
    "post_forward_mesh_info",
    "resolve_placement",
    "shared_memory_of",
]
