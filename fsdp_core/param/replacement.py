"""What users may put in the place of a sharded parameter, and of its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.errors import ArgumentError, ArgumentTypeError, TensorKindError

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


def check_grad(fqn: str, total: torch.Tensor, local: torch.Tensor) -> None:
    """Checks that a reduced slice can be added to a gradient.

    Args:
        fqn: The parameter's name.
        total: Its gradient.
        local: The slice, of the shape of the parameter's local tensor.

    Raises:
        TensorKindError: The gradient is no DTensor, or lies otherwise.
    """
    if not isinstance(total, DTensor) or torch_private.local_tensor(total).shape != local.shape:
        raise TensorKindError(
            f"The gradient of parameter {fqn!r} was set to a {type(total).__name__} of which this "
            "rank does not hold the same slice as of the parameter. Set a DTensor of the "
            "parameter's placements, or None."
        )
