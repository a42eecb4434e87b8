"""Which parameters a call of `fully_shard` takes charge of."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.errors import ArgumentError
from fsdp_core.runtime.fsdp_state import state_of


def root_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of `modules` that are not below another of them, in order, each once."""
    distinct = list(dict.fromkeys(modules))
    below = {child for module in distinct for child in module.modules() if child is not module}
    return [module for module in distinct if module not in below]


def managed_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules below `modules`, themselves included, that no nested unit has taken.

    In post-order, children first: it decides the packing order, which must equal the
    reference's for equal sums.
    """
    visited: set[nn.Module] = set()
    found: list[nn.Module] = []

    def walk(module: nn.Module, *, is_root: bool) -> None:
        taken = not is_root and state_of(module) is not None
        if taken or "replicate" in torch_private.composable_names(module):
            return
        visited.add(module)
        for child in module.children():
            if child not in visited:
                walk(child, is_root=child in modules)
        found.append(module)

    for module in modules:
        walk(module, is_root=True)
    return found


def managed_params(
    modules: Sequence[nn.Module], ignored: Collection[nn.Parameter]
) -> list[nn.Parameter]:
    """The parameters registered directly on `modules`, each once, without the ignored."""
    params: dict[nn.Parameter, None] = {}
    for module in modules:
        for param in module.parameters(recurse=False):
            if param not in ignored:
                params[param] = None
    return list(params)


def without_ignored(
    modules: Sequence[nn.Module], ignored: Collection[nn.Parameter]
) -> list[nn.Module]:
    """`modules` without those that hold only ignored parameters, throughout, and no buffers."""

    def is_ignored(module: nn.Module) -> bool:
        if any(True for _ in module.buffers()):
            return False
        params = list(module.parameters())
        return all(param in ignored for param in params)

    return [module for module in modules if not is_ignored(module)]


def move_to(
    device: torch.device, params: Sequence[nn.Parameter], modules: Sequence[nn.Module]
) -> None:
    """Moves parameters and the modules' buffers to `device`; those on meta stay there.

    Raises:
        ArgumentError: A DTensor lies on a mesh of another kind of device.
    """
    buffers = (buffer for module in modules for buffer in module.buffers(recurse=False))
    for tensor in dict.fromkeys(itertools.chain(params, buffers)):
        if tensor.device in (device, torch.device("meta")):
            continue
        if isinstance(tensor, DTensor):
            raise ArgumentError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                f"{tensor.device_mesh.device_type} for DTensor and {device.type} for FSDP. "
                "Distribute the tensor over a mesh of the same devices."
            )
        if torch_private.is_wrapper(tensor):
            # Its data lies in inner tensors, which `.data` does not reach.
            with torch.no_grad():
                moved = nn.Parameter(tensor.to(device), requires_grad=tensor.requires_grad)
            torch_private.swap(tensor, moved)
        else:
            tensor.data = tensor.to(device)
