"""From a model factory to sharded parameters with values that depend on the job's seed alone."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fsdp_core.checkpoint.local_shards import local_part
from fsdp_core.layout import Box
from fsdp_core.plan.apply import apply_plan
from fsdp_core.plan.model import ShardingPlan
from services.worker.rank.gang.groups import Gang
from services.worker.rank.models.protocol import MetaInit, Resettable
from services.worker.rank.seeds import derive


class InitialisationError(TypeError):
    """A model promises ``meta_init`` and one of its modules cannot keep the promise."""


def sharded_model(make: Callable[[], Any], plan: ShardingPlan, gang: Gang, seed: int) -> nn.Module:
    """Builds the model, shards it by ``plan`` and gives it its first values.

    Args:
        make: Builds it on the device and with the random numbers of the context. If it has the
            attribute ``meta_init``, by way of the meta device (see ``models.protocol``).
        plan: How it is sharded.
        gang: Over whom.
        seed: The job's.

    Raises:
        InitialisationError: A module below a ``meta_init`` model has no ``reset_parameters``.
        TypeError: The factory made something else than a module.
    """
    if isinstance(make, MetaInit) and make.meta_init:
        with torch.device("meta"):
            model = checked_module(make())
        apply_plan(model, plan, gang.mesh)
        model.to_empty(device=gang.device)
        for name, module in model.named_modules():
            if _owned(module):
                _fill(name, module, derive(seed, "init", name))
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "init"))
        model = checked_module(make())
    return apply_plan(model, plan, gang.mesh)


def checked_module(model: object) -> nn.Module:
    """What a model factory made.

    Raises:
        TypeError: That is something else than a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model.factory made a {type(model).__name__}, not an nn.Module")
    return model


def _owned(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(_direct(module))


def _direct(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _fill(name: str, module: nn.Module, seed: int) -> None:
    """Lets the module fill whole tensors in host memory, then keeps this rank's slices."""
    if not isinstance(module, Resettable):
        raise InitialisationError(
            f"module {name or 'root'!r} ({type(module).__name__}) owns parameters or buffers but "
            "has no reset_parameters(): add it, or take meta_init from the model"
        )
    kept = _owned(module)
    try:
        for key, tensor in kept.items():
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(
                module, key, nn.Parameter(whole, tensor.requires_grad) if is_parameter else whole
            )
        # The host's generator on every device: a CPU run and a GPU run begin alike.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)
            module.reset_parameters()
        filled = _owned(module)
    finally:
        for key, tensor in kept.items():
            setattr(module, key, tensor)
    with torch.no_grad():
        for key, tensor in kept.items():
            _copy_slice(tensor, filled[key])


def _copy_slice(target: torch.Tensor, whole: torch.Tensor) -> None:
    box, own = local_part(target)
    own.copy_(whole[box.slices_within(Box.whole(whole.shape))])
