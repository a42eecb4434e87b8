"""A script's state: what of it is tensors, and the rest as JSON; and how it is filled again.

Nothing is pickled, so nothing that is loaded can run code. What cannot be told in tensors and JSON is
an error, which names its place in the state.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp_core.checkpoint import SavedShard, fill_from_shards, give_state
from services.worker.rank.checkpoints.random_state import RANDOM_NAMES
from services.worker.rank.checkpoints.shard_file import HEADER_NAME, can_hold, comes_back, free_name

Node = dict[str, Any]
"""One place of a state as JSON: ``{kind: content}``."""

TAKEN_NAMES: Final = frozenset({HEADER_NAME, *RANDOM_NAMES})
_TENSOR: Final = "tensor"
_VALUE: Final = "value"
_DICT: Final = "dict"
_LIST: Final = "list"
_TUPLE: Final = "tuple"
_OBJECT: Final = "object"


class UnsavableStateError(TypeError):
    """Something in a state can be saved in no safe way.

    Args:
        place: Its keys, from the outermost.
        why: What it is.
    """

    def __init__(self, place: tuple[object, ...], why: str) -> None:
        super().__init__(
            f"{_path(place)}: {why}; it may be a tensor, a number, a string, None, a dict, list or "
            "tuple of these, or an object with state_dict and load_state_dict"
        )


@dataclass
class Taken:
    """A state as it is saved.

    Attributes:
        tensors: By the names of their places, live.
        tree: All the rest, and which tensor is where.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    tree: Node = field(default_factory=dict)

    @property
    def outline(self) -> str:
        """What must be the same on all ranks: names, shapes and dtypes of the tensors."""
        return "\n".join(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in self.tensors.items())


def taken(state: object) -> Taken:
    """Takes a state apart; the tensors stay where they are.

    Raises:
        UnsavableStateError: Something in it cannot be saved; its place is named.
    """
    found = Taken()
    try:
        found.tree = _node(state, (), found.tensors)
    except RecursionError:
        raise UnsavableStateError((), "it contains itself, or is nested too deeply") from None
    return found


def restored(state: Any, tree: Node, shards: Sequence[SavedShard]) -> Any:  # noqa: ANN401 (any nesting)
    """Fills the tensors and objects of ``state`` in place; answers it with the saved values.

    Args:
        state: As it would be given to ``taken``.
        tree: What ``taken`` made, of the state that was saved.
        shards: Boxes of its tensors, of all ranks that saved. Of equal ones any will do.

    Raises:
        KeyError: The saved state lacks something that is in ``state``.
        CheckpointError: A tensor was saved with another shape or dtype.
    """
    filling = _Filling()
    answer = filling.rebuilt(tree, state, ())
    fill_from_shards(filling.targets, _once(shards))
    for load in filling.loads:
        load()
    return answer


def unasked(state: object, tree: Node) -> list[str]:
    """What was saved in the outermost dict that ``restored`` leaves out, since ``state`` lacks it."""
    return [_path((key,)) for key in _unasked(state, tree.get(_DICT, []))]


def _unasked(given: object, items: Sequence[Any]) -> list[object]:
    """People may ask for a part; values cost nothing, and may have come in training."""
    if not isinstance(given, Mapping) or not given:
        return []
    return [key for key, node in items if key not in given and not _is_plain(node)]


def _is_plain(node: Node) -> bool:
    if _DICT in node:
        return all(_is_plain(each) for _, each in node[_DICT])
    kind = _LIST if _LIST in node else _TUPLE
    return _VALUE in node or (kind in node and all(map(_is_plain, node[kind])))


def _node(value: object, place: tuple[object, ...], tensors: dict[str, torch.Tensor]) -> Node:
    if isinstance(value, torch.Tensor):
        return {
            _TENSOR: _keep(value, place, tensors),
            "dtype": str(value.dtype),
            "shape": list(value.shape),
        }
    if isinstance(value, np.bool_ | np.integer | np.floating):
        value = value.item()
    if isinstance(value, str) and not comes_back(value):
        raise UnsavableStateError(place, f"{value!r} is not valid Unicode")
    if value is None or isinstance(value, bool | int | float | str):
        return {_VALUE: value}
    if isinstance(value, Mapping):
        items = [[_key(k, place), _node(v, (*place, k), tensors)] for k, v in value.items()]
        return {_DICT: items}
    if isinstance(value, list | tuple):
        kind = _LIST if isinstance(value, list) else _TUPLE
        return {kind: [_node(item, (*place, i), tensors) for i, item in enumerate(value)]}
    if _is_optimizer(value) and _has_flat_slices(value):
        raise UnsavableStateError(
            place,
            "an optimizer of PyTorch's FSDP1 has slices of each rank's own as plain tensors, of which rank 0's alone would "
            "be saved; shard with torch.distributed.fsdp.fully_shard",
        )
    if _is_stateful(value):
        return {_OBJECT: _node(value.state_dict(), place, tensors)}  # type: ignore[attr-defined]  # looked for
    raise UnsavableStateError(place, f"a {type(value).__name__} cannot be saved")


