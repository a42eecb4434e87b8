"""Data sets as users of PyTorch write them, named in specs as ``tests.rank.user_sets:…``."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from meshloom import MapSource
from meshloom.data import Batch

CLASSES = 4


def pictures(count: int) -> TensorDataset:
    """Noise with a bright spot; its place is the class."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.rand(count, 8, generator=generator)
    return TensorDataset(noise + functional.one_hot(labels, 8), labels)


class Shaken(Dataset[Batch]):
    """Pictures with noise that is drawn again whenever one is read."""

    def __init__(self, count: int) -> None:
        self._pictures = pictures(count)

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> Batch:
        pixels, label = self._pictures[index]
        return pixels + 0.1 * torch.randn(8), label


def pair(count: int = 20) -> tuple[Dataset[Any], Dataset[Any]]:
    return Shaken(count), pictures(10)


class Flow(IterableDataset[Batch]):
    """Pictures one after the other, in an order that is drawn when an epoch begins."""

    def __init__(self, count: int = 20) -> None:
        self._pictures = pictures(count)

    def __iter__(self) -> Iterator[Batch]:
        for index in torch.randperm(len(self._pictures)).tolist():
            yield self._pictures[index]


def with_workers(count: int = 20, folder: str | None = None) -> MapSource:
    """The same, read ahead by a process that leaves its number in ``folder``."""

    def note(_: int) -> None:
        if folder is not None:
            (Path(folder) / f"worker-{os.getpid()}").touch()

    return MapSource(dataset=Shaken(count), validation=pictures(10), workers=1, worker_init_fn=note)


def weighted() -> DataLoader[Any]:
    """Pictures with a sampler that prefers some of them."""
    chosen = WeightedRandomSampler([1.0, 2.0] * 6, num_samples=12)
    return DataLoader(pictures(12), batch_size=4, sampler=chosen)


class Wide(Dataset[Batch]):
    """Tokens of which sample 3 has one beyond what a model of bytes embeds."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Batch:
        tokens = torch.arange(9) + index
        return tokens + 1_000 * (index == 3)


def spoilt(kind: str) -> Dataset[Any]:
    """Pictures in bytes or in float64, or with a number that is none in sample 7."""
    pixels, labels = pictures(12).tensors
    if kind == "nan":
        pixels[7, 2] = torch.nan
        return TensorDataset(pixels, labels)
    return TensorDataset(pixels.to(torch.float64 if kind == "double" else torch.uint8), labels)
