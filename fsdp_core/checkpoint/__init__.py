"""State as named boxes of elements: listing a rank's own, filling them at any other world size.

No file format: the code that stores the boxes (safetensors, DCP, memory) passes them in and out.
"""

from __future__ import annotations

from fsdp_core.checkpoint.fill import SavedShard, fill_from_shards
from fsdp_core.checkpoint.local_shards import ShardEntry, local_shards
from fsdp_core.checkpoint.model_state import give_state, load_model_state, model_state
from fsdp_core.checkpoint.optimizer_state import load_optimizer_state, optimizer_state

__all__ = [
    "SavedShard",
    "ShardEntry",
    "fill_from_shards",
    "give_state",
    "load_model_state",
    "load_optimizer_state",
    "local_shards",
    "model_state",
    "optimizer_state",
]
