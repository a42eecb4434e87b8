"""The two state machines, by name.

`FSDPState` owns the `TrainingState` of its unit, `FSDPParamGroup` the `ShardedState` of its
parameters. Nobody else stores either.
"""

from __future__ import annotations

import enum


class TrainingState(enum.Enum):
    """Where a unit is in the step. The names are the reference's.

    IDLE → FORWARD → IDLE → PRE_BACKWARD → POST_BACKWARD → IDLE. Activation recomputation runs
    the unit's forward without leaving PRE_BACKWARD.
    """

    FORWARD = enum.auto()
    """From the forward pre-hook to the forward hook."""
    PRE_BACKWARD = enum.auto()
    """From the first gradient of an output until the gradients of the inputs are known."""
    POST_BACKWARD = enum.auto()
    """Resharded, gradients on their way; lasts until the end of the whole backward."""
    IDLE = enum.auto()
    """Outside forward and backward."""


class ShardedState(enum.Enum):
    """Which parameter object is registered on the modules of a group."""

    SHARDED = enum.auto()
    """This rank's slice; the only parameter memory held."""
    SHARDED_POST_FORWARD = enum.auto()
    """A slice of a smaller mesh, kept between forward and backward (integer reshard)."""
    UNSHARDED = enum.auto()
    """The whole parameter; its memory is held besides the slice."""
