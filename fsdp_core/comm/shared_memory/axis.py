"""Collectives of one mesh axis whose ranks share memory: who has started which, and who has ended.

Every rank numbers its collectives in the order in which it starts them, and announces each in a
segment that only it writes: number and name in a ring of entries, then the number in a counter. Before a
rank reads what another has shared, it waits for the counter, and compares the names: ranks that went
different ways are named at once, before data of one unit is taken for another's.
"""

from __future__ import annotations

import logging
import struct
import weakref
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

import torch
import torch.distributed as dist

from fsdp_core import torch_private
from fsdp_core.comm.shared_memory.futex import Counters
from fsdp_core.comm.shared_memory.peers import Meeting, Peers, meet
from fsdp_core.errors import DesyncError, PeerError, StateError

if TYPE_CHECKING:
    import mmap


_LOGGER = logging.getLogger("fsdp_core")

_STARTED: Final = 0
_COUNTERS: Final = 16
"""Words of a rank; the one that is used lies in a cache line that no other rank writes."""
_ENTRIES: Final = 1024
_ENTRY: Final = struct.Struct("<QQQ224s")
"""Number, digest of the name, place of what is shared, and the name."""
_HEAD: Final = struct.Struct("<QQQ")
"""An entry without its name."""
_RING_START: Final = 4096
_ENDED_START: Final = _RING_START + _ENTRIES * _ENTRY.size
_BOXES_START: Final = _ENDED_START + _ENTRIES * 4
_SEGMENT_BYTES: Final = 1 << 40
"""Address space, not memory: pages take memory when they are first written."""
_PAGE: Final = 4096
_LOOK_S: Final = 0.25
_LOGGED_AFTER_S: Final = 20.0
GIVEN_UP_AFTER_S: Final = 1800.0
"""As long as a process group waits for a collective by default."""


@dataclass
class OutBox:
    """Memory in which this rank leaves what others take in one reduction at a time.

    Attributes:
        place: In this rank's segment.
        nbytes: Of it.
        in_use: Whether this rank has yet to end the reduction.
        number: Of the last collective that it served; others may have yet to end it.
    """

    place: int
    nbytes: int
    in_use: bool = False
    number: int = 0


