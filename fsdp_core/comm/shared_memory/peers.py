"""Ranks of one host find each other, and pass each other memory.

Memory is passed as descriptors of anonymous files (memfd) over Unix sockets: it has no name that could
outlive the processes, and the kernel frees it with the last process that maps it.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import socket
import struct
import weakref
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from fsdp_core import torch_private
from fsdp_core.comm.shared_memory import futex
from fsdp_core.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]  # PyTorch does not list it

_PREFIX: Final = "fsdp_core/shared_memory"
_UNSUPPORTED: Final = "some are not on Linux, or their kernel lacks the required calls"
_MEETING_S: Final = 60.0
_CREDENTIALS: Final = struct.Struct("3i")
_HEAD: Final = struct.Struct("<iQ")
"""Of a passed segment: the sender's rank, and bytes."""
_PROBLEM_BYTES: Final = 512
_SECRET_BYTES: Final = 16
_HELLO: Final = struct.Struct(f"<i{_SECRET_BYTES}s")
"""Of a connection: the caller's rank, and what only ranks of the group know."""


@dataclass(frozen=True)
class Peer:
    """Another rank of the group.

    Attributes:
        rank: In the group.
        channel: To it.
        process: A descriptor that is readable once it has ended.
    """

    rank: int
    channel: socket.socket
    process: int

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone, by whatever way."""
        ready, _, _ = select.select([self.process], [], [], 0)
        return bool(ready)


class Peers:
    """The other ranks of a process group, all on this host.

    Args:
        name: Of the group, for messages.
        rank: This process's.
        others: By rank.
    """

    def __init__(self, name: str, rank: int, others: Mapping[int, Peer]) -> None:
        self.name = name
        self.rank = rank
        self._others = dict(others)
        self._closed = weakref.finalize(self, _close, list(others.values()))

    @property
    def size(self) -> int:
        """Ranks, this one included."""
        return len(self._others) + 1

    @property
    def others(self) -> tuple[Peer, ...]:
        """All but this rank, in the order of ranks."""
        return tuple(self._others[rank] for rank in sorted(self._others))

    def exchange(self, nbytes: int) -> tuple[mmap.mmap, ...]:
        """Makes a segment of zeros here and maps those of all ranks; collective.

        Args:
            nbytes: Of each; pages take memory when they are first written.

        Returns:
            By rank, each readable and writable.

        Raises:
            PeerError: A rank has ended, or asks for another size.
            OSError: There is no memory or no descriptor.
        """
        with ExitStack() as stack:
            maps = {self.rank: self._offer(nbytes, stack)}
            for peer in self.others:
                maps[peer.rank] = _mapped(self._receive(peer, nbytes, stack), nbytes)
        return tuple(maps[rank] for rank in range(self.size))

    def share(self, nbytes: int) -> mmap.mmap:
        """Maps one segment of zeros into all ranks; collective. Errors as of `exchange`."""
        with ExitStack() as stack:
            if self.rank != 0:
                return _mapped(self._receive(self._others[0], nbytes, stack), nbytes)
            return self._offer(nbytes, stack)

    def agree(self, problem: str) -> str:
        """The problems of all ranks, "" if none has one; collective."""
        encoded = problem.encode()[:_PROBLEM_BYTES].ljust(_PROBLEM_BYTES, b"\0")
        problems = {self.rank: problem}
        for peer in self.others:
            with suppress(OSError):  # one that has ended is found below
                peer.channel.sendall(encoded)
        for peer in self.others:
            try:
                said = peer.channel.recv(_PROBLEM_BYTES, socket.MSG_WAITALL)
            except OSError:
                said = b""
            ended = f"rank {peer.rank} ended"
            problems[peer.rank] = said.rstrip(b"\0").decode(errors="replace") if said else ended
        return "; ".join(problems[rank] for rank in sorted(problems) if problems[rank])

    def close(self) -> None:
        """Closes what leads to the others; so does the end of this object."""
        self._closed()

    def _offer(self, nbytes: int, stack: ExitStack) -> mmap.mmap:
        try:
            mine = _new_file(nbytes, stack)
            mapped = _mapped(mine, nbytes)
        except OSError:
            for peer in self.others:  # which would wait for it
                with suppress(OSError):
                    peer.channel.sendall(_HEAD.pack(self.rank, 0))
            raise
        for peer in self.others:
            try:
                socket.send_fds(peer.channel, [_HEAD.pack(self.rank, nbytes)], [mine])
            except OSError as error:
                raise self._lost(peer) from error
        return mapped

    def _receive(self, peer: Peer, nbytes: int, stack: ExitStack) -> int:
        try:
            head, files, _, _ = socket.recv_fds(peer.channel, _HEAD.size, 1)
        except OSError as error:
            raise self._lost(peer) from error
        for file in files:
            stack.callback(os.close, file)
        if len(head) != _HEAD.size:
            raise self._lost(peer)
        if not files:
            raise PeerError(
                f"Rank {peer.rank} of group {self.name!r} has no memory to share: of {nbytes} bytes, "
                "or of address space. Look at its log."
            )
        if (theirs := _HEAD.unpack(head)) != (peer.rank, nbytes):
            raise PeerError(
                f"Rank {self.rank} of group {self.name!r} shares {nbytes} bytes, but rank "
                f"{peer.rank} shares {theirs[1]}. Shard the same units in the same order on every "
                "rank."
            )
        return files[0]

    def _lost(self, peer: Peer) -> PeerError:
        return PeerError(
            f"Rank {peer.rank} of group {self.name!r} ended, or did not answer in "
            f"{_MEETING_S:g} s, while rank {self.rank} shared memory with it. Look at its log."
        )


@dataclass(frozen=True)
class Meeting:
    """What ranks of a group have learnt of each other.

    Attributes:
        peers: Those of this rank's host, numbered there in the order of the group.
        hosts: Ranks of the group by host, equally many on each and side by side.
        store: For what this group has to tell besides.
    """

    peers: Peers
    hosts: tuple[tuple[int, ...], ...]
    store: Store


def meet(group: dist.ProcessGroup, part_of_host: str) -> Meeting | str:
    """Connects the ranks of a group that are on one host, and on the same part of it; collective.

    Returns:
        On all ranks alike, why they cannot share memory if they cannot: hosts have one rank each, or
        different numbers, or the platform lacks what it takes.
    """
    rank, ranks = group.rank(), range(group.size())
    store = torch_private.default_store()
    generation = store.add(f"{_PREFIX}/{group.group_name}/{dist.get_rank()}", 1)
    prefix = f"{_PREFIX}/{group.group_name}/{generation}"

    def tell(topic: str, value: str) -> list[str]:
        store.set(f"{prefix}/{topic}/{rank}", value)
        return [store.get(f"{prefix}/{topic}/{each}").decode() for each in ranks]

    with ExitStack() as stack:
        address, listener = _listen(stack)
        secret = secrets.token_bytes(_SECRET_BYTES)
        host = _host()
        told = json.dumps([host and f"{host} {part_of_host}", address, secret.hex()])
        facts = [json.loads(each) for each in tell("host", told)]
        hosts = _by_host([host for host, _, _ in facts])
        if isinstance(hosts, str):
            return hosts
        if listener is None:
            return _UNSUPPORTED
        mine = next(each for each in hosts if rank in each)
        others: dict[int, Peer] = {}
        problem = ""
        try:
            doors = [(facts[each][1], bytes.fromhex(facts[each][2])) for each in mine]
            others = _connect(mine.index(rank), doors, listener)
        except OSError as error:
            problem = f"rank {rank} could not connect: {error}"
        problems = [each for each in tell("outcome", problem) if each]
    name = group.group_name if len(hosts) == 1 else f"{group.group_name} (ranks of one host)"
    peers = Peers(name, mine.index(rank), others)
    if problems:
        peers.close()
        return problems[0]
    return Meeting(peers, hosts, torch_private.store_within(prefix, store))


def _by_host(hosts: Sequence[str]) -> tuple[tuple[int, ...], ...] | str:
    """Ranks by host, or why their hosts are of no use."""
    if "" in hosts:
        return _UNSUPPORTED
    ranks = [
        tuple(rank for rank, _ in of_host)
        for _, of_host in groupby(enumerate(hosts), key=lambda each: each[1])
    ]
    sizes = {len(each) for each in ranks}
    if len(ranks) > len(set(hosts)) or len(sizes) > 1:
        return "hosts have different numbers of them, or have them not side by side"
    if sizes == {1}:
        return "each is on a host, or of a user, of its own"
    return tuple(ranks)


def _host() -> str:
    """What ranks that can share memory have in common; "" where none can."""
    if not futex.are_supported() or not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [Path(f"/proc/self/ns/{kind}").readlink() for kind in ("net", "pid")]
    except OSError:
        return ""
    return " ".join([boot, str(os.geteuid()), *map(str, spaces)])


def _listen(stack: ExitStack) -> tuple[str, socket.socket | None]:
    if not futex.are_supported():
        return "", None
    address = f"fsdp_core/{secrets.token_hex(16)}"
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listener.settimeout(_MEETING_S)
    # In the abstract namespace: no file, nothing to remove.
    listener.bind(f"\0{address}")
    listener.listen()
    return address, listener


def _connect(rank: int, doors: list[tuple[str, bytes]], listener: socket.socket) -> dict[int, Peer]:
    others: dict[int, Peer] = {}
    for other, (address, secret) in enumerate(doors[:rank]):
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel.settimeout(_MEETING_S)
        channel.connect(f"\0{address}")
        channel.sendall(_HELLO.pack(rank, secret))
        others[other] = _peer(other, channel)
    while len(others) < len(doors) - 1:
        channel, _ = listener.accept()
        channel.settimeout(_MEETING_S)
        hello = channel.recv(_HELLO.size)
        # The name of the socket is no secret: any process of the host can see it.
        if len(hello) == _HELLO.size and hello[-_SECRET_BYTES:] == doors[rank][1]:
            caller, _ = _HELLO.unpack(hello)
            others[caller] = _peer(caller, channel)
        else:
            channel.close()
    return others


def _peer(rank: int, channel: socket.socket) -> Peer:
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise PermissionError(f"rank {rank} runs as another user ({user})")
    return Peer(rank, channel, os.pidfd_open(pid))


def _close(others: list[Peer]) -> None:
    for peer in others:
        peer.channel.close()
        os.close(peer.process)


def _new_file(nbytes: int, stack: ExitStack) -> int:
    file = os.memfd_create("fsdp_core", os.MFD_CLOEXEC)
    stack.callback(os.close, file)
    os.ftruncate(file, nbytes)
    return file


def _mapped(file: int, nbytes: int) -> mmap.mmap:
    mapped = mmap.mmap(file, nbytes)
    with suppress(OSError, ValueError):
        # Core dumps need not hold every rank's parameters; older kernels cannot leave them out.
        mapped.madvise(mmap.MADV_DONTDUMP)
    return mapped
