"""Reads samples of map-style sources and makes batches of them: here, or in worker processes."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import default_collate

from meshloom.data import Batch
from services.worker.rank.data.batches import BatchShapeError
from services.worker.rank.data.order import Integers, Ref
from services.worker.rank.seeds import derive

Collate = Callable[[list[Any]], Batch]
_NUMPY_SEEDS: Final = 1 << 32


class Chosen:
    """Some samples of a data set, as one.

    Args:
        dataset: Map-style.
        indices: Which.
    """

    def __init__(self, dataset: Any, indices: Integers) -> None:  # noqa: ANN401 (as a user wrote it)
        self._dataset = dataset
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int) -> object:
        return self._dataset[self.index(place)]

    def index(self, place: int) -> int:
        """Of the sample at ``place``, in the data set."""
        return int(self._indices[place])


@dataclass(frozen=True)
class SampleReader:
    """What turns references into a batch; it is the same in every process.

    Attributes:
        datasets: The sources.
        collate: From samples to a batch; None: ``default_collate``.
        seed: Of what is random in the samples.
        purpose: What they are read for.
    """

    datasets: Sequence[Any]
    collate: Collate | None
    seed: int
    purpose: str = "sample"

    def batch(self, refs: Sequence[Ref]) -> Batch:
        """The samples of ``refs`` as one batch.

        Raises:
            BatchShapeError: They do not collate.
            Exception: Whatever a data set raises, with a note that names the sample.
        """
        with own_random_state():
            samples = [self.read(ref) for ref in refs]
            return collated(samples, self.collate, lambda place: self.named(refs[place]))

    def read(self, ref: Ref) -> object:
        """One sample, as the data set gives it; within ``own_random_state``."""
        seed_all(derive(self.seed, self.purpose, ref.number))
        try:
            return self.datasets[ref.source][ref.row]
        except Exception as error:
            error.add_note(f"data: raised by {self.named(ref)}")
            raise

    def named(self, ref: Ref) -> str:
        """A sample, in words."""
        dataset = self.datasets[ref.source]
        index = dataset.index(ref.row) if isinstance(dataset, Chosen) else ref.row
        of_source = f" of source {ref.source}" if len(self.datasets) > 1 else ""
        return f"sample {index}{of_source} (number {ref.number} of the job)"


@contextlib.contextmanager
def own_random_state() -> Iterator[None]:
    """What is drawn in the block is not missed afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_all(seed: int) -> None:
    """Seeds the generators of the host; accelerators' are left alone, also in forked processes."""
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    torch.default_generator.manual_seed(seed)


def collated(
    samples: list[Any], collate: Collate | None, name: Callable[[int], str] = str
) -> Batch:
    """A batch of ``samples``.

    Args:
        samples: At least one.
        collate: Makes it; None: ``default_collate``.
        name: In words, the sample at a place.

    Raises:
        BatchShapeError: ``default_collate`` cannot join them; it names two that differ.
    """
    if collate is not None:
        return collate(samples)
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        shapes = [_shapes(sample) for sample in samples]
        other = next((place for place, each in enumerate(shapes) if each != shapes[0]), None)
        said = (
            str(error).splitlines()[0]
            if other is None
            else (f"{name(0)} has {shapes[0]}, {name(other)} has {shapes[other]}")
        )
        raise BatchShapeError(
            f"data.factory: the samples do not make one batch: {said}; give samples of one shape, "
            "or a collate_fn by meshloom.MapSource or a DataLoader"
        ) from error


def _shapes(sample: object) -> str:
    """Kinds and shapes of what a sample has, in words."""
    match sample:
        case torch.Tensor():
            return f"{str(sample.dtype).removeprefix('torch.')} {tuple(sample.shape)}"
        case np.ndarray():
            return f"{sample.dtype} {sample.shape}"
        case dict():
            return ", ".join(f"{name}: {_shapes(value)}" for name, value in sample.items())
        case list() | tuple() if any(isinstance(each, int | float) for each in sample):
            return f"a {type(sample).__name__} of {len(sample)} numbers"
        case list() | tuple():
            return f"({', '.join(map(_shapes, sample))})"
    return type(sample).__name__
