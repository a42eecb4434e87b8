"""From a model factory to sharded parameters with values that depend on the job's seed alone."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from fsdp_core import FSDPModule, share_comm_ctx
from fsdp_core.checkpoint.local_shards import local_part
from fsdp_core.layout import Box
from fsdp_core.plan.apply import IsOwned, apply_plan
from fsdp_core.plan.model import ShardingPlan
from services.worker.rank.gang.groups import Gang
from services.worker.rank.models.protocol import MetaInit, Resettable
from services.worker.rank.models.several import Models
from services.worker.rank.seeds import derive


class InitialisationError(TypeError):
    """A model promises ``meta_init`` and one of its modules cannot keep the promise."""


def sharded_models(
    make: Callable[[], Any],
    plan: ShardingPlan,
    gang: Gang,
    seed: int,
    is_owned: IsOwned | None = None,
) -> Models:
    """Builds the models, shards them by ``plan`` and gives them their first values.

    Args:
        make: Builds one, or several in a mapping, on the device and with the random numbers of the
            context. If it has the attribute ``meta_init``, by way of the meta device (see
            ``models.protocol``).
        plan: How they are sharded; see `Models.plan_of`.
        gang: Over whom.
        seed: The job's.
        is_owned: Which parameters one rank holds whole; none by default.

    Raises:
        InitialisationError: A module below a ``meta_init`` model has no ``reset_parameters``.
        PlanError: The plan does not suit the models.
        TypeError: The factory made something else than modules.
    """
    is_meta = isinstance(make, MetaInit) and make.meta_init
    if is_meta:
        with torch.device("meta"):
            models = Models.of(make())
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "init"))
            models = Models.of(make())
    plans = models.plans(plan)
    for name, model in models.by_name.items():
        prefix = models.prefix(name)
        apply_plan(model, plans[name], gang.mesh, _below(prefix, is_owned))
        if is_meta:
            model.to_empty(device=gang.device)
            for inner, module in model.named_modules():
                if _owned(module):
                    _fill(inner, module, derive(seed, "init", f"{prefix}{inner}"))
    share_comm_ctx([cast("FSDPModule", model) for model in models.by_name.values()])
    return models


def _below(prefix: str, is_owned: IsOwned | None) -> IsOwned | None:
    if is_owned is None or not prefix:
        return is_owned
    return lambda name, parameter: is_owned(prefix + name, parameter)


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
