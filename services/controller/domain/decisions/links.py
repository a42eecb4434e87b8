"""Which two nodes of a gang do not reach each other, by what the kernels at both ends say of TCP.

A connection whose data was sent again several times without an acknowledgement ends at a host that is off, or
at a link that carries nothing: a process that is stopped or busy does not matter, for its kernel acknowledges.
A host that is off loses its lease, and then the verdict is that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.contract.messages.base import Address
from services.contract.messages.findings import Unanswered
from services.controller.domain.job.attempt import NodeFindings

RETRIES_OF_A_BROKEN_LINK: Final = 3
"""A lossy link loses one packet twice now and then; three times take more than a second."""


@dataclass(frozen=True)
class BrokenLink:
    """What ``rank`` on ``node`` sends to ``other``, where ``other_rank`` is at that end if that is known."""

    node: str
    other: str
    rank: int
    other_rank: int | None
    connection: Unanswered

    @property
    def waits(self) -> str:
        """Who waits for whom."""
        whom = "ranks" if self.other_rank is None else f"rank {self.other_rank}"
        return f"rank {self.rank} on {self.node} waits for {whom} on {self.other}"

    @property
    def evidence(self) -> str:
        """What the kernel counted."""
        tried = self.connection
        there = f"{tried.there.host} port {tried.there.port}"
        what = f"{tried.waiting_bytes} bytes" if tried.is_open else "the opening of a connection"
        return f"{self.waits}: {what} to {there} sent again {tried.retries} times without an answer"


def broken_links(
    parts: Sequence[NodeFindings], addresses: Mapping[str, Sequence[str]]
) -> tuple[BrokenLink, ...]:
    """The links between nodes of the gang that carry nothing, one for each pair of ranks.

    Args:
        parts: What each node found.
        addresses: By node, those by which its ranks connect.
    """
    nodes = _by_address(addresses)
    ends = {_end(each.here): rank for _, rank, each in _connections(parts)}
    found: dict[tuple[str, int, str, int | None], BrokenLink] = {}
    for node, rank, each in _connections(parts):
        other = nodes.get(each.there.host)
        if other is None or other == node or each.retries < RETRIES_OF_A_BROKEN_LINK:
            continue
        link = BrokenLink(node, other, rank, ends.get(_end(each.there)), each)
        found.setdefault((node, rank, other, link.other_rank), link)
    return tuple(found.values())


def in_words(links: Sequence[BrokenLink]) -> str:
    """The pairs of nodes, each once, and who waits for whom."""
    pairs = dict.fromkeys(" and ".join(sorted((link.node, link.other))) for link in links)
    waits = "; ".join(link.waits for link in links)
    return f"nodes {', '.join(pairs)} do not reach each other: {waits}"


def _connections(parts: Sequence[NodeFindings]) -> Iterator[tuple[str, int, Unanswered]]:
    for part in sorted(parts, key=lambda part: part.node_id):
        for rank in sorted(part.findings.ranks, key=lambda rank: rank.rank):
            for each in rank.unanswered:
                yield part.node_id, rank.rank, each


def _by_address(addresses: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The node that has an address; none where several do, as those of one machine have loopback's."""
    nodes: dict[str, list[str]] = {}
    for node, its in addresses.items():
        for address in its:
            nodes.setdefault(address, []).append(node)
    return {address: of[0] for address, of in nodes.items() if len(of) == 1}


def _end(address: Address) -> tuple[str, int]:
    return address.host, address.port