def _keep(tensor: torch.Tensor, place: tuple[object, ...], tensors: dict[str, torch.Tensor]) -> str:
    if not can_hold(tensor.dtype):
        raise UnsavableStateError(place, f"a tensor of {tensor.dtype} cannot be saved")
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise UnsavableStateError(place, f"a tensor {kind} cannot be saved")
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        raise UnsavableStateError(
            place, "a DTensor with partial sums cannot be saved; redistribute it"
        )
    # A key with a dot in it may be called as another place is, or as something of ours.
    name = free_name(".".join(map(str, place)) or "state", tensors.keys() | TAKEN_NAMES)
    tensors[name] = tensor.detach()
    return name


def _key(key: object, place: tuple[object, ...]) -> str | int:
    if isinstance(key, str) and not comes_back(key):
        raise UnsavableStateError(place, f"a key is {key!r}, which is not valid Unicode")
    if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
        return key
    raise UnsavableStateError(place, f"a key is {key!r}; keys must be strings or whole numbers")


def _path(place: tuple[object, ...]) -> str:
    return "state" + "".join(f"[{key!r}]" for key in place)


def _is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


class _Filling:
    """What is to be filled and loaded, as the saved tree is walked beside the given state."""

    def __init__(self) -> None:
        self.targets: dict[str, torch.Tensor] = {}
        self.loads: list[Callable[[], object]] = []

    def rebuilt(
        self,
        node: Node,
        given: Any,  # noqa: ANN401 (any nesting)
        place: tuple[object, ...],
        *,
        strict: bool = True,
    ) -> Any:  # noqa: ANN401 (any nesting)
        """What was saved at a place, into what is ``given`` there.

        ``strict``: all that is given must have been saved, as in what people write. An object's
        own words are the object's to judge.
        """
        if _TENSOR in node:
            return self._tensor(node, given, strict=strict)
        if _DICT in node:
            return self._dict(node[_DICT], given, place, strict=strict)
        if _OBJECT in node:
            return self._object(node[_OBJECT], given, place)
        if _VALUE in node:
            return node[_VALUE]
        kind = _LIST if _LIST in node else _TUPLE
        saved = node[kind]
        beside: Sequence[Any] = given if isinstance(given, list | tuple) else ()
        if strict and len(beside) != len(saved) and any(map(_holds_tensors, beside)):
            raise KeyError(f"{_path(place)} has {len(beside)} entries, {len(saved)} were saved")
        if len(beside) != len(saved):
            beside = [None] * len(saved)
        items = [
            self.rebuilt(item, old, (*place, i), strict=strict)
            for i, (item, old) in enumerate(zip(saved, beside, strict=True))
        ]
        return items if kind == _LIST else tuple(items)

    def _tensor(self, node: Node, given: object, *, strict: bool) -> torch.Tensor:
        # Whether an object takes a tensor of another shape, it decides itself: it may have grown.
        if isinstance(given, torch.Tensor) and (strict or _is_like(given, node)):
            target = given.detach()
            answer = given
        else:
            dtype = getattr(torch, node["dtype"].removeprefix("torch."))
            device = given.device if isinstance(given, torch.Tensor) else None
            answer = target = torch.empty(node["shape"], dtype=dtype, device=device)
        self.targets[node[_TENSOR]] = target
        return answer

    def _dict(
        self, items: Sequence[Any], given: object, place: tuple[object, ...], *, strict: bool
    ) -> dict[Any, Any]:
        beside: Mapping[Any, Any] = given if isinstance(given, Mapping) else {}
        saved = {key for key, _ in items}
        missing = [key for key in beside if key not in saved] if strict else []
        if missing:
            raise KeyError(f"{_path((*place, missing[0]))} was not saved in this checkpoint")
        # An object gets all that it had saved, and so does what people have in their outermost dict.
        left_out = [] if place or not strict else _unasked(given, items)
        found = {
            key: self.rebuilt(node, beside.get(key), (*place, key), strict=strict)
            for key, node in items
            if key not in left_out
        }
        return _versioned(found, beside)

    def _object(self, inner: Node, given: Any, place: tuple[object, ...]) -> Any:  # noqa: ANN401 (any object)
        if not _is_stateful(given):
            return self.rebuilt(inner, given, place, strict=False)
        if isinstance(given, nn.Module):
            return self._module(inner, given, place)
        beside = _optimizer_like(given, inner) if _is_optimizer(given) else given.state_dict()
        loaded = self.rebuilt(inner, beside, place, strict=False)
        self.loads.append(lambda: given.load_state_dict(loaded))
        return given

    def _module(self, inner: Node, given: nn.Module, place: tuple[object, ...]) -> nn.Module:
        own = given.state_dict()
        entries = dict(inner[_DICT])
        if unknown := [key for key in entries if key not in own]:
            raise KeyError(
                f"{_path((*place, unknown[0]))} was saved, and this {type(given).__name__} has no such "
                "entry; build it with the configuration it was saved with"
            )
        if missing := [key for key in own if key not in entries]:
            raise KeyError(f"{_path((*place, missing[0]))} was not saved in this checkpoint")
        known = len(self.targets)
        # What has grown, or has no shape yet, the module itself takes or refuses.
        loaded = {
            key: self.rebuilt(node, own[key], (*place, key), strict=_has_shape(own[key], node))
            for key, node in entries.items()
        }
        filled = list(self.targets.values())[known:]
        self.loads.append(lambda: give_state(given, _versioned(loaded, own), filled))
        return given


