"""Bytes that a rank sends in a step, by mesh axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SharedWay = Literal["copy", "storage"]
"""How ranks of one host exchange through memory that they share."""

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]
AXES: Mapping[str, tuple[Kind, ...]] = {
    "dp_replicate": ("all_reduce",),
    "dp_shard": ("all_gather", "reduce_scatter"),
    "tp": ("all_reduce",),
}


@dataclass(frozen=True)
class Through:
    """What a rank would send over `dp_shard`, but exchanges through memory that ranks of its host share.

    Attributes:
        sent: Bytes that a ring would send.
        copied: Of these those that are copied; not where all ranks compute with one copy.
        count: Of the collectives.
    """

    sent: int
    copied: int
    count: int

    def and_also(self, sent: int, copied: int, count: int) -> Through:
        """With others besides."""
        return Through(self.sent + sent, self.copied + copied, self.count + count)


NOTHING = Through(0, 0, 0)


@dataclass(frozen=True)
class Moved:
    """What a rank sends.

    Attributes:
        sent: Bytes, by axis.
        collectives: How many, by axis.
        reduced: Of those on `dp_shard`, bytes and number of the reductions; the others gather.
        in_groups: Of what is sent over `dp_shard`, bytes by size of the group, for those that
            `reshard_after_forward` makes.
        shared: Of what is sent over `dp_shard`, that which goes through shared memory.
    """

    sent: Mapping[str, int]
    collectives: Mapping[str, int]
    reduced: tuple[int, int]
    in_groups: Mapping[int, int]
    shared: Mapping[tuple[SharedWay, Kind], Through]

    def of(self, axis: str, kind: Kind) -> tuple[int, int]:
        """Bytes and number of the collectives of a kind."""
        sent, count = self.sent[axis], self.collectives[axis]
        if kind == "all_reduce":
            return sent, count
        reduced, reductions = self.reduced
        return self.reduced if kind == "reduce_scatter" else (sent - reduced, count - reductions)


class Traffic:
    """Counts collectives as rings do them.

    Over n ranks a ring sends n - 1 rows for a gather or a reduce-scatter, and twice (n - 1)/n of
    the buffer for an all-reduce.

    Attributes:
        times: How often what comes next happens.
        sent: Bytes so far.
        collectives: Collectives so far.
        sent_in_groups: Of what is sent over the shard axis, bytes within groups of so many ranks.
    """

    def __init__(self, shards: int, replicas: int) -> None:
        self._shards = shards
        self._replicas = replicas
        self.times = 1
        self.clear()

    def clear(self) -> None:
        """Starts the count over."""
        self.sent: dict[str, int] = {"dp_replicate": 0, "dp_shard": 0, "tp": 0}
        self.collectives: dict[str, int] = {"dp_replicate": 0, "dp_shard": 0, "tp": 0}
        self.sent_in_groups: dict[int, int] = {}
        self._reduced = (0, 0)
        self._shared: dict[tuple[SharedWay, Kind], Through] = {}

    @property
    def moved(self) -> Moved:
        """All of it."""
        return Moved(self.sent, self.collectives, self._reduced, self.sent_in_groups, self._shared)

    def all_gather(
        self, row: int, ranks: int, way: SharedWay | Literal["none"], copied: int
    ) -> None:
        """A gather over the shard axis.

        Args:
            row: Bytes of each rank.
            ranks: Of the axis.
            way: Whether through shared memory.
            copied: Of the row, bytes that are copied then.
        """
        self._count("dp_shard", row * (ranks - 1))
        if way != "none":
            self._share(way, "all_gather", row * (ranks - 1), copied * (ranks - 1))
        if 1 < ranks < self._shards:
            sent = row * (ranks - 1) * self.times
            self.sent_in_groups[ranks] = self.sent_in_groups.get(ranks, 0) + sent

    def reduce_scatter(self, row: int, way: SharedWay | Literal["none"]) -> None:
        """A reduction over the shard axis to a row of so many bytes."""
        nbytes = row * (self._shards - 1)
        self._count("dp_shard", nbytes)
        if way != "none":
            self._share(way, "reduce_scatter", nbytes, nbytes)
        if nbytes:
            sent, count = self._reduced
            self._reduced = sent + nbytes * self.times, count + self.times

    def all_reduce(self, nbytes: int) -> None:
        """A reduction over the replicate axis."""
        self._count("dp_replicate", 2 * nbytes * (self._replicas - 1) // self._replicas)

    def split_matrices(self, nbytes: int, times: int) -> None:
        """What the matrix multiplications over the tp axis send, so many times."""
        self.sent["tp"] += nbytes * times

    def _share(self, way: SharedWay, kind: Kind, nbytes: int, copied: int) -> None:
        if nbytes:
            known = self._shared.get((way, kind), NOTHING)
            self._shared[way, kind] = known.and_also(
                nbytes * self.times, copied * self.times, self.times
            )

    def _count(self, axis: str, nbytes: int) -> None:
        if nbytes:
            self.sent[axis] += nbytes * self.times
            self.collectives[axis] += self.times
