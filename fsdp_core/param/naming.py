"""Names of parameters from the root, and that no two units claim one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fsdp_core.errors import SharedParameterError

if TYPE_CHECKING:
    from torch import nn

    from fsdp_core.param.fsdp_param import FSDPParam


def name_from_root(root: nn.Module, params: Iterable[FSDPParam]) -> None:
    """Sets each parameter's `fqn` to its name below `root`.

    Raises:
        SharedParameterError: Two of them were one parameter before they were sharded.
    """
    prefixes = {module: name for name, module in root.named_modules()}
    origins: set[object] = set()
    for param in params:
        module, local_name = param.slot.places[0]
        prefix = prefixes.get(module, "")
        param.fqn = f"{prefix}.{local_name}" if prefix else local_name
        if param.origin in origins:
            raise SharedParameterError(
                f"Parameter {param.fqn!r} is shared with a parameter already managed by another "
                "FSDP group. Use fully_shard([module_a, module_b]) to place both in one group."
            )
        origins.add(param.origin)
