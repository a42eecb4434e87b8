"""Names of parameters from the root."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from fsdp_core.param.fsdp_param import FSDPParam


def name_from_root(root: nn.Module, params: Iterable[FSDPParam]) -> None:
    """Sets each parameter's `fqn` to its name below `root`."""
    prefixes = {module: name for name, module in root.named_modules()}
    for param in params:
        module, local_name = param.slot.places[0]
        prefix = prefixes.get(module, "")
        param.fqn = f"{prefix}.{local_name}" if prefix else local_name
