"""Collectives, the groups they run in, and the order in which devices execute them."""

from __future__ import annotations

from fsdp_core.comm.block_code import DEFAULT_BLOCK_SIZE, SCALE_DTYPE, BlockCode
from fsdp_core.comm.collectives import (
    Collectives,
    GroupCollectives,
    LoopbackCollectives,
    collectives_on,
)
from fsdp_core.comm.context import CommContext, InFlightReduction
from fsdp_core.comm.desync import amount, in_step, wait_in_step
from fsdp_core.comm.hostwise import HostwiseCollectives
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
from fsdp_core.comm.quantized_reduce import QuantizedReduceScatter
from fsdp_core.comm.reduction import Reduction
from fsdp_core.comm.shared_memory import (
    Counters,
    HostAxes,
    OutBox,
    SharedMemoryAxis,
    elements_of,
    host_axes_of,
)
from fsdp_core.comm.strategies import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllGather,
    ProcessGroupReduceScatter,
    ReduceScatter,
    SymmetricAllGather,
    SymmetricReduceScatter,
)
from fsdp_core.comm.streams import (
    DeviceStreams,
    Event,
    HostStreams,
    Stream,
    Streams,
    streams_for,
)
from fsdp_core.comm.ticket import Ticket

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "SCALE_DTYPE",
    "AllGather",
    "Axis",
    "BlockCode",
    "Collectives",
    "CommContext",
    "Counters",
    "DDPMeshInfo",
    "DataParallelMeshInfo",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "DeviceStreams",
    "Event",
    "FSDPMeshInfo",
    "GroupCollectives",
    "HSDPMeshInfo",
    "HostAxes",
    "HostStreams",
    "HostwiseCollectives",
    "InFlightReduction",
    "LoopbackCollectives",
    "OutBox",
    "ProcessGroupAllGather",
    "ProcessGroupReduceScatter",
    "QuantizedReduceScatter",
    "ReduceScatter",
    "Reduction",
    "ShardPlacementResult",
    "SharedMemoryAxis",
    "Stream",
    "Streams",
    "SymmetricAllGather",
    "SymmetricReduceScatter",
    "Ticket",
    "amount",
    "collectives_on",
    "elements_of",
    "host_axes_of",
    "in_step",
    "mesh_info_of",
    "post_forward_mesh_info",
    "resolve_placement",
    "streams_for",
    "wait_in_step",
]
