"""A job's curve and output in storage: which files, how they grow, how they are read and closed.

Agents append what Redis has taken, under the id that it has there; so what is in several places is one
entry, and whoever reads puts all of it together::

    <root>/<job id>/records/steps.0001.<node id>.<incarnation>.jsonl      steps of attempt 1
    <root>/<job id>/records/steps.0001.<node id>.<incarnation>.old.jsonl  what it held before it was too long
    <root>/<job id>/records/steps.jsonl.gz                                what was closed, of all attempts

and the same of ``metrics`` and ``logs``; of ``events``, which the controller writes, only the last. Each file is the one of one life of one agent: no two processes
write one, and a line that a crash has torn costs itself alone. A rank may write whatever it likes there,
if it is of the agent's user: what is read is bounded, and each line must make sense.
"""

import contextlib
import gzip
import io
import os
import re
import secrets
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, NamedTuple

import structlog
from pydantic import JsonValue, TypeAdapter, ValidationError

from services.contract.messages.telemetry import LogLine, MetricRecord, StepRecord
from services.contract.redis import redis_keys
from services.contract.storage.commit_chain import DRAFT_PREFIX
from services.contract.system.durable import append_plain, open_plain, sync_folder
from services.contract.system.gzip_text import GzipText
from services.worker.agent.storage.shared_files import SharedFiles
from services.worker.agent.streams.redis_clients import LONGEST_RECORD

PART_BYTES: Final = 64 << 20
"""A file that is longer is started over; what it held until then is kept beside it, once."""
CLOSED_BYTES: Final = 64 << 20
"""So much is closed of a kind, before it is compressed: the newest entries."""
PARTS_READ: Final = 256
_CLOSED: Final = ".jsonl.gz"
_OLD: Final = ".old"
_PART: Final = re.compile(r"(?:steps|metrics|logs)\.([0-9]{4,10})\.[a-z0-9.-]{1,90}\.jsonl")
# No later than the year 2286: behind the last id of all nothing more can be added. Against no clock, for
# what was told before one was set back is a record, too.
_LINE: Final = re.compile(r'\{"id":"([0-9]{1,13})-([0-9]{1,9})",')
_MOST_READ: Final = 2 * PART_BYTES
# Of many parts that are long no more than this is read together, of each the newest: a rank may leave
# hundreds that are all holes, or links to one.
_MOST_READ_OF_ALL: Final = 8 * _MOST_READ
# So much counts each line that is read: a MiB of compressed empty lines would take a minute. Every second line of
# ours is a record, so a file of ours is read whole.
_SHORTEST_LINE: Final = 64
# What is closed may take four bytes a character.
_MOST_PUBLISHED: Final = 4 * CLOSED_BYTES
_log = structlog.get_logger()


class EntryId(NamedTuple):
    """The id of an entry of a stream, as Redis orders them."""

    time_ms: int
    number: int

    @classmethod
    def parse(cls, text: str) -> "EntryId":
        """Of an id as Redis writes it.

        Raises:
            ValueError: It is none.
        """
        time_ms, _, number = text.partition("-")
        return cls(int(time_ms), int(number))

    def __str__(self) -> str:
        return f"{self.time_ms}-{self.number}"


Entries = dict[EntryId, str]
"""Records as JSON, by the id under which Redis keeps or kept them."""


@dataclass(frozen=True)
class Kind:
    """One kind of records.

    Attributes:
        name: In names of files.
        key: Names the stream of a job in Redis.
        recalled: Names the stream into which it is brought back.
        kept: So many of the newest are kept.
        parse: Raises ValidationError for what is no such record.
    """

    name: str
    key: Callable[[str], str]
    recalled: Callable[[str], str]
    kept: int
    parse: Callable[[str], object]

    def is_one(self, body: str) -> bool:
        """Whether it is such a record, whoever wrote it."""
        try:
            self.parse(body)
        except ValidationError:
            return False
        return True


