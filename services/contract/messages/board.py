"""The board: where a rank writes where it stands, and its agent reads it from outside.

A file of 64 KiB. The rank has it mapped and stores plainly, without a system call; its agent reads
it by ``pread``, because a mapped page of a file that the rank has cut would kill the reader::

    0      magic, version                                       two 8-byte slots
    16     pulse: the monotonic clock, by a thread of its own   one 8-byte slot
    24     how many steps there will be, as a script says       one 8-byte slot
    32     the allocator's fragments in bytes, 0 where unknown  one 8-byte slot
    64     snapshot A: sequence number, fields, checksum        all slots 8 bytes, aligned
    1088   snapshot B: the same
    4096   ring of the last 256 steps, each 80 bytes: step, six figures, memory, clock, checksum
    24576  for each group a ring of the last 192 arrivals, each 24 bytes: number, clock, check

An arrival is the moment at which the rank issued a collective: its number in the group and the
node's monotonic clock. The clocks of the ranks of one node are one clock, so whoever reads two
boards knows how much later the second rank came.

The pulse is stored by a thread that does nothing else. It needs the interpreter's lock for that:
a rank whose process is awake and whose pulse stands still holds the lock somewhere in C.

Snapshots alternate between A and B, so that whichever store a kill or a stop interrupts, the
other one is whole: the reader takes the valid one with the higher sequence number. A board
outlives its rank and tells where it was when it died.
"""

import math
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from services.contract.system.durable import open_plain
from services.contract.words.bounds import MOST_SECONDS
from services.contract.words.states import RankPhase

BOARD_BYTES: Final = 65_536
MAX_GROUPS: Final = 8
MAX_STEP: Final = 999_999_999
"""The last step that the id of a checkpoint can name."""
_MAGIC: Final = 0x4D4C424F41524431
_VERSION: Final = 4
_PULSE: Final = 16
_ALL_STEPS: Final = 24
_FRAGMENTS: Final = 32
_NEW_FILE: Final = 0o666  # less the umask
_SLOTS: Final = (64, 1088)
_RING: Final = 4096
_RING_LENGTH: Final = 256
_ARRIVALS: Final = 24_576
ARRIVALS_KEPT: Final = 192
_NO_UNIT: Final = -1
# Places of a record's fields, its sequence number being the first.
_PHASE: Final = 2
_UNIT: Final = 3
_STEP_PLACE: Final = 4
_STORED: Final = 7
_STEP_TIME: Final = 10
_COUNTERS: Final = 11

_HEADER: Final = struct.Struct("<QQ")
_SNAPSHOT: Final = struct.Struct("<Qqqqqqqqddd" + "qq" * MAX_GROUPS)
_STEP: Final = struct.Struct("<qddddddqq")
_CHECKSUM: Final = struct.Struct("<Q")
_RING_SLOT: Final = struct.Struct("<q64xQ")
_WAITED: Final = 6
_ARRIVAL: Final = struct.Struct("<qqq")
_CLOCK: Final = struct.Struct("<q")
_PHASES: Final = frozenset(map(int, RankPhase))
_NO_STEPS: Final = bytes(_RING_LENGTH * (_STEP.size + _CHECKSUM.size))


class BoardError(ValueError):
    """A board holds what no rank of ours writes. Its words complete a sentence: "rank 1 …"."""


