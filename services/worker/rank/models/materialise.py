"""From a model factory to sharded parameters with values that depend on the job's seed alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fsdp_core.checkpoint.local_shards import local_part
from fsdp_core.layout import Box
from fsdp_core.plan.apply import apply_plan
from fsdp_core.plan.model import ShardingPlan
from services.worker.rank.gang.groups import Gang
from services.worker.rank.models.protocol import FirstValues, HasFirstValues, MetaInit, Resettable
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
        give_values(model, seed)
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


class _Own:
    """Each module fills what it directly owns."""

    files: Mapping[str, bytes] = MappingProxyType({})

    def groups(self, model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
        for name, module in model.named_modules():
            yield name, module, False

    def fill(self, name: str, module: nn.Module, *, below: bool) -> None:  # noqa: ARG002 (see FirstValues)
        if not isinstance(module, Resettable):
            raise InitialisationError(
                f"module {name or 'root'!r} ({type(module).__name__}) owns parameters or buffers but "
                "has no reset_parameters(): add it, or take meta_init from the model"
            )
        module.reset_parameters()

    def read(self, fqn: str, slices: tuple[slice, ...]) -> None:
        """Nothing is read."""


@dataclass(frozen=True)
class _Owned:
    """A parameter or buffer that ``module`` owns under ``key``; ``fqn`` in the model."""

    module: nn.Module
    key: str
    fqn: str
    tensor: torch.Tensor


def give_values(model: nn.Module, seed: int) -> None:
    """Gives all tensors of a model that was built on the meta device their first values.

    Args:
        model: With memory on its device; sharded or not.
        seed: The job's.

    Raises:
        InitialisationError: A module cannot fill what it owns.
    """
    values: FirstValues = model.first_values if isinstance(model, HasFirstValues) else _Own()
    read: set[int] = set()
    for name, module, below in values.groups(model):
        modules = list(module.named_modules(prefix=name)) if below else [(name, module)]
        owned = [each for full, inner in modules for each in _owned(full, inner)]
        # A parameter that several modules share is read once, under whichever of its names.
        read |= {id(each.tensor) for each in owned if _is_read(each, values)}
        missing = [each for each in owned if id(each.tensor) not in read]
        if missing:
            fill = partial(values.fill, name, module, below=below)
            _fill(owned, missing, fill, derive(seed, "init", name))


def _owned(name: str, module: nn.Module) -> Iterator[_Owned]:
    direct = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    for key, tensor in direct:
        yield _Owned(module, key, f"{name}.{key}" if name else key, tensor)


def _is_read(owned: _Owned, values: FirstValues) -> bool:
    box, own = local_part(owned.tensor)
    part = values.read(owned.fqn, box.slices_within(Box.whole(owned.tensor.shape)))
    if part is None:
        return False
    with torch.no_grad():
        own.copy_(part)
    return True


def _fill(
    owned: Sequence[_Owned], missing: Sequence[_Owned], fill: Callable[[], None], seed: int
) -> None:
    """Has whole tensors filled in host memory, then keeps this rank's slices of the missing ones."""
    try:
        for each in owned:
            whole = torch.empty(each.tensor.shape, dtype=each.tensor.dtype)
            is_parameter = isinstance(each.tensor, nn.Parameter)
            value = nn.Parameter(whole, each.tensor.requires_grad) if is_parameter else whole
            setattr(each.module, each.key, value)
        # The host's generator on every device: a CPU run and a GPU run begin alike.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)
            fill()
        filled = {each.fqn: getattr(each.module, each.key) for each in missing}
    finally:
        for each in owned:
            setattr(each.module, each.key, each.tensor)
    with torch.no_grad():
        for each in missing:
            _copy_slice(each.tensor, filled[each.fqn])


def _copy_slice(target: torch.Tensor, whole: torch.Tensor) -> None:
    box, own = local_part(target)
    own.copy_(whole[box.slices_within(Box.whole(whole.shape))])
