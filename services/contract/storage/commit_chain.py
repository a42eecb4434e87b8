"""The commit chain: numbered records in storage, each linked once and never replaced.

One folder a job::

    <root>/<job id>/chain/opened-0001          its fence, in a name that no damage can change
    <root>/<job id>/chain/00000001.json        attempt opened, fence 1
    <root>/<job id>/chain/00000002.json        a manifest: this checkpoint is committed
    <root>/<job id>/shards/<checkpoint id>/…   what the ranks wrote

A new attempt links its own record first, so that a frozen process of an older attempt that wakes
between its check and its link finds the number taken. ``link(2)`` refuses an existing name, on
NFS too, where a repeated request may report EEXIST for its own success: so we compare.

Where checkpoints lie in a bucket, ``record_files`` puts a conditional write in the link's place: the server
refuses a name that is taken, and a repeated request may hear so of its own success.

A damaged record, or one of another job, is passed over in reading and its number stays taken: what the others say holds.
Which fences are open is told by names too, so that damage lets no overtaken attempt commit.
"""

import itertools
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.contract.storage.chain_heads import (
    Head,
    Look,
    Record,
    committed_numbers,
    name_of,
)
from services.contract.storage.manifests import (
    AttemptOpened,
    CheckpointDeleted,
    DamagedRecord,
    Manifest,
    record_bytes,
    record_of,
)
from services.contract.storage.record_files import FolderRecords, RecordFiles
from services.contract.system.durable import (
    StorageAwayError,
    make_folders,
    open_plain_in,
    own_folder,
    read_plain,
    sync_folder,
    write_new,
)
from services.contract.system.rank_user import RankUser
from services.contract.words.bounds import MOST_WHOLE
from services.contract.words.ids import job_of_checkpoint

MOST_USELESS: Final = 10_000
"""So many folders of no use are answered at once: ranks can make millions."""
_STEP_AND_FENCE: Final = re.compile(r"-s(\d{9})-a(\d{4,})$")
_RECORD: Final = re.compile(r"([0-9]{8})\.json")
# Records are linked one behind the other: a number so far beyond the last one is none of the chain.
_LARGEST_GAP: Final = 1_000
_OPENED: Final = "opened-"
_ALL_READ: Final = 0o644
_ALL_READ_AND_ENTER: Final = 0o755
DRAFT_PREFIX: Final = ".draft-"
FOLDER_RECORDS: Final = FolderRecords()


class ChainError(Exception):
    """The chain cannot be read or written as asked."""


class FencedError(ChainError):
    """A newer attempt of the job has opened the chain: this one may commit nothing more."""


@dataclass(frozen=True)
class ChainReading:
    """What a chain says.

    Attributes:
        heads: Of its records, by number, in order; those that can be read.
        damaged: The numbers that are taken and cannot be read.
        fence: The highest that has opened the chain; 0 without any.
        committed: The committed checkpoints that were not deleted since, oldest first, by number; empty if
            only heads were asked for.
    """

    heads: Mapping[int, Head]
    damaged: tuple[DamagedRecord, ...]
    fence: int
    committed: Mapping[int, Manifest]

    @property
    def next_number(self) -> int:
        """Behind what was read, damage included: a number that was taken is never used again."""
        return len(self.heads) + len(self.damaged) + 1


