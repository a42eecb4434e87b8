"""Ranks of one host that exchange tensors through memory which they share."""

from fsdp_core.comm.shared_memory.axis import (
    OutBox,
    SharedMemoryAxis,
    elements_of,
    shared_memory_of,
)
from fsdp_core.comm.shared_memory.futex import Counters

__all__ = ["Counters", "OutBox", "SharedMemoryAxis", "elements_of", "shared_memory_of"]
