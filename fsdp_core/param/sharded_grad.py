"""The gradient of a sharded parameter, which the optimizer reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.errors import TensorKindError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_core.comm import CommLink, Lane
    from fsdp_core.param.offload import HostMemory
    from fsdp_core.param.placing import Placing


def check_grad(fqn: str, sharded: nn.Parameter, local: torch.Tensor) -> None:
    """Checks that `local`, a reduced slice, can be added to the gradient.

    Raises:
        TensorKindError: The user has set one that is no DTensor, or that lies otherwise.
    """
    total = sharded.grad
    if total is None:
        return
    if not isinstance(total, DTensor) or torch_private.local_tensor(total).shape != local.shape:
        raise TensorKindError(
            f"The gradient of parameter {fqn!r} was set to a {type(total).__name__} of which this "
            "rank does not hold the same slice as of the parameter. Set a DTensor of the "
            "parameter's placements, or None."
        )


def add_to_grad(
    sharded: nn.Parameter,
    local: torch.Tensor,
    placing: Placing,
    memory: HostMemory,
    link: CommLink,
    lane: Lane,
) -> None:
    """Adds a reduced slice to the gradient and runs the user's hooks.

    Args:
        sharded: The parameter; see `check_grad`.
        local: Of the shape of its local tensor; kept, not copied.
        placing: Makes a DTensor of it.
        memory: In which gradients live.
        link: Whose lane a copy to the host is placed on.
        lane: On which the caller is.
    """
    hooks = torch_private.post_accumulate_hooks(sharded)
    total = sharded.grad
    # With hooks, nobody on the host may look at it before the copy has arrived.
    local = memory.take_grad(local, link, lane, may_overlap=total is None and not hooks)
    if isinstance(total, DTensor):
        summed = torch_private.local_tensor(total)
        summed += local
    else:
        sharded.grad = placing.sharded(local)
    for hook in hooks:
        hook(sharded)