@dataclass(frozen=True)
class BoardStep:
    """One finished step. Loss in nats a token, times in seconds; NaN where there is no figure.

    ``data_wait_s`` of ``step_time_s`` were spent waiting for the rank's share of the data. ``of``: how
    many steps there will be; 0: only the spec says it, or nobody. It is that of the newest step.
    ``memory_bytes``: what the rank held then. ``ended_ms``: the node's wall clock then; 0: not known.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float
    step_time_s: float
    data_wait_s: float = math.nan
    memory_bytes: int = 0
    ended_ms: int = 0
    of: int = 0


@dataclass(frozen=True)
class BoardSnapshot:
    """Where a rank stands.

    ``unit_index`` counts the engine's units as ``RankReady.units`` names them, None outside all.
    ``stored_ns`` is the node's monotonic clock at the store. ``issued`` and ``completed`` are the
    collective sequence numbers of the groups that ``RankReady.groups`` names, in that order.
    ``peak_bytes`` is 0 as long as it is not known.
    """

    fence: int
    phase: RankPhase = RankPhase.SPAWNED
    unit_index: int | None = None
    step: int = 0
    memory_bytes: int = 0
    peak_bytes: int = 0
    stored_ns: int = 0
    loss: float = math.nan
    tokens_per_s: float = math.nan
    step_time_s: float = math.nan
    issued: Sequence[int] = field(default=(0,) * MAX_GROUPS)
    completed: Sequence[int] = field(default=(0,) * MAX_GROUPS)


def _with_room(path: Path, flags: int = 0) -> int:
    # A rank may hold a lease on a file that it put there: without O_NONBLOCK the kernel has whoever opens it wait.
    flags |= os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, _NEW_FILE)
    try:
        # Not truncate: a store into a page for which a full tmpfs has no room kills the rank.
        os.posix_fallocate(descriptor, 0, BOARD_BYTES)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class BoardWriter:
    """The rank's side. Not thread-safe: one thread writes, but for the pulse.

    Args:
        memory: The mapped file, as ``create`` makes it.
        fence: The attempt of which this rank is part.
    """

    def __init__(self, memory: mmap.mmap, fence: int) -> None:
        self._memory = memory
        # In the order in which they are packed: this is called hundreds of times a step.
        self._fields: list[int | float] = [0, *_packed(BoardSnapshot(fence=fence))]

    @classmethod
    def create(cls, path: Path, fence: int) -> Self:
        """Make (or start over) the board at ``path`` and map it.

        Raises:
            OSError: There is no room for it.
        """
        descriptor = _with_room(path)
        try:
            memory = mmap.mmap(descriptor, BOARD_BYTES)
        finally:
            os.close(descriptor)
        memory[:] = bytes(BOARD_BYTES)
        _HEADER.pack_into(memory, 0, _MAGIC, _VERSION)
        return cls(memory, fence)

    @property
    def snapshot(self) -> BoardSnapshot:
        """What was stored last."""
        return _snapshot(self._fields)

    def store(self, snapshot: BoardSnapshot) -> None:
        """Publish ``snapshot``."""
        self._fields[1:] = _packed(snapshot)
        self._publish()

    def show(self, phase: int, unit_index: int | None, now_ns: int) -> None:
        """Publish another phase and unit."""
        fields = self._fields
        fields[_PHASE] = phase
        fields[_UNIT] = _NO_UNIT if unit_index is None else unit_index
        fields[_STORED] = now_ns
        self._publish()

    def issue(self, place: int, sequence: int, now_ns: int) -> None:
        """Publish that collective ``sequence`` of the group at ``place`` was issued, and when."""
        self.arrive(place, sequence, now_ns)
        self._fields[_COUNTERS + 2 * place] = sequence
        self._fields[_STORED] = now_ns
        self._publish()

    def complete(self, place: int, sequence: int, now_ns: int) -> None:
        """Publish that collective ``sequence`` of the group at ``place`` was waited for."""
        self._fields[_COUNTERS + 2 * place + 1] = sequence
        self._fields[_STORED] = now_ns
        self._publish()

    def arrive(self, place: int, sequence: int, now_ns: int) -> None:
        """Keep when collective ``sequence`` of the group at ``place`` was issued."""
        offset = _arrival_offset(place, sequence)
        # One store of 24 bytes may be torn: then the check does not match.
        _ARRIVAL.pack_into(self._memory, offset, sequence, now_ns, sequence ^ now_ns)

    def beat(self, now_ns: int) -> None:
        """Store the pulse; from any one thread."""
        _CLOCK.pack_into(self._memory, _PULSE, now_ns)

    def finish_step(
        self, step: BoardStep, *, now_ns: int, peak_bytes: int = 0, fragments_bytes: int = 0
    ) -> None:
        """Publish a finished step: in the ring, and in the snapshot."""
        record = _STEP.pack(
            step.step,
            step.loss,
            step.grad_norm,
            step.learning_rate,
            step.tokens_per_s,
            step.step_time_s,
            # Zero is no figure: so wrote ranks that did not measure it.
            0.0 if math.isnan(step.data_wait_s) else step.data_wait_s,
            step.memory_bytes,
            step.ended_ms,
        )
        _CLOCK.pack_into(self._memory, _ALL_STEPS, step.of)
        _CLOCK.pack_into(self._memory, _FRAGMENTS, fragments_bytes)
        _store(self._memory, _ring_offset(step.step), record)
        self.store(
            replace(
                self.snapshot,
                step=step.step,
                loss=step.loss,
                tokens_per_s=step.tokens_per_s,
                step_time_s=step.step_time_s,
                memory_bytes=step.memory_bytes,
                peak_bytes=peak_bytes,
                stored_ns=now_ns,
            )
        )

    def _publish(self) -> None:
        fields = self._fields
        fields[0] += 1
        offset = _SLOTS[int(fields[0]) % 2]
        _store(self._memory, offset, _SNAPSHOT.pack(*fields))


class BoardReader:
    """The agent's side: reads whole records only, at any time, its rank alive or not.

    Whatever the file holds and becomes meanwhile, a method returns or raises BoardError.

    Args:
        descriptor: Of the file, owned from now on.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def make(cls, path: Path) -> Self:
        """Make the file of a board whose rank is not there yet, and open it: it is empty.

        So the rank will not lack room, and whatever it does with the file's name, this is its board.

        Raises:
            OSError: There is no room for it, or something of that name.
        """
        return cls(_with_room(path, os.O_EXCL))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the board at ``path``.

        Raises:
            OSError: There is no such plain file.
            ValueError: It is not a board of this version.
        """
        reader = cls(open_plain(path))
        try:
            header = _HEADER.unpack(reader._read(0, _HEADER.size))
        except BoardError:
            reader.close()
            raise
        if header != (_MAGIC, _VERSION):
            reader.close()
            raise ValueError(f"{path} is not a board of version {_VERSION}")
        return reader

    def read(self) -> BoardSnapshot | None:
        """The newest whole snapshot; None before the first.

        Raises:
            BoardError: A rank of ours writes no such snapshot, or the file is no board any more.
        """
        best: tuple[Any, ...] | None = None
        for offset in _SLOTS:
            record = _whole(self._read(offset, _SNAPSHOT.size + _CHECKSUM.size))
            if record is not None:
                fields = _SNAPSHOT.unpack(record)
                if fields[0] and (best is None or fields[0] > best[0]):
                    best = fields
        if best is None:
            return None
        _check(best)
        return _snapshot(best)

    def steps_after(self, step: int) -> list[BoardStep]:
        """The finished steps above ``step`` that the ring still holds, in order.

        Raises:
            BoardError: It holds a step that there cannot be, or the file is no board any more.
        """
        size = _RING_SLOT.size
        ring = self._read(_RING, _RING_LENGTH * size)
        if ring == _NO_STEPS:
            return []
        found = []
        all_steps = self._all_steps()
        # Ten times a second: of the 256 checksums only those of new steps are worked out.
        for place, (number, _) in enumerate(_RING_SLOT.iter_unpack(ring)):
            if number > step:
                record = _whole(ring[place * size : (place + 1) * size])
                if record is not None:
                    found.append(_board_step(_STEP.unpack(record), all_steps))
        return sorted(found, key=lambda entry: entry.step)

    def step(self, number: int) -> BoardStep | None:
        """The finished step of that number, if the ring still holds it.

        Raises:
            BoardError: It is a step that there cannot be, or the file is no board any more.
        """
        record = _whole(self._read(_ring_offset(number), _STEP.size + _CHECKSUM.size))
        fields = None if record is None else _STEP.unpack(record)
        is_it = fields is not None and fields[0] == number
        return _board_step(fields, self._all_steps()) if fields is not None and is_it else None

    def _all_steps(self) -> int:
        (steps,) = _CLOCK.unpack(self._read(_ALL_STEPS, _CLOCK.size))
        _check_step(steps)
        return int(steps)

    def fragments_bytes(self) -> int | None:
        """What the allocator holds over the most that it gave out; None where that is not known.

        Raises:
            BoardError: The file is no board any more.
        """
        (held,) = _CLOCK.unpack(self._read(_FRAGMENTS, _CLOCK.size))
        return int(held) if held > 0 else None

    def arrivals(self, place: int) -> dict[int, int]:
        """When the last collectives of the group at ``place`` were issued, by their number.

        Raises:
            BoardError: The file is no board any more.
        """
        ring = self._read(_arrival_offset(place, 0), ARRIVALS_KEPT * _ARRIVAL.size)
        return {
            sequence: clock
            for sequence, clock, check in _ARRIVAL.iter_unpack(ring)
            if sequence and check == sequence ^ clock
        }

    def pulse_ns(self) -> int | None:
        """The clock at the last pulse; None before the first.

        Raises:
            BoardError: The file is no board any more.
        """
        (clock,) = _CLOCK.unpack(self._read(_PULSE, _CLOCK.size))
        return int(clock) or None

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _read(self, offset: int, size: int) -> bytes:
        try:
            length = os.fstat(self._descriptor).st_size
            content = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise BoardError(f"has a board that cannot be read: {error}") from error
        if length != BOARD_BYTES or len(content) != size:
            raise BoardError(f"made its board {length} bytes long; a board has {BOARD_BYTES}")
        return content


def _packed(snapshot: BoardSnapshot) -> list[int | float]:
    """The fields behind the sequence number, in their order in a record."""
    counters = [n for pair in zip(snapshot.issued, snapshot.completed, strict=True) for n in pair]
    return [
        snapshot.fence,
        int(snapshot.phase),
        _NO_UNIT if snapshot.unit_index is None else snapshot.unit_index,
        snapshot.step,
        snapshot.memory_bytes,
        snapshot.peak_bytes,
        snapshot.stored_ns,
        snapshot.loss,
        snapshot.tokens_per_s,
        snapshot.step_time_s,
        *counters,
    ]


def _snapshot(fields: Sequence[Any]) -> BoardSnapshot:
    _, fence, phase, unit, step, memory, peak, stored, loss, tokens, step_time, *counters = fields
    return BoardSnapshot(
        fence=fence,
        phase=RankPhase(phase),
        unit_index=None if unit == _NO_UNIT else unit,
        step=step,
        memory_bytes=memory,
        peak_bytes=peak,
        stored_ns=stored,
        loss=loss,
        tokens_per_s=tokens,
        step_time_s=step_time,
        issued=tuple(counters[0::2]),
        completed=tuple(counters[1::2]),
    )


def _board_step(fields: Sequence[Any], all_steps: int) -> BoardStep:
    """A record of the ring.

    Raises:
        BoardError: There can be no such step.
    """
    # Not replaced afterwards: of a flood there are 256 at a look.
    said = [*fields, all_steps]
    said[_WAITED] = said[_WAITED] or math.nan
    entry = BoardStep(*said)
    _check_step(entry.step)
    _check_seconds(entry.step_time_s)
    _check_seconds(entry.data_wait_s)
    return entry


def _ring_offset(step: int) -> int:
    return _RING + (step % _RING_LENGTH) * (_STEP.size + _CHECKSUM.size)


def _arrival_offset(place: int, sequence: int) -> int:
    return _ARRIVALS + (place * ARRIVALS_KEPT + sequence % ARRIVALS_KEPT) * _ARRIVAL.size


def _store(memory: mmap.mmap, offset: int, record: bytes) -> None:
    memory[offset : offset + len(record)] = record
    _CHECKSUM.pack_into(memory, offset + len(record), zlib.crc32(record))


def _whole(record: bytes) -> bytes | None:
    """The record without its checksum behind it, where that matches."""
    content = record[: -_CHECKSUM.size]
    (checksum,) = _CHECKSUM.unpack_from(record, len(content))
    # An untouched slot is all zeros, whose CRC-32 is not zero: it never passes for a record.
    return content if checksum == zlib.crc32(content) else None


def _check(fields: Sequence[Any]) -> None:
    """Refuse a snapshot, whole as it is, that says what cannot be.

    Raises:
        BoardError: Its phase, unit or step does.
    """
    phase, unit, step = fields[_PHASE], fields[_UNIT], fields[_STEP_PLACE]
    if phase not in _PHASES:
        raise BoardError(f"wrote phase {phase} to its board, which is none of 0 to {max(_PHASES)}")
    if unit < _NO_UNIT:
        raise BoardError(f"wrote unit {unit} to its board")
    _check_step(step)
    _check_seconds(fields[_STEP_TIME])
    if (sequence := min(fields[_COUNTERS:])) < 0:
        raise BoardError(f"wrote collective {sequence} to its board")


def _check_step(step: int) -> None:
    if not 0 <= step <= MAX_STEP:
        raise BoardError(f"wrote step {step} to its board, which is not within 0 to {MAX_STEP}")


def _check_seconds(seconds: float) -> None:
    if seconds < 0 or seconds > MOST_SECONDS:
        raise BoardError(f"wrote a step of {seconds} s to its board")
