"""The gradient of a sharded parameter, which the optimizer reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from fsdp_core import torch_private

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_core.comm import CommLink, Lane
    from fsdp_core.param.offload import HostMemory
    from fsdp_core.param.placing import Placing


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
        sharded: The parameter.
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