STEPS: Final = Kind(
    "steps",
    redis_keys.job_steps,
    redis_keys.recalled_steps,
    redis_keys.STEPS_KEPT,
    StepRecord.model_validate_json,
)
METRICS: Final = Kind(
    "metrics",
    redis_keys.job_metrics,
    redis_keys.recalled_metrics,
    redis_keys.METRICS_KEPT,
    MetricRecord.model_validate_json,
)
LOGS: Final = Kind(
    "logs",
    redis_keys.job_logs,
    redis_keys.recalled_logs,
    redis_keys.LOGS_KEPT,
    LogLine.model_validate_json,
)
EVENTS: Final = Kind(
    "events",
    redis_keys.job_events,
    redis_keys.recalled_events,
    redis_keys.EVENTS_KEPT,
    TypeAdapter(dict[str, JsonValue]).validate_json,
)
"""What the controller tells of a job: agents only close these, and bring them back."""
KINDS: Final[Mapping[str, Kind]] = MappingProxyType({k.name: k for k in (STEPS, METRICS, LOGS)})
"""What agents append as it goes."""


def is_closed(name: str) -> bool:
    """Whether a file is one of those that are put together."""
    return name.endswith(_CLOSED)


def records_folder(root: Path, job_id: str) -> Path:
    """Where the files of a job lie."""
    return root / job_id / "records"


def publish(files: SharedFiles, path: Path) -> None:
    """Have all nodes see a file of records, or that there is none. Blocking.

    One that is longer than any of ours stays where it is: a rank may have grown it, and a bucket would take a
    terabyte of holes.

    Raises:
        OSError: The storage refuses, or the file grows meanwhile.
    """
    size = path.lstat().st_size if os.path.lexists(path) else None
    if size is not None and size > _MOST_PUBLISHED:
        _log.error("records_too_long", file=str(path), bytes=size)
        return
    files.publish(path, size=size)


@dataclass(frozen=True)
class Part:
    """What one life of an agent appends of one attempt and kind.

    Attributes:
        root: The storage root.
        job_id: The job.
        kind: Of the records.
        fence: The attempt.
        writer: ``<node id>.<incarnation>``.
    """

    root: Path
    job_id: str
    kind: Kind
    fence: int
    writer: str

    @property
    def path(self) -> Path:
        """The file."""
        name = f"{self.kind.name}.{self.fence:04d}.{self.writer}.jsonl"
        return records_folder(self.root, self.job_id) / name

    def append(self, entries: Iterable[tuple[EntryId, str]]) -> None:
        """Append records. Blocking.

        Nothing is appended for a job of which storage holds nothing any more.

        Raises:
            OSError: The storage refuses; a part of the last line may have been written.
        """
        with contextlib.suppress(FileExistsError):
            self.path.parent.mkdir()
        # An empty line first: what a write before this one left of a line stays by itself.
        text = "".join(["\n", *(line_of(name, body) for name, body in entries)]).encode()
        descriptor = append_plain(self.path)
        with os.fdopen(descriptor, "ab", buffering=0) as file:
            if os.fstat(descriptor).st_size > PART_BYTES:
                self.path.replace(self.path.with_suffix(f"{_OLD}.jsonl"))
                with os.fdopen(append_plain(self.path), "ab", buffering=0) as fresh:
                    _write(fresh, text)
            else:
                _write(file, text)


def line_of(name: EntryId, body: str) -> str:
    """A record as a line of a file; ``body`` is a JSON object that is not empty."""
    return f'{{"id":"{name}",{body[1:]}\n'


def read_entries(root: Path, job_id: str, kind: Kind) -> Entries:
    """All that storage holds of a job's records of a kind, the newest that are kept. Blocking.

    Raises:
        OSError: The storage does not answer.
    """
    folder = records_folder(root, job_id)
    return _collected((folder / f"{kind.name}{_CLOSED}", *_parts(folder, kind)), kind)