def _parameters(optimizer: Any) -> list[torch.Tensor]:  # noqa: ANN401 (torch.optim's, or a wrapper of it)
    return [param for group in optimizer.param_groups for param in group["params"]]


def _has_flat_slices(optimizer: Any) -> bool:  # noqa: ANN401 (torch.optim's, or a wrapper of it)
    """Whether it is over FSDP1, by marks that are private to PyTorch, and has slices."""
    params = _parameters(optimizer)
    if any(map(_is_flat_slice, params)):
        return True
    # With `use_orig_params` the parameters are slices themselves, or whole with NO_SHARD. Shapes of theirs say
    # nothing where one was left gathered; of what is kept of slices all has one dim.
    kept = [
        each
        for param in params
        if getattr(param, "_fsdp_flattened", False) and not _is_flat(param)
        for each in getattr(optimizer, "state", {}).get(param, {}).values()
        if isinstance(each, torch.Tensor) and each.dim() > 0
    ]
    return bool(kept) and all(each.dim() == 1 for each in kept)


def _is_flat(param: torch.Tensor) -> bool:
    return isinstance(getattr(param, "_unpadded_unsharded_size", None), torch.Size)


def _is_flat_slice(param: Any) -> bool:  # noqa: ANN401 (FSDP1's)
    return _is_flat(param) and param.numel() < param._unpadded_unsharded_size.numel()  # noqa: SLF001 PyTorch has no other name for it


def _is_optimizer(given: object) -> bool:
    return isinstance(getattr(given, "param_groups", None), list)


def _optimizer_like(optimizer: Any, inner: Node, own: object = None) -> object:  # noqa: ANN401 (torch.optim's, or a wrapper of it)
    """Places for the saved state of each parameter, which a new optimizer does not have yet.

    What is shaped as its parameter lies as that does. One that wraps another may have the other's state anywhere in its
    own, of which ``own`` is the part here.
    """
    entries = dict(inner.get(_DICT, ()))
    if _DICT not in entries.get("state", ()):
        has = optimizer.state_dict() if own is None else own
        if not entries or not isinstance(has, Mapping):
            return has
        return {k: _optimizer_like(optimizer, each, has.get(k, ())) for k, each in entries.items()}
    params = _parameters(optimizer)
    saved = dict(entries["state"][_DICT])
    places: dict[object, dict[object, torch.Tensor]] = {}
    for index, node in saved.items():
        if not isinstance(index, int) or index >= len(params):
            continue
        like = params[index]
        places[index] = {
            key: torch.empty_like(like, dtype=getattr(torch, entry["dtype"].removeprefix("torch.")))
            for key, entry in node.get(_DICT, ())
            if _TENSOR in entry and _has_shape(like, entry)
        }
    return {"state": places}


def _is_like(tensor: torch.Tensor, node: Node) -> bool:
    is_same = _has_shape(tensor, node) and str(tensor.dtype) == node["dtype"]
    return is_same or isinstance(tensor, DTensor)


def _has_shape(given: object, node: Node) -> bool:
    if not isinstance(given, torch.Tensor) or is_lazy(given):
        return False
    return [*given.shape] == node.get("shape")


def _versioned(found: dict[Any, Any], like: Mapping[Any, Any]) -> dict[Any, Any]:
    """With what a module's state dict says, beside its entries, of which version its modules are."""
    # Looked for where PyTorch has it: a dict of the user's own may have its keys as attributes, too.
    versions = vars(like).get("_metadata") if isinstance(like, OrderedDict) else None
    if versions is None:
        return found
    answer = OrderedDict(found)
    answer._metadata = versions  # type: ignore[attr-defined]  # noqa: SLF001 PyTorch has no other name for it
    return answer


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor) or _is_stateful(value)


def _once(shards: Iterable[SavedShard]) -> list[SavedShard]:
    # A DTensor on some axes of a mesh alone is saved by each group along the others.
    return list({(shard.fqn, shard.offsets, shard.shape): shard for shard in shards}.values())
