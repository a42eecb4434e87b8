"""Models and data of users that know no tokens, named in specs as ``tests.rank.user_vision:…``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from meshloom import DataSource
from meshloom.data import Batch

CLASSES = 4


@dataclass
class Picture:
    pixels: torch.Tensor
    label: torch.Tensor


class Pictures(DataSource):
    """Noise with a bright spot; its place is the class.

    Args:
        kind: How a batch is nested: ``tuple``, ``dict`` or ``dataclass``.
    """

    def __init__(self, kind: str = "tuple") -> None:
        self._kind = kind

    @property
    def digest(self) -> str:
        return "pictures"

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        labels = torch.tensor([(step * 5 + index * 3) % CLASSES for index in indices])
        noise = torch.tensor([[(step * 7 + i * 3 + p) % 11 for p in range(8)] for i in indices])
        pixels = noise / 22 + functional.one_hot(labels, 8)
        match self._kind:
            case "dict":
                return {"pixels": pixels, "labels": labels}
            case "dataclass":
                return Picture(pixels, labels)
        return pixels, labels

    def validation(self) -> Sequence[Batch]:
        return [self.batch(1_000, range(6)), self.batch(1_001, range(4)), self.batch(1_002, [0])]


class Classifier(nn.Module):
    """Pixels ``[samples, 8]`` to logits."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, classes)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            pixels = functional.gelu(block(pixels))
        logits: torch.Tensor = self.head(pixels)
        return logits


class FillsGaps(Classifier):
    """Takes pixels of any dtype, and what is no number for a missing one."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().forward(pixels.float().nan_to_num())


class OfPictures(Classifier):
    """Takes the whole dataclass."""

    def forward(self, picture: Picture) -> torch.Tensor:  # type: ignore[override]  # another batch
        return super().forward(picture.pixels)


class WithLoss(Classifier):
    """Has its loss in its output, as models of transformers have."""

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:  # type: ignore[override]  # as above
        logits = super().forward(pixels)
        return SimpleNamespace(loss=functional.cross_entropy(logits, labels), logits=logits)


def smoothed(output: torch.Tensor, batch: Batch, smoothing: float = 0.0) -> Mapping[str, Any]:
    """A user's loss with metrics beside it."""
    label = batch.label if isinstance(batch, Picture) else batch[-1]
    hits = (output.argmax(1) == label).float().mean()
    loss = functional.cross_entropy(output, label, label_smoothing=smoothing)
    return {"loss": loss, "hits": hits, "largest": output.detach().max()}


def measured(output: torch.Tensor, batch: Batch) -> Mapping[str, Any]:
    """The same with more metrics than a job's record keeps of an evaluation; the last one is telling."""
    told = smoothed(output, batch)
    return {"loss": told["loss"], **{f"m{n:02}": n for n in range(20)}, "z_hits": told["hits"]}


def within(output: torch.Tensor, batch: Batch, best: int = 2) -> Mapping[str, Any]:
    """A user's metrics of evaluations: how often the class is among the ``best``."""
    assert not torch.is_grad_enabled()
    hits = (output.topk(best, dim=1).indices == batch[-1][:, None]).any(1)
    return {f"top_{best}": hits.float().mean(), "samples": len(output)}


def nothing(output: torch.Tensor, batch: Batch) -> None:
    """No loss at all."""
