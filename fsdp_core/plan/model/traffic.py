"""Bytes that a rank sends in a step, by mesh axis."""

from __future__ import annotations


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
        """Counts anew."""
        self.sent = {"dp_replicate": 0, "dp_shard": 0, "tp": 0}
        self.collectives = {"dp_replicate": 0, "dp_shard": 0, "tp": 0}
        self.sent_in_groups: dict[int, int] = {}

    def all_gather(self, row: int, ranks: int) -> None:
        """A gather of rows of so many bytes over so many ranks of the shard axis."""
        self._count("dp_shard", row * (ranks - 1))
        if 1 < ranks < self._shards:
            sent = row * (ranks - 1) * self.times
            self.sent_in_groups[ranks] = self.sent_in_groups.get(ranks, 0) + sent

    def reduce_scatter(self, row: int) -> None:
        """A reduction over the shard axis to a row of so many bytes."""
        self._count("dp_shard", row * (self._shards - 1))

    def all_reduce(self, nbytes: int) -> None:
        """A reduction over the replicate axis."""
        self._count("dp_replicate", 2 * nbytes * (self._replicas - 1) // self._replicas)

    def split_matrices(self, nbytes: int, times: int) -> None:
        """What the matrix multiplications over the tp axis send, so many times."""
        self.sent["tp"] += nbytes * times

    def _count(self, axis: str, nbytes: int) -> None:
        if nbytes:
            self.sent[axis] += nbytes * self.times
            self.collectives[axis] += self.times