def close(
    root: Path, job_id: str, kind: Kind, more: Entries, *, before_fence: int | None = None
) -> None:
    """Put all that storage holds of a kind, and ``more``, into one compressed file. Blocking.

    What was put together is removed. Interrupted at any point, nothing is lost: an entry that is in two
    files is one entry.

    Args:
        root: The storage root.
        job_id: The job.
        kind: Of the records.
        more: What Redis has of them.
        before_fence: Only files of attempts below this one are put together, if there are any.

    Raises:
        OSError: The storage refuses; all files are as they were.
    """
    folder = records_folder(root, job_id)
    closed = folder / f"{kind.name}{_CLOSED}"
    parts = [p for p in _parts(folder, kind) if before_fence is None or _fence(p) < before_fence]
    if not parts and before_fence is not None:
        return
    found = _newest(_collected((closed, *parts), kind) | more, kind)
    if not parts and not found:
        return
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    draft = folder / f"{DRAFT_PREFIX}{secrets.token_hex(8)}"
    try:
        with draft.open("xb") as file:
            with gzip.GzipFile(
                fileobj=file, mode="wb", compresslevel=6, mtime=0, filename=""
            ) as zip_:
                for name, body in found.items():
                    zip_.write(line_of(name, body).encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(closed)
        sync_folder(folder)
    finally:
        draft.unlink(missing_ok=True)
    for path in parts:
        path.unlink(missing_ok=True)


def _parts(folder: Path, kind: Kind) -> list[Path]:
    """Files that are not closed, those of the newest attempts; of each what it held before comes first."""
    found = folder.glob(f"{kind.name}.*.jsonl")
    names = [path for path in found if _PART.fullmatch(path.name) and _is_plain(path)]
    return sorted(names, key=lambda path: (_fence(path), path.name))[-PARTS_READ:]


def _is_plain(path: Path) -> bool:
    """Whether it is a file: a rank may have put something else there, which is passed over."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _fence(path: Path) -> int:
    return int(path.name.split(".")[1])


def _newest(entries: Entries, kind: Kind) -> Entries:
    """The newest of them that are kept, in their order."""
    chosen: list[EntryId] = []
    room = CLOSED_BYTES
    for name in sorted(entries, reverse=True)[: kind.kept]:
        room -= len(entries[name])
        if room < 0:
            break
        chosen.append(name)
    return {name: entries[name] for name in reversed(chosen)}


def _collected(paths: Iterable[Path], kind: Kind) -> Entries:
    """What the files hold, the newest that are kept of it; memory is bounded whatever lies there."""
    found: Entries = {}
    plain = [path for path in paths if _is_plain(path)]
    most = _MOST_READ
    if sum(min(_size(path), most) for path in plain) > _MOST_READ_OF_ALL:
        most = _MOST_READ_OF_ALL // len(plain)
    for path in plain:
        with contextlib.suppress(FileNotFoundError):
            allowed = _MOST_READ if path.name.endswith(_CLOSED) else most
            for name, body in _entries(path, kind, allowed):
                found[name] = body
                if len(found) > 2 * kind.kept:
                    found = _newest(found, kind)
        found = _newest(found, kind)
    return found


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _entries(path: Path, kind: Kind, most: int) -> Iterator[tuple[EntryId, str]]:
    """What of a file's lines makes sense, the last of it where it is too long."""
    unreadable = 0
    for line in _lines(path, most):
        start = _LINE.match(line)
        if start is None:
            unreadable += bool(line)
            continue
        body = f"{{{line[start.end() :]}"
        if kind.is_one(body):
            yield EntryId(int(start.group(1)), int(start.group(2))), body
        else:
            unreadable += 1
    if unreadable:
        _log.warning("records_unreadable", file=str(path), lines=unreadable)


def _lines(path: Path, most: int) -> Iterator[str]:
    with os.fdopen(open_plain(path), "rb") as file:
        if not path.name.endswith(_CLOSED):
            file.seek(max(os.fstat(file.fileno()).st_size - most, 0))
            yield from _of_stream(file, most)
            return
        try:
            with io.BufferedReader(GzipText(file, _MOST_READ)) as unpacked:
                yield from _of_stream(unpacked, most)
        except (EOFError, zlib.error) as error:
            _log.error("records_damaged", file=str(path), why=str(error))


def _of_stream(file: BinaryIO, most: int) -> Iterator[str]:
    left = most
    while left > 0 and (line := file.readline(LONGEST_RECORD)):
        left -= max(len(line), _SHORTEST_LINE)
        yield line.decode(errors="replace").removesuffix("\n")


def _write(file: io.FileIO | BinaryIO, content: bytes) -> None:
    """All of it: a write to a file may take a part."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) or 0 :]
