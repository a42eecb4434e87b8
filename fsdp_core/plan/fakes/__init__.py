"""Following a model without memory, and a look at all that it does.

Besides `torch_private` the one place that touches names that PyTorch keeps private: tensors without memory,
modes that see every operator, and ranks that are not there. Training needs none of it.
"""

from __future__ import annotations

from fsdp_core.plan.fakes.quick_modes import flop_counter, without_drawing_twice
from fsdp_core.plan.fakes.tensors import (
    LookInto,
    OperatorWatch,
    fake_ranks,
    is_without_memory,
    plain,
    storage_key,
    watching_resizes,
    when_freed,
    with_memory,
    without_memory,
)

__all__ = [
    "LookInto",
    "OperatorWatch",
    "fake_ranks",
    "flop_counter",
    "is_without_memory",
    "plain",
    "storage_key",
    "watching_resizes",
    "when_freed",
    "with_memory",
    "without_drawing_twice",
    "without_memory",
]
