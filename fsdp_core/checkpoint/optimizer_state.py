"""An optimizer's state as named tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp_core.checkpoint.fill import SavedShard, fill_from_shards
from fsdp_core.checkpoint.local_shards import local_part
from fsdp_core.errors import CheckpointError
from fsdp_core.layout import Box

if TYPE_CHECKING:
    from torch.optim import Optimizer

PREFIX = "optim."


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The state of each parameter as ``optim.<fqn>.<key>``, for example ``optim.w.exp_avg``.

    Entries shaped like their parameter are DTensors, steps are plain scalars; numbers become
    zero-dimensional tensors. Parameters that were never updated have no entries. The tensors
    share memory with the optimizer. Hyperparameters (learning rate, ...) are not included: they
    follow from the job's schedule and step.

    Raises:
        CheckpointError: The optimizer holds a parameter that is not the model's, or keeps
            something that is neither tensor nor number.
    """
    state: dict[str, torch.Tensor] = {}
    for fqn, param in _params(model, optimizer).items():
        for key, value in optimizer.state.get(param, {}).items():
            name = f"{PREFIX}{fqn}.{key}"
            if isinstance(value, torch.Tensor):
                state[name] = value.detach()
            elif isinstance(value, bool | int | float):
                state[name] = torch.tensor(value, dtype=_number_dtype(value))
            elif value is not None:
                raise CheckpointError(
                    f"{name!r} is a {type(value).__name__}; only tensors and numbers can be saved."
                )
    return state


def load_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer,
    saved: Iterable[SavedShard],
    *,
    later_keys: bool = False,
    numbers: Collection[str] = (),
) -> None:
    """Fills the optimizer from shards named as by `optimizer_state`, saved at any world size.

    Parameters that have saved entries get their state made first, by one step of the optimizer
    on stand-ins for all of them; neither parameters, gradients nor groups are touched. The others lose theirs, as
    they had none when the state was saved.

    Args:
        model: The model whose parameters the optimizer holds.
        optimizer: Built as the saved one was; it may have taken steps.
        saved: Shards of all ranks; names outside ``optim.`` are ignored.
        later_keys: Whether the optimizer is known to make entries in later steps than its first. Those that were
            saved and that it has not made are made: sharded as the parameter if they have its shape, else plain
            tensors.
        numbers: Keys of those later entries that are no tensors, but Python's numbers.

    Raises:
        CheckpointError: State was saved for a parameter or key that the optimizer does not
            have, or see `fill_from_shards`.
    """
    mine = [shard for shard in saved if shard.fqn.startswith(PREFIX)]
    names = {shard.fqn for shard in mine}
    # A name may be a prefix of another's: only the last segment is no part of the parameter's.
    with_state = {name.rpartition(".")[0] for name in names}
    without: list[nn.Parameter] = []
    for fqn, param in _params(model, optimizer).items():
        if f"{PREFIX}{fqn}" not in with_state:
            optimizer.state.pop(param, None)
        elif not optimizer.state.get(param):
            without.append(param)
    _make_state(optimizer, without)
    if later_keys:
        _make_later_keys(model, optimizer, mine, numbers)
    target = optimizer_state(model, optimizer)
    if unknown := sorted(names - target.keys()):
        raise CheckpointError(
            f"The checkpoint has optimizer state that this optimizer does not: {unknown}. Build "
            "the optimizer with the parameters and options it was saved with."
        )
    fill_from_shards(target, mine)
    _put_numbers_back(model, optimizer, target)


def _params(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    model.state_dict(keep_vars=True)  # its hooks register the slices, which the optimizer holds
    names = {param: fqn for fqn, param in model.named_parameters()}
    found: dict[str, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in names:
                raise CheckpointError(
                    f"The optimizer holds a parameter of shape {tuple(param.shape)} that the "
                    "model does not have. Build it from model.parameters() after fully_shard."
                )
            found[names[param]] = param
    return found


def _make_state(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
    # Lazily made state has no other constructor than a step. On stand-ins of zeros with
    # gradients of zeros it cannot move anything the user sees. One step for all: each step
    # costs the host about as much as updating many parameters does.
    if not params:
        return
    stand_ins = {param: _stand_in(param) for param in params}
    groups = optimizer.param_groups
    before = [dict(group) for group in groups]
    try:
        for group in groups:
            group["params"] = [stand_ins[p] for p in group["params"] if p in stand_ins]
        # The class's step: schedulers count calls by replacing the instance's.
        type(optimizer).step(optimizer)
    finally:
        # Some count their steps there.
        for group, kept in zip(groups, before, strict=True):
            group.clear()
            group.update(kept)
    for param, stand_in in stand_ins.items():
        optimizer.state[param] = optimizer.state.pop(stand_in, {})


def _make_later_keys(
    model: nn.Module, optimizer: Optimizer, saved: Sequence[SavedShard], numbers: Collection[str]
) -> None:
    params = _params(model, optimizer)
    boxes: defaultdict[str, list[SavedShard]] = defaultdict(list)
    for shard in saved:
        boxes[shard.fqn].append(shard)
    for name, shards in boxes.items():
        fqn, _, key = name.removeprefix(PREFIX).rpartition(".")
        param = params.get(fqn)
        if param is None or key in optimizer.state[param]:
            continue
        shape = tuple(shards[0].global_shape)
        if shape and shape == tuple(param.shape):
            made = torch.zeros_like(param, requires_grad=False)
            wanted, _ = local_part(made)
        elif len(shards) == 1:  # of several boxes nobody knows how they lay
            made = torch.zeros(shape, device=param.device if shape else "cpu")
            wanted = Box.whole(shape)
        else:
            continue
        for shard in shards:
            if wanted.intersect(shard.box) is not None:
                made = made.to(shard.read((slice(0, 0),) * len(shape)).dtype)
                break
        optimizer.state[param][key] = made.item() if key in numbers and not shape else made


def _stand_in(param: nn.Parameter) -> nn.Parameter:
    stand_in = nn.Parameter(torch.zeros_like(param), requires_grad=param.requires_grad)
    stand_in.grad = torch.zeros_like(param)
    return stand_in


def _put_numbers_back(
    model: nn.Module, optimizer: Optimizer, filled: dict[str, torch.Tensor]
) -> None:
    for fqn, param in _params(model, optimizer).items():
        state = optimizer.state.get(param, {})
        for key, value in state.items():
            if isinstance(value, bool | int | float):
                state[key] = filled[f"{PREFIX}{fqn}.{key}"].item()


def _number_dtype(value: float) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int) else torch.float64
