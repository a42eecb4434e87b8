"""Which parameters of a model are gathered in low precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.comm import DEFAULT_BLOCK_SIZE
from fsdp_core.extensions.low_precision_weight import Int8Weight, LowPrecisionWeight

Chooser = Callable[[str, nn.Parameter], bool]

_MANY = 4096


def is_large_matrix(fqn: str, param: nn.Parameter) -> bool:
    """Whether a parameter has two dims or more and at least 4096 elements.

    Of biases, norms and the like the traffic is small, and the precision matters.
    """
    del fqn
    return param.ndim > 1 and param.numel() >= _MANY


def gather_in_low_precision(
    module: nn.Module,
    kind: type[LowPrecisionWeight] = Int8Weight,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    chooses: Chooser = is_large_matrix,
) -> list[str]:
    """Makes parameters of `module` travel as one-byte codes once they are sharded.

    Call it before `fully_shard` and before the optimizer is built: plain parameters are replaced
    (tied ones once). Those that are DTensors keep their identity. What is not floating point,
    not contiguous, or of low precision already is left alone.

    Not with a number of ranks as `reshard_after_forward`.

    Args:
        module: On any device, meta included.
        kind: `Int8Weight` or `Float8Weight`.
        block_size: Elements that share a scale; see `BlockCode` for the precision.
        chooses: Takes a parameter and its name below `module`.

    Returns:
        Names of the parameters chosen, tied ones under each name.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    chosen = []
    for prefix, owner in module.named_modules():
        for name, param in torch_private.own_parameters(owner):
            fqn = f"{prefix}.{name}" if prefix else name
            if param not in replaced and _can_be(param) and chooses(fqn, param):
                replaced[param] = _wrapped(param, kind, block_size)
            if param in replaced:
                torch_private.set_parameter(owner, name, replaced[param])
                chosen.append(fqn)
    return chosen


def _can_be(param: nn.Parameter) -> bool:
    local = torch_private.local_tensor(param) if isinstance(param, DTensor) else param
    return (
        local.is_floating_point()
        and local.is_contiguous()
        and not isinstance(local, LowPrecisionWeight)
    )


def _wrapped(param: nn.Parameter, kind: type[LowPrecisionWeight], block_size: int) -> nn.Parameter:
    with torch.no_grad():
        if isinstance(param, DTensor):
            local = torch_private.local_tensor(param)
            torch_private.replace_local(param, kind(local, block_size))
            return param
        return nn.Parameter(kind(param.detach(), block_size), requires_grad=param.requires_grad)
