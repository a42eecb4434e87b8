"""Where elements lie, in integers: chunks, padding, boxes, packed buffers. Imports no torch."""

from __future__ import annotations

from fsdp_core.layout.box import Box, check_tiling
from fsdp_core.layout.chunking import Chunking
from fsdp_core.layout.packing import Packing

__all__ = ["Box", "Chunking", "Packing", "check_tiling"]
