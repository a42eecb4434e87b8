"""Seeds drawn from the job's seed and words that name a purpose.

Purposes are independent of each other and of the order in which they are asked for, which is what
makes a run independent of the number of ranks.
"""

import hashlib
from typing import Final

_SEED_BYTES: Final = 8
_SEED_MASK: Final = (1 << 63) - 1


def derive(seed: int, *words: str | int) -> int:
    """A seed of 63 bits for the purpose that ``words`` name."""
    text = "\0".join(str(word) for word in (seed, *words))
    raw = hashlib.sha256(text.encode()).digest()[:_SEED_BYTES]
    return int.from_bytes(raw, "little") & _SEED_MASK
