"""Which modules suit as units, found by how the model is built and by what its forward does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fsdp_core.runtime.tensor_tree import map_tensors

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


def used_within(
    model: nn.Module, make_loss: Callable[[], object], names: Iterable[str]
) -> set[str]:
    """Those of the modules whose parameters are used while they run, and never otherwise.

    Only within its forward a unit is whole: what else reads its parameters, be it the module
    around it that calls its parts one by one, would meet slices.

    Args:
        model: What is run, on tensors without memory.
        make_loss: Runs forward.
        names: Modules.
    """
    modules = {name: model.get_submodule(name) for name in names}
    watch = _Watch(modules)
    handles = []
    for name, module in modules.items():
        handles += [
            module.register_forward_pre_hook(watch.enter(name)),
            module.register_forward_hook(watch.leave),
        ]
    try:
        with watch:
            make_loss()
    finally:
        for handle in handles:
            handle.remove()
    return watch.entered - watch.strayed


class _Watch(TorchFunctionMode):
    """Sees which function is given whose parameters, and who runs then."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.entered: set[str] = set()
        self.strayed: set[str] = set()
        self._running: list[str] = []
        self._owners: dict[torch.Tensor, set[str]] = {}
        for name, module in modules.items():
            for parameter in module.parameters():
                self._owners.setdefault(parameter, set()).add(name)

    def enter(self, name: str) -> Callable[..., None]:
        """A hook for the beginning of forward."""

        def hook(*_: object) -> None:
            self.entered.add(name)
            self._running.append(name)

        return hook

    def leave(self, *_: object) -> None:
        """A hook for the end of forward."""
        self._running.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Runs the function and notes whose parameters it was given."""
        del types
        result = func(*args, **(kwargs or {}))
        # Shapes, dtypes and the like can be read of slices as well.
        if _has_tensors(result):
            map_tensors(self._note, (args, kwargs))
        return result

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        owners = self._owners.get(tensor, set())
        # What is tied is whole while any of its owners runs.
        if owners.isdisjoint(self._running):
            self.strayed |= owners
        return tensor


def _has_tensors(tree: object) -> bool:
    found = False

    def look(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        found = True
        return tensor

    map_tensors(look, tree)
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
