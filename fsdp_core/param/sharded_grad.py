"""The gradient of a sharded parameter, which the optimizer reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.errors import TensorKindError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_core.comm import CommLink, Lane
    from fsdp_core.param.offload import HostMemory
    from fsdp_core.param.placing import Placing


def add_to_grad(  # noqa: PLR0913, PLR0917 - all of them are one gradient's
    fqn: str,
    sharded: nn.Parameter,
    local: torch.Tensor,
    placing: Placing,
    memory: HostMemory,
    link: CommLink,
    lane: Lane,
) -> None:
    """Adds a reduced slice to the gradient and runs the user's hooks.

    Args:
        fqn: Of the parameter.
        sharded: The parameter.
        local: Of the shape of its local tensor; kept, not copied.
        placing: Makes a DTensor of it.
        memory: In which gradients live.
        link: Whose lane a copy to the host is placed on.
        lane: On which the caller is.

    Raises:
        TensorKindError: The user has set a gradient that is no DTensor, or that lies otherwise.
    """
    hooks = torch_private.post_accumulate_hooks(sharded)
    total = sharded.grad
    if total is not None:
        _check(fqn, total, local)
    # With hooks, nobody on the host may look at it before the copy has arrived.
    local = memory.take_grad(local, link, lane, may_overlap=total is None and not hooks)
    if total is None:
        sharded.grad = placing.sharded(local)
    else:
        summed = torch_private.local_tensor(cast("DTensor", total))
        summed += local
    for hook in hooks:
        hook(sharded)


def _check(fqn: str, total: torch.Tensor, local: torch.Tensor) -> None:
    if not isinstance(total, DTensor) or torch_private.local_tensor(total).shape != local.shape:
        raise TensorKindError(
            f"The gradient of parameter {fqn!r} was set to a {type(total).__name__} of which this "
            "rank does not hold the same slice as of the parameter. Set a DTensor of the "
            "parameter's placements, or None."
        )