class SharedMemoryAxis:
    """The ranks of one process group, which share memory.

    Args:
        peers: The others.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.rank = peers.rank
        self.size = peers.size
        self._segments = peers.exchange(_SEGMENT_BYTES)
        self._counters = [Counters(segment, 0, _COUNTERS) for segment in self._segments]
        # One word for each entry of the ring: the number of the collective once the rank has ended it.
        self._ends = [Counters(segment, _ENDED_START, _ENTRIES) for segment in self._segments]
        self._started = 0
        self._compared = [0] * peers.size
        self._boxes: list[OutBox] = []
        self._boxes_end = _BOXES_START

    # -- Collectives in order

    def start(self, what: str, box: OutBox | None = None) -> int:
        """Announces this rank's next collective; returns its number, from 1.

        Args:
            what: The same words on all ranks that are in step.
            box: Where the others find what it shares, if it is a reduction.
        """
        self._started += 1
        number = self._started
        if box is not None:
            box.number = number
        digest, name = _named(what)
        at = _RING_START + number % _ENTRIES * _ENTRY.size
        place = 0 if box is None else box.place
        _ENTRY.pack_into(self._segments[self.rank], at, number, digest, place, name)
        self._ends[self.rank].set(number % _ENTRIES, number - 1)
        self._counters[self.rank].publish(_STARTED, number)
        return number

    def await_started(self, number: int, what: str) -> tuple[int, ...]:
        """Waits until all ranks have started collective `number`; each waits for it once.

        Returns:
            Where each rank's segment has what it shares.

        Raises:
            DesyncError: A rank has started another collective in its place.
            PeerError: A rank has ended, or did not start it for half an hour.
            StateError: So many were started since that nobody knows of it any more.
        """
        places = []
        for rank in range(self.size):
            if rank != self.rank:
                self._await(rank, self._counters[rank], _STARTED, number, what)
                self._compare(rank, number)
            known, _, place = self._head(rank, number)
            if known != number:
                raise StateError(
                    f"{_ENTRIES} collectives of group {self.peers.name!r} were started after the "
                    f"{what}, which this rank waits for only now. Wait for gathers (UnshardHandle.wait) "
                    "before so many more are started."
                )
            places.append(place)
        return tuple(places)

    def _compare(self, rank: int, last: int) -> None:
        """Compares what both have started up to number `last` and was not compared yet.

        A wrong guess of what comes next is started and never waited for, but counts.
        """
        for number in range(self._compared[rank] + 1, last + 1):
            if not self._counters[rank].has_reached(_STARTED, number):
                return
            theirs, mine = self._head(rank, number), self._head(self.rank, number)
            if theirs[:2] != mine[:2] and theirs[0] == mine[0] == number:
                names = [self._name(each, number) for each in (self.rank, rank)]
                raise DesyncError(
                    f"Ranks ran different units: collective number {number} is the {names[0]} on rank "
                    f"{self.rank}, but the {names[1]} on rank {rank}. Run every unit on every "
                    "rank, if necessary on a part of the batch that does not count."
                )
            self._compared[rank] = number

    def _head(self, rank: int, number: int) -> tuple[int, int, int]:
        at = _RING_START + number % _ENTRIES * _ENTRY.size
        return cast("tuple[int, int, int]", _HEAD.unpack_from(self._segments[rank], at))

    def _name(self, rank: int, number: int) -> str:
        at = _RING_START + number % _ENTRIES * _ENTRY.size
        name: bytes = _ENTRY.unpack_from(self._segments[rank], at)[3]
        return name.rstrip(b"\0").decode(errors="replace")

    def wait_for_others(self, words: list[Counters], index: int, value: int, what: str) -> None:
        """Waits until a word of every other rank has reached `value`.

        Args:
            words: By rank.
            index: Which of their words.
            value: To reach.
            what: For messages: what they have yet to do.

        Raises:
            PeerError: As `await_started`.
        """
        for rank, counters in enumerate(words):
            if rank != self.rank:
                self._await(rank, counters, index, value, what)

    # -- Reductions

    def take_box(self, nbytes: int) -> OutBox:
        """Memory of `nbytes` or more that no other rank reads any more."""
        suited = [box for box in self._boxes if box.nbytes >= nbytes and not box.in_use]
        box = next((box for box in suited if self._have_ended(box)), None)
        if box is None and len(suited) > 1:
            # The others will end it soon. Not one that keeps a model whose backward raised, or whose
            # garbage was not collected yet: it may itself wait for what this rank does next.
            oldest = min(suited, key=lambda each: each.number)
            box = oldest if self._have_ended(oldest, within_s=_LOOK_S) else None
        if box is None:
            size = -(-nbytes // _PAGE) * _PAGE
            box = OutBox(self._boxes_end, size)
            self._boxes_end += size
            self._boxes.append(box)
        box.in_use = True
        return box

    def give_back(self, box: OutBox) -> None:
        """This rank has ended the reduction: it reads no other rank's box of it any more."""
        ended = self._ends[self.rank]
        if not ended.has_reached(box.number % _ENTRIES, box.number):
            ended.publish(box.number % _ENTRIES, box.number)
        box.in_use = False

    def view(self, rank: int, place: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements of a rank's segment, 1D."""
        return elements_of(self._segments[rank], place, numel, dtype)

    def _have_ended(self, box: OutBox, within_s: float = 0.0) -> bool:
        """Whether all others have ended what `box` served, or each does so within a time."""
        number = box.number
        others = (ended for rank, ended in enumerate(self._ends) if rank != self.rank)
        if within_s == 0:
            return all(ended.has_reached(number % _ENTRIES, number) for ended in others)
        return all(ended.wait(number % _ENTRIES, number, within_s) for ended in others)

    # -- Waiting

    def raise_if_ended(self, what: str) -> None:
        """Looks whether all other ranks still run.

        Args:
            what: For the message: what this rank is doing.

        Raises:
            PeerError: A rank has ended.
        """
        for peer in self.peers.others:
            if peer.has_ended:
                raise self._ended(peer.rank, what)

    def _ended(self, rank: int, what: str) -> PeerError:
        return PeerError(
            f"Rank {rank} of group {self.peers.name!r} ended while rank {self.rank} waited "
            f"for it in the {what}. Look at its log for why."
        )

    def _await(self, rank: int, counters: Counters, index: int, value: int, what: str) -> None:
        if counters.has_reached(index, value) or counters.wait(index, value, _LOOK_S):
            return
        began, is_logged = monotonic(), False
        peer = next(each for each in self.peers.others if each.rank == rank)
        while not counters.wait(index, value, _LOOK_S):
            waited = monotonic() - began
            self._compare(rank, self._started)  # it may never start what is waited for
            # What it did before it ended counts.
            if peer.has_ended and not counters.has_reached(index, value):
                raise self._ended(rank, what)
            if waited > GIVEN_UP_AFTER_S:
                raise PeerError(
                    f"Rank {rank} of group {self.peers.name!r} has not taken part in the {what} for "
                    f"{GIVEN_UP_AFTER_S:g} s. Look at its log and its stack."
                )
            if waited > _LOGGED_AFTER_S and not is_logged:
                is_logged = True
                _LOGGER.warning(
                    "Rank %d waits for rank %d to take part in the %s. A rank that raised, or took "
                    "another branch, never will: see its log.",
                    self.rank,
                    rank,
                    what,
                )


def elements_of(segment: mmap.mmap, place: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over a part of a segment, 1D, with a storage of its own."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)  # which no buffer can be the memory of
    return torch.frombuffer(segment, dtype=dtype, count=numel, offset=place)


@dataclass(frozen=True)
class HostAxes:
    """How ranks of a group reach each other.

    Attributes:
        within: Those of this rank's host.
        hosts: How many hosts there are.
        host: Which of them this rank is on.
        across: The ranks that have this one's place on their hosts; None: there is one host.
    """

    within: SharedMemoryAxis
    hosts: int
    host: int
    across: torch_private.Gloo | None


_axes: weakref.WeakKeyDictionary[dist.ProcessGroup, HostAxes | None] = weakref.WeakKeyDictionary()


def host_axes_of(group: dist.ProcessGroup | None, part_of_host: str = "") -> HostAxes | None:
    """How ranks of a group share memory by host, found out at the first call, which is collective.

    Whatever later calls say, `part_of_host` is that of the first.

    None where they cannot, for a group of one rank, which shares nothing, and for one that is not of
    gloo: ranks of the fake backend, for example, are not there.
    """
    if group is None or group.size() == 1 or "gloo" not in dist.get_backend(group):
        return None
    if group not in _axes:
        _axes[group] = _connected(group, part_of_host)
    return _axes[group]


def _connected(group: dist.ProcessGroup, part_of_host: str) -> HostAxes | None:
    meeting = meet(group, part_of_host)
    problem = meeting if isinstance(meeting, str) else ""
    axes = None
    if isinstance(meeting, Meeting):
        peers = meeting.peers
        try:
            axes = _axes_of(group, meeting)
        except (OSError, RuntimeError) as error:
            problem = f"rank {group.rank()}: {error}"
        problem = peers.agree(problem)
        if len(meeting.hosts) > 1:
            problem = _of_all_hosts(group, meeting, problem)
        if problem:
            peers.close()
    if not problem:
        return axes
    if group.rank() == 0:
        _LOGGER.warning(
            "Ranks of group %r share no memory, and communicate by its process group: %s.",
            group.group_name,
            problem,
        )
    return None


def _axes_of(group: dist.ProcessGroup, meeting: Meeting) -> HostAxes:
    within, hosts = SharedMemoryAxis(meeting.peers), meeting.hosts
    if len(hosts) == 1:
        return HostAxes(within, 1, 0, None)
    host = next(index for index, ranks in enumerate(hosts) if group.rank() in ranks)
    store = torch_private.store_within(f"across/{within.rank}", meeting.store)
    return HostAxes(within, len(hosts), host, torch_private.Gloo(store, host, len(hosts)))


def _of_all_hosts(group: dist.ProcessGroup, meeting: Meeting, problem: str) -> str:
    meeting.store.set(f"problem/{group.rank()}", problem)
    said = [meeting.store.get(f"problem/{rank}").decode() for rank in range(group.size())]
    return next((each for each in said if each), "")


@lru_cache(maxsize=65_536)
def _named(what: str) -> tuple[int, bytes]:
    encoded = what.encode()
    return int.from_bytes(blake2b(encoded, digest_size=8).digest(), "big"), encoded[:224]
