"""Connections of a process on which the other end acknowledges nothing, as the kernel's TCP sees them.

Nothing is sent, and the process is not touched. A peer that is alive but does not read is not among them: its
kernel acknowledges for it, though its process be stopped.
"""

import contextlib
import itertools
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv6Address
from pathlib import Path
from typing import Final

from services.contract.messages.base import Address
from services.contract.messages.findings import MOST_CONNECTIONS, Unanswered

_MOST_TABLE: Final = 16 << 20
_MOST_DESCRIPTORS: Final = 65_536
_ESTABLISHED: Final = "01"
_OPENING: Final = "02"
_SENDS_AGAIN: Final = "01"
_FIELDS: Final = 10


def unanswered(pid: int) -> tuple[Unanswered, ...]:
    """Those of a process, the ones first on which was sent again most often; none where it is gone."""
    own = _sockets(pid)
    if not own:
        return ()
    found = [
        connection
        for table in ("tcp", "tcp6")
        for inode, connection in _sent_again(Path(f"/proc/{pid}/net/{table}"))
        if inode in own
    ]
    found.sort(key=lambda each: -each.retries)
    return tuple(found[:MOST_CONNECTIONS])


def _sockets(pid: int) -> frozenset[str]:
    """The inode numbers of its sockets."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in itertools.islice(Path(f"/proc/{pid}/fd").iterdir(), _MOST_DESCRIPTORS):
            with contextlib.suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    found.add(target[len("socket:[") : -1])
    return frozenset(found)


def _sent_again(table: Path) -> Iterator[tuple[str, Unanswered]]:
    """Connections of a network namespace, by inode, on which was sent again without an answer."""
    try:
        with table.open("rb") as file:
            # Of a process that ends just now the table is empty, without its headline.
            lines = file.read(_MOST_TABLE).decode("ascii", "replace").splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) < _FIELDS or fields[3] not in (_ESTABLISHED, _OPENING):
            continue
        timer, retries = fields[5].partition(":")[0], int(fields[6], 16)
        if timer == _SENDS_AGAIN and retries:
            yield (
                fields[9],
                Unanswered(
                    here=_address(fields[1]),
                    there=_address(fields[2]),
                    retries=retries,
                    waiting_bytes=int(fields[4].partition(":")[0], 16),
                    is_open=fields[3] == _ESTABLISHED,
                ),
            )


def _address(shown: str) -> Address:
    """An address as the kernel shows it: its words in hexadecimal digits, in the machine's byte order."""
    digits, _, port = shown.partition(":")
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(words) == 1:
        host = socket.inet_ntoa(packed)
    else:
        wide = IPv6Address(packed)
        host = str(wide.ipv4_mapped or wide)
    return Address(host=host, port=int(port, 16))
