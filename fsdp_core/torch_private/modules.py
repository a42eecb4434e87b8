# ruff: noqa: SLF001 - private names are what this package is for
"""Modules: their parameters, hooks, and the tables of composable functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem


def composable_state(module: nn.Module, key: str) -> object | None:
    """What `set_composable` put on the module under `key`."""
    states: dict[object, object] = module.__dict__.get(STATE_KEY, {})
    return states.get(key)


def composable_names(module: nn.Module) -> frozenset[str]:
    """Names of the composable functions, PyTorch's and ours, applied to the module."""
    return frozenset(module.__dict__.get(REGISTRY_KEY, ()))


def set_composable(module: nn.Module, key: str, state: object, *, name: str) -> None:
    """Notes in the tables of PyTorch's composable functions that `name` was applied.

    So PyTorch's own functions refuse what does not go together with it.
    """
    module.__dict__.setdefault(STATE_KEY, {})[key] = state
    module.__dict__.setdefault(REGISTRY_KEY, {})[name] = RegistryItem()


def register_load_pre_hook(module: nn.Module, hook: Callable[..., None]) -> None:
    """Runs `hook` before the module's own entries are loaded from a state dict."""
    module._register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]  # PyTorch's


def entry_loading(module: nn.Module) -> tuple[Callable[..., object], ...]:
    """What loads the module's own entries of a state dict: its class may override it, and hooks run before it."""
    return module._load_from_state_dict, *module._load_state_dict_pre_hooks.values()


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Registers `parameter` as `name`, past the checks of `nn.Module.__setattr__`.

    They cost tens of microseconds and twice per parameter and step. A module that overrides
    `__setattr__` gets the ordinary assignment.
    """
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)


def parameter_at(module: nn.Module, name: str) -> torch.Tensor | None:
    """What is registered as `name`, which `torch.func` may have replaced by a tensor; None if nothing is."""
    table = module._parameters  # a compiled one of TorchScript has no `get`
    return table[name] if name in table else None  # noqa: SIM401 - see above


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None] | None:
    """Where `set_parameter` writes, for whoever does so at every step; None: it assigns the attribute."""
    is_ordinary = type(module).__setattr__ is nn.Module.__setattr__
    return module._parameters if is_ordinary else None


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The module's direct parameters with every name, tied ones repeated."""
    return [(name, param) for name, param in module._parameters.items() if param is not None]


def mark_for_dynamo(module: nn.Module) -> None:
    """Tells Dynamo that parameters of this module change identity between calls."""
    module.__dict__["_is_fsdp_managed_module"] = True
    module.__dict__["_fsdp_use_orig_params"] = True


def calls_on_stack(module: nn.Module) -> int:
    """How many calls of `module` this thread is in; more than one if it calls itself.

    A module does not count its calls. Dynamo may have compiled them into frames of its own.
    """
    calls, frame = 0, inspect.currentframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module:
            calls += 1
        frame = frame.f_back
    return calls


P = ParamSpec("P")


R = TypeVar("R")


def opaque_to_dynamo(function: Callable[P, R]) -> Callable[P, R]:
    """Dynamo breaks its graph at `function` and does not look inside.

    `torch.compiler.disable` would load Dynamo, a second's work, when the module is imported;
    this loads it at the first call.
    """
    return torch._compile._disable_dynamo(function)
