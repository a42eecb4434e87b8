"""What may take a sharded parameter's place on its module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from torch import nn


def check_replacement(
    fqn: str,
    registered: nn.Parameter,
    spec: torch_private.Spec,
    held_shapes: Sequence[tuple[int, ...]],
) -> torch_private.Spec:
    """Checks what hangs on the module, and returns how it lies.

    Args:
        fqn: The parameter's name.
        registered: What hangs there.
        spec: How the sharded parameter lay before.
        held_shapes: Those that this rank's local tensor may have; the usual one first.

    Raises:
        ArgumentTypeError: It is no DTensor.
        ArgumentError: Its shape is another, or this rank holds another part of it.
    """
    if not isinstance(registered, DTensor):
        raise ArgumentTypeError(
            f"Parameter {fqn!r} was replaced by a {type(registered).__name__}, but a "
            "sharded parameter must be a DTensor. Assign a DTensor with the placements of "
            "the old one, for example from distribute_tensor."
        )
    held = tuple(torch_private.local_tensor(registered).shape)
    if registered.shape != torch.Size(spec.shape) or held not in held_shapes:
        raise ArgumentError(
            f"Parameter {fqn!r} of shape {tuple(spec.shape)} was replaced by a DTensor of shape "
            f"{tuple(registered.shape)} with placements {registered.placements}, of which this "
            f"rank holds {held} and should hold {held_shapes[0]}. Assign one of the old shape, "
            f"with placements {spec.placements} on {spec.mesh}; redistribute brings it there."
        )
    return torch_private.spec_of(registered)
