"""In which order samples are trained on: a function of the seed and the number of the sample.

Numbers count the samples of all ranks through the whole job. Nothing here knows ranks or steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from services.worker.rank.seeds import derive

Integers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS: Final = 8
_COUNTED_AT_ONCE: Final = 1 << 20
_BITS: Final = 64
# Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014), its finalizer.
_FACTORS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))


class Ref(NamedTuple):
    """A sample: its number in the job, and its row in a source."""

    number: int
    source: int
    epoch: int
    row: int


@dataclass(frozen=True)
class Position:
    """How many samples were taken, and how many of them from each source."""

    samples: int
    taken: tuple[int, ...]


def hashed(values: npt.NDArray[np.integer], key: int) -> _Words:
    """64 bits of each value under ``key``, the same in every version of every library."""
    words: _Words = values.astype(np.uint64) + np.uint64(key)
    words = (words ^ (words >> _SHIFTS[0])) * _FACTORS[0]
    words = (words ^ (words >> _SHIFTS[1])) * _FACTORS[1]
    return words ^ (words >> _SHIFTS[2])


def permuted(places: npt.NDArray[np.integer], length: int, keys: Sequence[int]) -> Integers:
    """Where ``places`` of 0 .. length - 1 go in a permutation of these; no table of it is made.

    A Feistel network over the next power of 4, repeated for what it sends beyond ``length``
    (Black, Rogaway: Ciphers with arbitrary finite domains, 2002).

    Args:
        places: Any of them, in any order.
        length: How many there are.
        keys: One a round; they choose the permutation.
    """
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    found = places.astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        left, right = found[outside] >> shift, found[outside] & mask
        for key in keys:
            left, right = right, left ^ (hashed(right, key) & mask)
        found[outside] = (left << shift) | right
        outside = outside[found[outside] >= length]
    return found.astype(np.int64)


class SampleOrder:
    """Which sample each number is.

    Args:
        lengths: Samples of each source; all above 0.
        weights: Odds of each source.
        seed: The job's.
        shuffled: Of each source, whether its epochs are permuted.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        weights: Sequence[float],
        seed: int,
        shuffled: Sequence[bool] | None = None,
    ) -> None:
        self._lengths = tuple(lengths)
        self._shuffled = tuple(shuffled) if shuffled is not None else (True,) * len(lengths)
        self._seed = seed
        shares = np.cumsum(np.asarray(weights, dtype=np.float64) / np.sum(weights))[:-1]
        self._limits = np.array(
            [min(int(share * (1 << _BITS)), (1 << _BITS) - 1) for share in shares], dtype=np.uint64
        )
        self._key = derive(seed, "mixture")
        self._keys = lru_cache(maxsize=64)(self._round_keys)

    @property
    def start(self) -> Position:
        """Before the first sample."""
        return Position(0, (0,) * len(self._lengths))

    def after(self, position: Position, count: int) -> Position:
        """``count`` samples later."""
        samples, taken = position.samples, np.array(position.taken, dtype=np.int64)
        end = samples + count
        if len(taken) == 1:
            return Position(end, (end,))
        while samples < end:
            stop = min(end, samples + _COUNTED_AT_ONCE)
            taken += np.bincount(self._sources(samples, stop), minlength=len(taken))
            samples = stop
        return Position(end, tuple(taken.tolist()))

    def refs(self, position: Position, places: range) -> list[Ref]:
        """The samples at ``places`` (from 0, in a row) after ``position``."""
        begin = self.after(position, places.start)
        first, last = begin.samples, begin.samples + len(places)
        sources = self._sources(first, last)
        epochs, indices = np.empty_like(sources), np.empty_like(sources)
        for source, length in enumerate(self._lengths):
            (here,) = np.nonzero(sources == source)
            own = begin.taken[source] + np.arange(len(here))
            epochs[here], indices[here] = own // length, self._indices(source, own)
        columns = (range(first, last), sources.tolist(), epochs.tolist(), indices.tolist())
        return [Ref(*each) for each in zip(*columns, strict=True)]

    def _sources(self, first: int, last: int) -> Integers:
        if not len(self._limits):
            return np.zeros(last - first, dtype=np.int64)
        drawn = hashed(np.arange(first, last), self._key)
        return np.searchsorted(self._limits, drawn, side="right").astype(np.int64)

    def _indices(self, source: int, numbers: Integers) -> Integers:
        length = self._lengths[source]
        places = numbers % length
        if not self._shuffled[source]:
            return places
        found, epochs = np.empty_like(places), numbers // length
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            found[here] = permuted(places[here], length, self._keys(source, epoch))
        return found

    def _round_keys(self, source: int, epoch: int) -> tuple[int, ...]:
        return tuple(derive(self._seed, "order", source, epoch, each) for each in range(_ROUNDS))


def held_out(length: int, fraction: float) -> tuple[Integers, Integers]:
    """The indices of 0 .. length - 1 to train on, and those that a hash of the index holds out."""
    indices = np.arange(length)
    limit = np.uint64(int(fraction * (1 << _BITS)))
    validates = hashed(indices, derive(0, "validation")) < limit
    return indices[~validates], indices[validates]
