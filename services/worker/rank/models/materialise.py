"""From a model factory to sharded parameters with values that depend on the job's seed alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from fsdp_core import FSDPModule, share_comm_ctx
from fsdp_core.checkpoint.local_shards import local_part
from fsdp_core.layout import Box
from fsdp_core.plan.apply import IsOwned, apply_plan
from fsdp_core.plan.model import ShardingPlan
from services.worker.rank.gang.groups import Gang
from services.worker.rank.models.protocol import FirstValues, HasFirstValues, MetaInit, Resettable
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
            give_values(model, seed, prefix)
    share_comm_ctx([cast("FSDPModule", model) for model in models.by_name.values()])
    return models


def _below(prefix: str, is_owned: IsOwned | None) -> IsOwned | None:
    if is_owned is None or not prefix:
        return is_owned
    return lambda name, parameter: is_owned(prefix + name, parameter)


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
                "has no reset_parameters(): add it, or remove meta_init from the model"
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


def give_values(model: nn.Module, seed: int, prefix: str = "") -> None:
    """Gives all tensors of a model that was built on the meta device their first values.

    Args:
        model: With memory on its device; sharded or not.
        seed: The job's.
        prefix: What its modules have in front of their names, for their seeds.

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
            _fill(owned, missing, fill, derive(seed, "init", f"{prefix}{name}"))


def _owned(name: str, module: nn.Module) -> Iterator[_Owned]:
    direct = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    for key, tensor in direct:
        yield _Owned(module, key, f"{name}.{key}" if name else key, tensor)


def _is_read(owned: _Owned, values: FirstValues) -> bool:
    box, own = local_part(owned.tensor)
    part = values.read(owned.fqn, box.slices_within(Box.whole(owned.tensor.shape)))
    if part is None:
        return False
    if own.numel() > 0:
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
    if own.numel() > 0:  # what another rank owns is empty here, and of one dim
        own.copy_(whole[box.slices_within(Box.whole(whole.shape))])
