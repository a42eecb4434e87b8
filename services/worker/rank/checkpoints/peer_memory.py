"""A rank's state from the memory of a living one that has the same: no storage takes part."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from services.worker.rank.checkpoints.state import (
    TrainedParts,
    TrainingState,
    about_of,
    as_text,
    capture,
    restore,
)


def packed(
    parts: TrainedParts, step: int, position: Mapping[str, Any]
) -> tuple[bytes, Sequence[torch.Tensor]]:
    """The state after ``step`` steps, as a text and bytes of tensors, in the order in which it names them.

    ``position``: in the data after that step, which may have been read beyond.
    """
    state: TrainingState = capture(parts, step, None, whole_everywhere=True)
    about = {name: [_word(each), list(each.shape)] for name, each in state.tensors.items()}
    told = {
        "step": step,
        "position": dict(position),
        "text": dict(state.text),
        "tensors": about,
    }
    text = json.dumps(told)
    return text.encode(), [_as_bytes(each) for each in state.tensors.values()]


def filled(
    parts: TrainedParts, texts: Sequence[bytes], receive: Callable[[torch.Tensor], None]
) -> int:
    """Fills freshly built parts with a state, and returns its step.

    Args:
        parts: Of this rank.
        texts: Of the rank that has the same place in its replica, and then of the others of that replica.
        receive: Fills bytes on the host with the next tensor of the first.
    """
    told, *others = (json.loads(text) for text in texts)
    tensors = {}
    for name, (dtype, shape) in told["tensors"].items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        receive(tensor.reshape(-1).view(torch.uint8))
        tensors[name] = tensor
    own = _Received(told["text"], tensors)
    restore(parts, [own, *_elsewhere(own, [each["text"] for each in others])])
    if parts.data is not None:
        parts.data.restore(told["position"], told["step"])
    return int(told["step"])


class _Received:
    """What a peer sent, read as a file of a checkpoint is."""

    def __init__(self, metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> None:
        self.metadata = metadata
        self._tensors = tensors

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        return self._tensors[name]

    def part(self, name: str, slices: tuple[slice, ...]) -> Any:  # noqa: ANN401 a tensor
        """A part of it."""
        return self._tensors[name][slices]


def _elsewhere(own: _Received, texts: Sequence[Mapping[str, str]]) -> list[_Received]:
    """Where the rest of tensors lies of which a rank has a part: nothing of it is read."""
    known = {name: [box] for name, box in about_of(own)["boxes"].items()}
    readers = []
    for text in texts:
        about = about_of(_Received(text, {}))
        # All ranks have what is not sharded, and those of a tensor-parallel group may have the same.
        boxes = {
            name: box for name, box in about["boxes"].items() if box not in known.get(name, ())
        }
        for name, box in boxes.items():
            known.setdefault(name, []).append(box)
        readers.append(_Received(as_text({**about, "boxes": boxes}), {}))
    return readers


def _word(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
