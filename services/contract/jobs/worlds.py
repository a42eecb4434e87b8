"""How many ranks an elastic job can have: the arithmetic of meshes and batches, in integers alone."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass


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


@functools.lru_cache(maxsize=1024)
def possible_worlds(share: Share, least: int, most: int) -> Sequence[int]:
    """The numbers of ranks from ``least`` to ``most`` that share a step out evenly, ascending."""
    first = -(-least // share.copy) * share.copy
    if share.batch is None:  # there may be 65 536 of them, and a thousand such answers are kept
        return range(first, most + 1, share.copy)
    last = min(most, share.batch * share.tp)
    return tuple(
        n
        for n in range(first, last + 1, share.copy)
        if _is_even(share.batch, share.micro, n // share.tp)
    )


def _is_even(batch: int, micro: int | None, data_ranks: int) -> bool:
    each, rest = divmod(batch, data_ranks)
    return rest == 0 and (micro is None or each % micro == 0)
