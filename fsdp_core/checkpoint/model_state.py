"""A model's parameters and buffers as named tensors."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch.nn.parameter import is_lazy

from fsdp_core import torch_private
from fsdp_core.checkpoint.fill import SavedShard, fill_from_shards
from fsdp_core.checkpoint.local_shards import local_part
from fsdp_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

PREFIX = "model."


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything in ``model.state_dict()`` as ``model.<fqn>``, without communication.

    Sharded parameters are DTensors. A tied tensor appears once, under its first name. The
    tensors share memory with the model, except for what its hooks make for the state dict.

    Raises:
        CheckpointError: The state dict holds something that is no tensor (extra state).
    """
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for fqn, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{fqn!r} in the state dict is a {type(value).__name__}, not a tensor. Keep "
                "extra state in buffers, or save it beside the checkpoint."
            )
        if id(value) not in seen:
            seen.add(id(value))
            state[PREFIX + fqn] = value.detach()
    return state


def load_model_state(model: nn.Module, saved: Iterable[SavedShard]) -> None:
    """Fills the model from shards named as by `model_state`, saved at any world size.

    Then the model is given what was filled by its own ``load_state_dict``: its modules may have given
    copies for the state dict, or keep what follows from it. Gathers in flight are dropped, so that the next
    forward computes with what was loaded. Call it on all ranks: one that drops its gathers alone gets a `DesyncError` in the next forward.

    Args:
        model: Sharded or not; on a real device.
        saved: Shards of all ranks; names outside ``model.`` are ignored.

    Raises:
        CheckpointError: A tensor was saved that the model does not have, its hooks gave copies that it does
            not take back, or see `fill_from_shards`.
    """
    target = model_state(model)
    mine = [shard for shard in saved if shard.fqn.startswith(PREFIX)]
    if unknown := sorted({shard.fqn for shard in mine} - target.keys()):
        raise CheckpointError(
            f"The checkpoint has tensors that this model does not: {unknown}. Build the model "
            "with the configuration it was saved with."
        )
    _drop_gathers(model)
    fill_from_shards(target, mine)
    # Its own dict, not one of ours: that says of which version the modules are.
    state = model.state_dict(keep_vars=True)
    filled = {name.removeprefix(PREFIX): each for name, each in target.items()}
    # By all names of a tied tensor: the last one is what counts.
    by_first = {id(state[name]): each for name, each in filled.items() if name in state}
    state.update(
        {n: by_first[id(each)] for n, each in state.items() if id(each) in by_first} | filled
    )
    give_state(model, state, target.values())


def give_state(
    model: nn.Module, state: Mapping[str, object], filled: Iterable[torch.Tensor]
) -> None:
    """Has a model take its state by its own ``load_state_dict``, and keeps its parameters' objects.

    Args:
        model: Sharded or not.
        state: All that its ``state_dict`` gives, with the values that it is to have. May be the model's own tensors.
        filled: Those of them that have their values, whoever takes them.

    Raises:
        CheckpointError: The model does not take back what its hooks gave as copies.
    """
    with _parameters_kept(model):
        told = _give(model, _kept_apart(model, state))
    if isinstance(told, _Keys) and told.unexpected_keys:
        _refuse_unfilled(model, told.missing_keys, filled)


@runtime_checkable
class _Keys(Protocol):
    missing_keys: list[str]
    unexpected_keys: list[str]


def _give(model: nn.Module, state: Mapping[str, Any]) -> object:
    # One of the user's own may neither take `strict` nor answer anything.
    accepted = inspect.signature(model.load_state_dict).parameters.values()
    takes_strict = any(each.name == "strict" or each.kind is each.VAR_KEYWORD for each in accepted)
    options = {"strict": False} if takes_strict else {}
    return cast("object", model.load_state_dict(state, **options))


def _kept_apart(model: nn.Module, state: Mapping[str, object]) -> Mapping[str, object]:
    """With copies of what user code may write to before the model has read what it is given.

    One that is reset before would overwrite values that are its own tensors. Of the rest of a large model
    there is no second one.
    """
    resettable = [each for each in model.modules() if _has_loading_of_its_own(each)]
    if not resettable:
        return state
    written = {memory for module in resettable for memory in _memories(module)}
    return _copied(state, _memories(model) - written)


def _has_loading_of_its_own(module: nn.Module) -> bool:
    loads = (module.load_state_dict, *torch_private.entry_loading(module))
    names = [getattr(load, "__module__", None) or "" for load in loads]
    return not all(name.startswith(("torch.", "fsdp_core.")) for name in names)


def _memories(module: nn.Module) -> set[int | None]:
    tensors = (*module.parameters(), *module.buffers())
    return {_memory(each) for each in tensors if not is_lazy(each)}


def _copied(state: Mapping[str, object], safe: Collection[int | None]) -> Mapping[str, object]:
    copied = cast("dict[str, object]", copy.copy(state))  # with the versions, if it says any
    for name, each in state.items():
        if isinstance(each, torch.Tensor):
            copied[name] = each if _memory(each) in safe else each.detach().clone()
        elif isinstance(each, Mapping):
            copied[name] = _copied(each, safe)
    return copied


@contextlib.contextmanager
def _parameters_kept(model: nn.Module) -> Iterator[None]:
    """Values of parameters that modules replace meanwhile go into the old ones, which optimizers hold.

    By their places, since a module may also replace modules.
    """
    held = [
        (place, name, parameter)
        for place, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    yield
    modules = dict(model.named_modules(remove_duplicate=False))
    is_replaced = False
    for place, name, parameter in held:
        module = modules.get(place)
        now = None if module is None else torch_private.parameter_at(module, name)
        if module is None or now is None or now is parameter:
            continue
        if now.shape == parameter.shape:
            with torch.no_grad():
                local_part(parameter)[1].copy_(local_part(now)[1])
        else:
            parameter.data = now.detach()
        torch_private.set_parameter(module, name, parameter)
        is_replaced = True
    if is_replaced:
        for unit in _units(model):
            unit._get_fsdp_state().refresh()  # noqa: SLF001 see `_units`


def _refuse_unfilled(
    model: nn.Module, left_out: Iterable[str], filled: Iterable[torch.Tensor]
) -> None:
    # What is only derived from others needs to be taken by nobody.
    memory = {_memory(each) for each in filled}
    own = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    if lost := [name for name in left_out if name in own and _memory(own[name]) not in memory]:
        raise CheckpointError(
            f"The model's hooks give copies for its state dict, and its load_state_dict does not take them back: {lost} "
            "would keep the values of a new model. Give it a hook that does: "
            "register_load_state_dict_pre_hook."
        )


def _memory(tensor: torch.Tensor) -> int | None:
    _, local = local_part(tensor)
    return torch_private.storage_start(local)


@runtime_checkable
class _State(Protocol):
    def refresh(self) -> None: ...


class _Unit(Protocol):
    def reshard(self) -> None: ...

    def _get_fsdp_state(self) -> _State: ...


def _units(model: nn.Module) -> Iterator[_Unit]:
    for module in model.modules():
        # The name by which units are found, PyTorch's, too.
        find = getattr(module, "_get_fsdp_state", None)
        if find is not None and isinstance(find(), _State):
            yield cast("_Unit", module)


def _drop_gathers(model: nn.Module) -> None:
    for unit in _units(model):
        unit.reshard()
