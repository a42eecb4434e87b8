"""How many ranks an elastic job can have: the arithmetic of meshes and batches, in integers alone."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from math import isqrt
from typing import Final

# The largest batch of a spec has a smaller root.
_END_OF_SMALL: Final = 1 << 15


@dataclass(frozen=True)
class Share:
    """What the number of ranks must go into.

    Attributes:
        copy: Ranks that hold one copy of the parameters together; worlds are multiples of it.
        tp: Ranks that see the same sequences; it divides ``copy``.
        batch: Sequences of a step over all ranks; None: any number of ranks can share it out.
        micro: Sequences of one pass on a rank; None: as many as suit it.
    """

    copy: int
    tp: int
    batch: int | None
    micro: int | None


def possible_worlds(share: Share, least: int, most: int) -> Sequence[int]:
    """The numbers of ranks from ``least`` to ``most`` that share a step out evenly, ascending."""
    if share.batch is None:
        first = -(-least // share.copy) * share.copy
        return range(first, most + 1, share.copy)
    # With so many copies each rank has whole passes: they divide the passes of a step that all ranks make at once.
    passes, rest = divmod(share.batch, (share.micro or 1) * (share.copy // share.tp))
    if rest:
        return ()
    return tuple(
        copies * share.copy for copies in _divisors(passes) if least <= copies * share.copy <= most
    )


# Asked of each job that waits at each look of the scheduler: of more of them than may wait at a time.
@functools.lru_cache(maxsize=1 << 15)
def fewest_ranks(share: Share, least: int, most: int) -> int:
    """The first of `possible_worlds`.

    Raises:
        ValueError: There is none.
    """
    return min(possible_worlds(share, least, most))


# There are thousands of jobs, each with a batch of its own: neither all numbers of ranks nor all numbers below
# a root are tried.
@functools.lru_cache(maxsize=1024)
def _divisors(number: int) -> Sequence[int]:
    """All of them, ascending."""
    found, rest = [1], number
    for prime in chain(_small_primes(), count(_END_OF_SMALL + 1, 2)):
        if prime * prime > rest:
            break
        found, rest = _with_powers(found, prime, rest)
    if rest > 1:
        found, _ = _with_powers(found, rest, rest)
    return tuple(sorted(found))


def _with_powers(found: list[int], prime: int, rest: int) -> tuple[list[int], int]:
    """The divisors with each power of ``prime`` that goes into ``rest``, and ``rest`` without them."""
    power, made = 1, list(found)
    while rest % prime == 0:
        rest, power = rest // prime, power * prime
        made += [each * power for each in found]
    return made, rest


@functools.cache
def _small_primes() -> Sequence[int]:
    is_prime = bytearray([1]) * _END_OF_SMALL
    for each in range(2, isqrt(_END_OF_SMALL) + 1):
        is_prime[each * each :: each] = bytes(len(range(each * each, _END_OF_SMALL, each)))
    return [each for each in range(2, _END_OF_SMALL) if is_prime[each]]
