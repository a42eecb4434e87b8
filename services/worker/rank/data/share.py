"""Which part of every global batch is a rank's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """A rank among those that train on different data.

    Attributes:
        per_rank: Samples of a step on each.
        rank: This one.
        ranks: How many there are.
    """

    per_rank: int
    rank: int
    ranks: int

    @property
    def whole(self) -> int:
        """Samples of a step on all."""
        return self.per_rank * self.ranks

    @property
    def places(self) -> range:
        """This rank's in the global batch."""
        return range(self.rank * self.per_rank, (self.rank + 1) * self.per_rank)
