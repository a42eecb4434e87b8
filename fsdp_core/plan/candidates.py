"""Which modules suit as units, found by how the model is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from fsdp_core.plan.model.profile import UnitKind

_MANY = 2


def candidate_units(model: nn.Module) -> dict[str, UnitKind]:
    """Modules, by name, that together hold all parameters but those of modules around them.

    Blocks are the outermost modules that a list or sequence holds several of, of one class. What
    stands beside them is divided into its innermost modules with parameters.
    """
    found = dict(_below(model, ""))
    apart = [name for name, kind in found.items() if kind == "other"]
    if apart and isinstance(model.get_submodule(apart[-1]), nn.Linear) and len(found) > 1:
        found[apart[-1]] = "head"
    return found


def _below(module: nn.Module, name: str) -> Iterator[tuple[str, UnitKind]]:
    children = [(key, child) for key, child in module.named_children() if _has_parameters(child)]
    if not children:
        if name and _has_parameters(module):
            yield name, "embedding" if isinstance(module, nn.Embedding) else "other"
        return
    kinds = [type(child) for _, child in children]
    holds_blocks = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    for (key, child), kind in zip(children, kinds, strict=True):
        path = f"{name}.{key}" if name else key
        if holds_blocks and kinds.count(kind) >= _MANY and _runs(child):
            yield path, "block"
        else:
            yield from _below(child, path)


def _runs(module: nn.Module) -> bool:
    """A container without a forward cannot be a unit."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
