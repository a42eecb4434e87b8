"""A rank's state from the memory of a living one that has the same: no storage takes part."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from services.worker.rank.checkpoints.state import TrainedParts, TrainingState, capture, restore


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


def filled(parts: TrainedParts, text: bytes, receive: Callable[[torch.Tensor], None]) -> int:
    """Fills freshly built parts with a state, and returns its step.

    Args:
        parts: Of this rank.
        text: Of the rank that has the same place in its replica.
        receive: Fills bytes on the host with the next tensor.
    """
    told = json.loads(text)
    tensors = {}
    for name, (dtype, shape) in told["tensors"].items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        receive(tensor.reshape(-1).view(torch.uint8))
        tensors[name] = tensor
    restore(parts, [_Received(told["text"], tensors)])
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


def _word(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
