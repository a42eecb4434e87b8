"""What an optimizer keeps and needs, by which its share of memory is known for any model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerFacts:
    """Memory of an optimizer, in copies of what it trains.

    Attributes:
        state_copies: Tensors of a parameter's shape and dtype that it keeps for each.
        state_bytes: What it keeps besides for each parameter.
        step_copies_of_all: Temporary copies of all parameters in a step (``foreach``).
        step_copies_of_largest: Temporary copies of one parameter at a time.
    """

    state_copies: int = 0
    state_bytes: int = 0
    step_copies_of_all: int = 0
    step_copies_of_largest: int = 0


ADAMW_FUSED = OptimizerFacts(state_copies=2, state_bytes=4)
"""`torch.optim.AdamW(fused=True)`."""

SGD = OptimizerFacts()
"""`torch.optim.SGD` without momentum and weight decay."""
