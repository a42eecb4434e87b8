"""Ranks of one host that exchange tensors through memory which they share."""

from fsdp_core.comm.shared_memory.axis import (
    HostAxes,
    OutBox,
    SharedMemoryAxis,
    elements_of,
    host_axes_of,
)
from fsdp_core.comm.shared_memory.futex import Counters

__all__ = [
    "Counters",
    "HostAxes",
    "OutBox",
    "SharedMemoryAxis",
    "elements_of",
    "host_axes_of",
]
