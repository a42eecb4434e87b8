"""What a user has for a state: dicts and lists of tensors and of what JSON has words for.

In a checkpoint its tensors lie among the others under ``beside.<path>``, and the rest in the text beside
them, with ``{"tensor": name}`` where a tensor was, or ``{"empty": [dtype, shape]}`` where one had no elements.
A user's dict never looks like that: it is written as ``{"dict": …}``. Nothing is pickled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from fsdp_core.checkpoint import SavedShard, fill_from_shards
from services.worker.rank.checkpoints.shard_file import comes_back, free_name

PREFIX: Final = "beside."


class UnsavableStateError(TypeError):
    """A state holds what is neither a tensor nor JSON's."""


@dataclass(frozen=True)
class Flattened:
    """A state in two parts: ``tensors`` by name, and the ``document`` that says where they were."""

    tensors: Mapping[str, torch.Tensor]
    document: Mapping[str, Any]


def flattened(state: Mapping[str, Any]) -> Flattened:
    """Takes a state apart; of an empty one nothing is left.

    Raises:
        UnsavableStateError: It holds something else.
    """
    if not state:
        return Flattened({}, {})
    tensors: dict[str, torch.Tensor] = {}
    document: Mapping[str, Any] = _written(state, PREFIX.removesuffix("."), tensors)
    return Flattened(tensors, document)


def restored(
    document: Mapping[str, Any], saved: Sequence[SavedShard], now: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Puts a state together again.

    Args:
        document: Of `Flattened`.
        saved: What all ranks saved.
        now: The state as it is: what is a DTensor in it is filled and returned.

    Raises:
        CheckpointError: The shards do not make the whole of a tensor.
    """
    targets = dict(flattened(now).tensors)
    shapes = {shard.fqn: shard for shard in saved if shard.fqn.startswith(PREFIX)}
    tensors: dict[str, torch.Tensor] = {}
    for name, shard in shapes.items():
        target = targets.get(name)
        if not isinstance(target, DTensor):
            # Of one shard: every rank had the whole, and the first saved it.
            whole = shard.read(tuple(slice(0, size) for size in shard.shape))
            target = torch.empty(shard.global_shape, dtype=whole.dtype)
        tensors[name] = target
    fill_from_shards(tensors, saved)
    state: Mapping[str, Any] = _read(document, tensors)
    return state


def _written(value: object, path: str, tensors: dict[str, torch.Tensor]) -> Any:  # noqa: ANN401 (JSON)
    if isinstance(value, torch.Tensor):
        if value.numel() == 0:  # a file has none of it
            return {"empty": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
        name = free_name(path, tensors)  # a key with a dot in it may be called as another place is
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise UnsavableStateError(f"state_dict: {path} has keys that are not strings")
        if not all(map(comes_back, value)):
            raise UnsavableStateError(f"state_dict: {path!r} has keys that are not valid Unicode")
        return {"dict": {n: _written(each, f"{path}.{n}", tensors) for n, each in value.items()}}
    if isinstance(value, list | tuple):
        return [_written(each, f"{path}.{place}", tensors) for place, each in enumerate(value)]
    if isinstance(value, str) and not comes_back(value):
        raise UnsavableStateError(f"state_dict: {path!r} is a text that is not valid Unicode")
    try:
        json.dumps(value)
    except TypeError as error:
        raise UnsavableStateError(
            f"state_dict: {path} is a {type(value).__name__}; a checkpoint holds tensors and JSON "
            "values"
        ) from error
    return value


def _read(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401 (JSON)
    if isinstance(value, list):
        return [_read(each, tensors) for each in value]
    if isinstance(value, Mapping):
        if "tensor" in value:
            return tensors[value["tensor"]]
        if "empty" in value:
            dtype, shape = value["empty"]
            return torch.empty(shape, dtype=getattr(torch, dtype))
        return {name: _read(each, tensors) for name, each in value["dict"].items()}
    return value
