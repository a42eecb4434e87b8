"""Where elements lie, in integers: chunks, slices, boxes, packed buffers. Imports no torch."""

from __future__ import annotations

from fsdp_core.layout.box import Box, check_tiling
from fsdp_core.layout.chunking import Chunking
from fsdp_core.layout.owning import OwnedPacking, balanced_owners
from fsdp_core.layout.packing import Packing, View, aligned, are_left_in_rows
from fsdp_core.layout.slicing import Slicing

__all__ = [
    "Box",
    "Chunking",
    "OwnedPacking",
    "Packing",
    "Slicing",
    "View",
    "aligned",
    "are_left_in_rows",
    "balanced_owners",
    "check_tiling",
]
