"""What is kept in mind of a commit chain, so that a long one is not read again for each commit.

A job that saves each minute has 20 000 records after a week. Records are never replaced, so one that was read
is read again only when its file is another by what the file system says of it.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from time import time
from typing import Final, NamedTuple, Self

from services.contract.storage.manifests import (
    AttemptOpened,
    CheckpointDeleted,
    DamagedRecord,
    Manifest,
)
from services.contract.system.durable import says_nothing_of_the_file

Record = Manifest | AttemptOpened | CheckpointDeleted

# Half a kilobyte each.
_MOST_HEADS: Final = 100_000
# A file that changed no longer ago may change again without another time: clocks of file systems go in steps.
_SETTLED_AFTER_S: Final = 2.0


class Head(NamedTuple):
    """A record without what makes a manifest long."""

    kind: type[Record]
    fence: int
    checkpoint_id: str | None

    @classmethod
    def of(cls, record: Record) -> Self:
        """That of ``record``."""
        name = None if isinstance(record, AttemptOpened) else record.checkpoint_id
        return cls(type(record), record.fence, name)


def name_of(number: int) -> str:
    """The file of a record."""
    return f"{number:08d}.json"


def committed_numbers(heads: Mapping[int, Head]) -> dict[str, int]:
    """The checkpoints that were committed and not deleted since, oldest first, and the numbers of their manifests."""
    alive: dict[str, int] = {}
    for number, head in heads.items():
        if head.checkpoint_id is not None:
            alive.pop(head.checkpoint_id, None)
            if head.kind is Manifest:
                alive[head.checkpoint_id] = number
    return alive


class _State(NamedTuple):
    """By which a file is known to be the one that was read; writing to it changes the last of these."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def _state_of(path: str) -> _State | None:
    """State of a file, to be asked for before it is read; None where there is none.

    Raises:
        OSError: The storage does not answer.
    """
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _State(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class _KnownHeads:
    """Heads of the chains that this process has read, as far as there is room. Safe among threads."""

    def __init__(self) -> None:
        self._chains: OrderedDict[str, dict[int, tuple[_State, Head]]] = OrderedDict()
        self._count = 0
        self._lock = threading.Lock()

    def of(self, folder: str, number: int, state: _State | None) -> Head | None:
        """The head of a record, if it was read from a file in this state."""
        known = self._chains.get(folder, {}).get(number)
        return known[1] if known is not None and known[0] == state else None

    def keep(self, folder: str, number: int, state: _State | None, head: Head) -> None:
        """Keeps the head of a record that was read; its file had this state before."""
        if state is None or time() - state.changed_ns / 1e9 < _SETTLED_AFTER_S:
            return
        with self._lock:
            chain = self._chains.setdefault(folder, {})
            self._chains.move_to_end(folder)
            self._count += number not in chain
            chain[number] = state, head
            while self._count > _MOST_HEADS:
                self._count -= len(self._chains.popitem(last=False)[1])


_KNOWN: Final = _KnownHeads()


class Look:
    """Reads records that are not known, and sorts them.

    Attributes:
        heads: Of those that can be read, by number.
        manifests: Those that were read, by number.
        damaged: The numbers that are taken and cannot be read.
        unread: Why one that is not damaged could not be read: this user may not.
    """

    def __init__(self, folder: str, read: Callable[[int], Record]) -> None:
        """Looks at nothing yet.

        Args:
            folder: Of the chain.
            read: Reads the record of a number, and checks it.
        """
        self.heads: dict[int, Head] = {}
        self.manifests: dict[int, Manifest] = {}
        self.damaged: dict[int, DamagedRecord] = {}
        self.unread: PermissionError | None = None
        self._folder = folder
        self._read = read

    def at(self, number: int, *, again: bool = False) -> None:
        """Looks at a record; `again`: whether or not its head is known."""
        self.heads.pop(number, None)
        name = name_of(number)
        try:
            state = _state_of(f"{self._folder}/{name}")
            head = None if again else _KNOWN.of(self._folder, number, state)
            if head is None:
                record = self._read(number)
                head = Head.of(record)
                _KNOWN.keep(self._folder, number, state, head)
                if isinstance(record, Manifest):
                    self.manifests[number] = record
            self.heads[number] = head
        except PermissionError as error:
            self.unread = self.unread or error
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and says_nothing_of_the_file(error):
                raise
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            self.damaged[number] = DamagedRecord(number=number, name=name, reason=why)