class CommitChain:
    """The chain of one job below a storage root. Safe under concurrent writers.

    Args:
        root: The folder that holds all jobs' checkpoints, or this node's copies of them.
        job_id: The job whose chain this is.
        files: How records there become what all nodes see. By default the folder is what they see: so
            for ranks, too, whose agent has brought what they read.
    """

    def __init__(self, root: Path, job_id: str, files: RecordFiles = FOLDER_RECORDS) -> None:
        self._files = files
        self._job = root / job_id
        self._folder = self._job / "chain"

    def shard_folder(self, checkpoint_id: str) -> Path:
        """Where the shard files of a checkpoint lie."""
        return self._job / "shards" / checkpoint_id

    @property
    def exists(self) -> bool:
        """Whether an attempt of the job has ever opened it here."""
        return self._files.holds(self._folder)

    def read(self) -> ChainReading:
        """All that it says now.

        Raises:
            OSError: The folder is there and cannot be listed, a record may not be read, or the storage does not answer.
        """
        return self._reading(with_manifests=True)

    def number_of(self, record: Record) -> int | None:
        """Where ``record`` stands; None where it does not.

        Raises:
            OSError: As `read`.
        """
        return self._number_in(self._reading(), record)

    def _number_in(self, reading: ChainReading, record: Record) -> int | None:
        head = Head.of(record)
        alike = (number for number, known in reading.heads.items() if known == head)
        return next((number for number in alike if self._is(number, record)), None)

    def _is(self, number: int, record: Record) -> bool:
        try:
            return self._read(number) == record
        except ValueError:
            return False

    def _reading(self, *, with_manifests: bool = False) -> ChainReading:
        self._files.pull(self._folder)
        # The names of fences first: an opening that is under way is either seen by its name or
        # links its record behind whatever is read here.
        fences = [0, *self._named_fences()]
        look = Look(str(self._folder), self._read)
        for number in range(1, self._last_number() + 1):
            look.at(number)
        alive = committed_numbers(look.heads).values() if with_manifests else ()
        for number in alive:
            if number not in look.manifests:
                look.at(number, again=True)
        if look.unread is not None:
            raise look.unread
        heads = dict(sorted(look.heads.items()))
        fences += [head.fence for head in heads.values() if head.kind is AttemptOpened]
        committed = {n: look.manifests[n] for n in alive if n in look.manifests}
        damaged = tuple(look.damaged[number] for number in sorted(look.damaged))
        return ChainReading(heads, damaged, max(fences), committed)

    def records(self) -> Iterator[Record]:
        """All records that can be read, oldest first."""
        for number in self._reading().heads:
            yield self._read(number)

    def committed(self) -> list[Manifest]:
        """The committed checkpoints that were not deleted since, oldest first."""
        return list(self.read().committed.values())

    def committed_ids(self) -> Collection[str]:
        """Their names, without a look into what each holds.

        Raises:
            OSError: As `read`.
        """
        return committed_numbers(self._reading().heads).keys()

    def find(self, checkpoint_id: str) -> Manifest:
        """The manifest of a committed checkpoint.

        Ranks look for one while agents link further records, which are not shared with them yet.

        Raises:
            ChainError: It was never committed, it was deleted, or its record is damaged.
            OSError: As `read`, unless it is found beside records that may not be read.
        """
        self._files.pull(self._folder)
        look = Look(str(self._folder), self._read)
        # From the end, where what ranks load most often stands.
        for number in range(self._last_number(), 0, -1):
            look.at(number)
            if number in look.heads and look.heads[number].checkpoint_id == checkpoint_id:
                if look.heads[number].kind is CheckpointDeleted:
                    break
                if number not in look.manifests:
                    look.at(number, again=True)
                if number in look.manifests:
                    return look.manifests[number]
        if look.unread is not None:
            raise look.unread
        hint = ", ".join(name_of(number) for number in sorted(look.damaged))
        raise ChainError(
            f"checkpoint {checkpoint_id} is not committed in {self._folder}"
            + (f" (damaged there: {hint})" if hint else "")
        )

    def abandoned(self, *, passed_over: bool = False) -> list[Path]:
        """The shard folders that no manifest names nor ever will: those of overtaken attempts; some of them where there are many.

        None while a record is damaged, for it may be the one that names them.

        Args:
            passed_over: Also those of the newest attempt from before the last step that it has committed. A late command
                may still commit one.
        """
        # Read before the folders are listed: what is abandoned now can never be named later.
        reading = self._read_to_the_end()
        named = _named(reading)
        if named is None:
            return []
        steps = (_place(name)[1] for name in named if _place(name)[0] == reading.fence)
        end = reading.fence, max(steps, default=0) if passed_over else 0

        def is_overtaken(name: str) -> bool:
            return _STEP_AND_FENCE.search(name) is not None and _place(name) < end

        found = self._files.folders(self._job / "shards", "ckpt_*")
        left = (path for path in found if is_overtaken(path.name) and path.name not in named)
        return sorted(itertools.islice(left, MOST_USELESS))

    def uncommitted(self) -> list[Path]:
        """The shard folders that no manifest names, whichever attempt wrote them; some of them where there are many.

        Of use to nobody only while no attempt of the job runs. None while a record is damaged.
        """
        named = _named(self._read_to_the_end())
        if named is None:
            return []
        found = self._files.folders(self._job / "shards", "ckpt_*")
        # One that is not here is in a bucket, which has nothing else in a folder's place.
        folders = (path for path in found if path.is_dir() or not os.path.lexists(path))
        left = sorted(itertools.islice((p for p in folders if p.name not in named), MOST_USELESS))
        # Read again: one may have been committed before it was listed.
        named = _named(self._read_to_the_end()) if left else named
        return [] if named is None else [path for path in left if path.name not in named]

    def drafts(self) -> list[Path]:
        """Records and cards that were never finished: their writers died, or are writing now."""
        return sorted([*self._folder.glob(f"{DRAFT_PREFIX}*"), *self._job.glob(f"{DRAFT_PREFIX}*")])

    def append(self, record: Record) -> int:
        """Link ``record`` at the next number and return that number.

        Appending a record that the chain already holds returns its number: a repeated request
        changes nothing. An attempt that is not the newest any more is not opened again.

        Raises:
            FencedError: A higher fence has opened the chain.
            StorageAwayError: The storage says that the next number is taken, and shows nothing there.
            OSError: The storage refuses.
        """
        make_folders(self._folder, self._job.parent)
        content = record_bytes(record)
        draft = self._folder / f"{DRAFT_PREFIX}{secrets.token_hex(8)}"
        try:
            write_new(draft, content)
            taken = 0
            while True:
                earlier = self._reading()
                known = self._number_in(earlier, record)
                is_past = earlier.fence > record.fence
                # What is opened could commit nothing: there is one more than the controller knows of.
                if known is not None and not (is_past and isinstance(record, AttemptOpened)):
                    # Whoever linked it may have died before its name was durable.
                    sync_folder(self._folder)
                    return known
                if is_past:
                    raise FencedError(
                        f"attempt {record.fence} may not write: attempt {earlier.fence} is open"
                    )
                if isinstance(record, AttemptOpened):
                    self._name_fence(record.fence)
                number = earlier.next_number
                path = self._path(number)
                if number == taken:
                    raise StorageAwayError(
                        f"the storage says that {path} is there, and does not show it"
                    )
                try:
                    self._files.link(draft, path)
                except FileExistsError:
                    taken = number
                    continue
                sync_folder(self._folder)
                return number
        finally:
            draft.unlink(missing_ok=True)

    def share_with(self, user: RankUser) -> None:
        """Let ``user`` read the chain, and write shards.

        Raises:
            OSError: The storage refuses, or another user has put a link there.
        """
        root = self._job.parent
        # Somebody may have a group write there. Ranks must not, who could put other folders in the place of jobs'.
        groups = os.getgrouplist(user.name, user.gid)
        kept = stat.S_ISGID if root.stat().st_gid in groups else stat.S_ISGID | stat.S_IWGRP
        with own_folder(root.resolve()) as folder:
            _open_to_all(folder, kept)
        # An access list of the root may have given ranks rights here.
        with own_folder(self._job) as folder:
            _open_to_all(folder, stat.S_ISGID)
        with own_folder(self._folder) as folder:
            _open_to_all(folder, stat.S_ISGID)
            for name in os.listdir(folder):  # noqa: PTH208 a descriptor, not a path
                mode = os.lstat(name, dir_fd=folder).st_mode
                # One that all may read already stays untouched: after a change of its mode it would be read again.
                if stat.S_ISREG(mode) and stat.S_IMODE(mode) != _ALL_READ:
                    record = open_plain_in(folder, name)
                    try:
                        os.fchmod(record, _ALL_READ)
                    finally:
                        os.close(record)
        shards = self._job / "shards"
        make_folders(shards, self._job.parent)
        user.take_over(shards)

    def _read_to_the_end(self) -> ChainReading:
        """As ``read``; also what a listing lacks of the last records, which may name what would be removed.

        Raises:
            StorageAwayError: A record is there, and no listing shows it.
        """
        earlier = None
        while True:
            reading = self._reading()
            beyond = self._path(reading.next_number)
            self._files.pull_file(beyond)
            if not os.path.lexists(beyond):
                return reading
            if beyond == earlier:
                raise StorageAwayError(f"{beyond} is there, and the storage does not list it")
            earlier = beyond

    def _last_number(self) -> int:
        found = (_RECORD.fullmatch(name) for name in self._names())
        last = 0
        for number in sorted(int(match[1]) for match in found if match):
            if number - last > _LARGEST_GAP:
                break
            last = number
        return last

    def _names(self) -> list[str]:
        # Not with `glob`, to which a folder that may not be listed is an empty one: all shards would be of no use.
        try:
            return [path.name for path in self._folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _path(self, number: int) -> Path:
        return self._folder / name_of(number)

    def _read(self, number: int) -> Record:
        path = self._path(number)
        if not os.path.lexists(path):  # later ones are there: a listing may lack this one
            self._files.pull_file(path)
        record = record_of(read_plain(path))
        named = record.job_id
        if named == self._job.name and not isinstance(record, AttemptOpened):
            named = job_of_checkpoint(record.checkpoint_id)
        if named != self._job.name:
            raise ValueError(f"it is a record of {named}")
        return record

    def _named_fences(self) -> list[int]:
        opened = (name for name in self._names() if name.startswith(_OPENED))
        names = (name.removeprefix(_OPENED) for name in opened)
        # A rank may have made one of hundreds of digits, which no record or message holds.
        fences = (int(name) for name in names if name.isdecimal())
        return [fence for fence in fences if fence <= MOST_WHOLE]

    def _name_fence(self, fence: int) -> None:
        # Made durable with the record that follows it.
        self._files.touch(self._folder / f"{_OPENED}{fence:04d}")


def _place(name: str) -> tuple[int, int]:
    """The attempt and the step of a checkpoint; zeros for another name."""
    match = _STEP_AND_FENCE.search(name)
    return (0, 0) if match is None else (int(match[2]), int(match[1]))


def _named(reading: ChainReading) -> set[str] | None:
    """The checkpoints that manifests name; None while a record is damaged."""
    if reading.damaged:
        return None
    return {
        head.checkpoint_id
        for head in reading.heads.values()
        if head.kind is Manifest and head.checkpoint_id is not None
    }


def _open_to_all(folder: int, kept: int) -> None:
    """Let all read and enter a folder that is open, and its owner write; of its other rights `kept` stay."""
    os.fchmod(folder, stat.S_IMODE(os.fstat(folder).st_mode) & kept | _ALL_READ_AND_ENTER)
