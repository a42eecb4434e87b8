"""The storage in a bucket: all nodes see its objects, and each node has a folder with copies of them.

Ranks hold no credentials. They write and read the folder, as they do everywhere; their agent uploads what
they wrote before it forwards their votes, and has fetched what they load before it forks them::

    bucket                                              who writes it, when
    <prefix>/<job>/chain/opened-0001, 00000001.json     the agent of any node, when an attempt is opened
    <prefix>/<job>/job.json                             the same agent, behind that
    <prefix>/<job>/shards/<checkpoint>/…                the agent of each rank, before it forwards its vote
    <prefix>/<job>/chain/00000002.json                  the agent of rank 0: one conditional write, the commit

Copies of records are compared with the bucket at each reading. Copies of shards are bounded: those that the
bucket has may go, the longest unused ones first.
"""

import contextlib
import fnmatch
import hashlib
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import structlog

from services.contract.storage.bucket import Bucket, NoConditionalWritesError
from services.contract.storage.commit_chain import DRAFT_PREFIX
from services.contract.storage.job_cards import CARD
from services.contract.storage.manifests import ShardFile
from services.contract.system.durable import make_folders, names_like, sync_folder, write_new
from services.contract.words.ids import is_job_id
from services.worker.agent.host.removal import PURGED_WITHIN_S, remove_tree, remove_what_can_be
from services.worker.agent.storage.identity import BYTES, IDENTITY, NAME
from services.worker.agent.storage.shard_check import digest_fault, fault_of, size_fault

_LOCKS: Final = 64
_FETCHES: Final = 2
_ASIDE_AT_ONCE: Final = 256
_CLOSED: Final = ".gz"
_ONLY_A_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_log = structlog.get_logger()
_Version = tuple[str, int, int]


class BucketFiles:
    """``SharedFiles`` in a bucket.

    Args:
        bucket: The objects.
        root: This node's copies; no other agent uses the folder.
        most_bytes: Of copies of shards that the bucket has.
    """

    def __init__(self, bucket: Bucket, root: Path, most_bytes: int) -> None:
        self._bucket = bucket
        self._root = root
        self._most_bytes = most_bytes
        # A pull that listed before a link must not remove what that has put there.
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._versions: dict[Path, _Version] = {}
        self._counting = threading.Lock()
        self._copies: OrderedDict[Path, int] = OrderedDict()
        self._copied_bytes = 0
        self._loading: dict[str, set[Path]] = {}
        self._gone_before: set[Path] = set()

    @property
    def root(self) -> Path:
        """See ``SharedFiles.root``."""
        return self._root

    def identity(self) -> str | None:
        """See ``SharedFiles.identity``."""
        try:
            try:
                text = self._bucket.read(NAME)[0]
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    self._bucket.create(NAME, secrets.token_hex(BYTES).encode())
                text = self._bucket.read(NAME)[0]
        except OSError:
            return None
        name = text.decode("ascii", "replace")
        return name if IDENTITY.fullmatch(name) else None

    def require_known(self) -> None:
        """See ``SharedFiles.require_known``: nothing else is in a bucket's place."""

    def fault(self) -> str | None:
        """See ``SharedFiles.fault``: tries each right that is needed, and the condition of writes."""
        name = f".tried-{secrets.token_hex(8)}"
        try:
            self._bucket.prove_conditional_writes()
            self._bucket.replace(name, b"tried")
            self._bucket.read(name)
            self._bucket.folders("")
            self._bucket.remove(name)
        except NoConditionalWritesError as error:
            return str(error)
        except OSError as error:
            return f"{error}; nodes must be allowed to list, read, write and delete objects and uploads there"
        return None

    def pull(self, folder: Path) -> None:
        """See ``RecordFiles.pull``."""
        with self._lock(folder):
            there = self._bucket.names(self._name(folder))
            for path in self._here(folder):
                if path.name not in there:
                    # Some stores list late what they have: the object itself decides.
                    self._bring(path)
            for name, (_, etag) in there.items():
                here = _version(folder / name, etag)
                if here is None or here != self._versions.get(folder / name):
                    self._bring(folder / name)

    def holds(self, folder: Path) -> bool:
        """See ``RecordFiles.holds``."""
        name = self._name(folder)
        return bool(self._bucket.names(name) or self._bucket.folders(name))

    def link(self, draft: Path, path: Path) -> None:
        """See ``RecordFiles.link``."""
        with self._lock(path.parent):
            content = draft.read_bytes()
            try:
                etag = self._bucket.create(self._name(path), content)
            except FileExistsError:
                self._bring(path)  # a listing may lack it for long
                raise
            self._put(path, content, etag)

    def touch(self, path: Path) -> None:
        """See ``RecordFiles.touch``."""
        with self._lock(path.parent):
            self._put(path, b"", self._bucket.replace(self._name(path), b""))

    def folders(self, parent: Path, pattern: str) -> Iterator[Path]:
        """See ``RecordFiles.folders``: what is only here counts, too; its upload may have begun or not."""
        there = self._bucket.folders(self._name(parent))
        yield from (parent / name for name in there if fnmatch.fnmatchcase(name, pattern))
        yield from (parent / name for name in names_like(parent, pattern) if name not in there)

    def jobs(self) -> list[str]:
        """See ``SharedFiles.jobs``. Copies of jobs that the bucket does not hold, twice in a row, go: they were purged."""
        there = set(filter(is_job_id, self._bucket.folders("")))
        gone = {path for path in self._root.glob("job_*") if path.name not in there}
        # Not at the first look: an attempt may have been about to be opened.
        for folder in gone & self._gone_before:
            self.drop_copy(folder)
        self._gone_before = gone
        return sorted(there)

    def pull_file(self, path: Path) -> None:
        """See ``RecordFiles.pull_file``."""
        with self._lock(path.parent):
            self._bring(path)

    def pull_missing(self, folder: Path) -> None:
        """See ``SharedFiles.pull_missing``."""
        with self._lock(folder):
            for name, (size, _) in self._bucket.names(self._name(folder)).items():
                path = folder / name
                # A closed file is replaced by any node; what grows is written by one.
                if name.endswith(_CLOSED) or not path.exists() or path.lstat().st_size < size:
                    self._download(path)

    def publish(
        self,
        path: Path,
        go_on: Callable[[], None] = lambda: None,
        size: int | None = None,
        sha256: str | None = None,
    ) -> None:
        """See ``SharedFiles.publish``."""
        if os.path.lexists(path):
            self._bucket.upload(self._name(path), path, go_on, size, sha256)
            if self._is_shard(path):
                self._count(path)
        else:
            self._bucket.delete(self._name(path))

    def fetch(
        self,
        path: Path,
        shard: ShardFile,
        for_job: str,
        took: Callable[[int], None] = lambda _: None,
    ) -> None:
        """See ``SharedFiles.fetch``."""
        with self._counting:
            self._loading.setdefault(for_job, set()).add(path)
        with self._lock(path):
            for _ in range(_FETCHES):
                if _is_whole(path, shard):
                    break
                try:
                    self._download(path, took, shard.bytes)
                except FileNotFoundError:  # whoever loads it tells
                    return
            else:
                _log.warning("fetched_shard_is_damaged", file=str(path))
        self._count(path)

    def place(self, path: Path) -> str:
        """See ``SharedFiles.place``."""
        return f"{self._bucket.address}/{self._name(path)}"

    def release(self, job_id: str) -> None:
        """See ``SharedFiles.release``."""
        with self._counting:
            self._loading.pop(job_id, None)

    def drop_copy(self, folder: Path) -> None:
        """See ``SharedFiles.drop_copy``."""
        self._forget_below(folder)
        remove_what_can_be(folder)

    def size(self, path: Path) -> int:
        """See ``SharedFiles.size``."""
        return self._bucket.size(self._name(path))

    def fault_of(self, path: Path, shard: ShardFile) -> str | None:
        """See ``SharedFiles.fault_of``."""
        digest, size = hashlib.sha256(), 0
        try:
            for part in self._bucket.parts(self._name(path)):
                digest.update(part)
                size += len(part)
                if size > shard.bytes:
                    break
        except FileNotFoundError:
            return "the file is missing"
        return size_fault(size, shard) or digest_fault(digest.hexdigest(), shard)

    def remove(self, path: Path) -> None:
        """See ``SharedFiles.remove``."""
        if not path.name.startswith(DRAFT_PREFIX):  # drafts are never uploaded
            self._bucket.remove(self._name(path))
        self._forget_below(path)
        if os.path.lexists(path):
            remove_tree(path)

    def discard_job(self, job_id: str) -> None:
        """See ``SharedFiles.discard_job``: the card first, by which it would be found, and its fences last."""
        self._bucket.delete(f"{job_id}/{CARD}")
        for folder in sorted(self._bucket.folders(job_id) - {"chain"}):
            self._bucket.remove(f"{job_id}/{folder}")
        whole = self._root / job_id
        self._bucket.remove(self._name(whole))
        self._forget_below(whole)
        if os.path.lexists(whole):
            remove_tree(whole, PURGED_WITHIN_S)

    def forget_copies(self) -> None:
        """See ``SharedFiles.forget_copies``: shards; ranks of an earlier life whose uploads may be missing have died with it."""
        for folder in self._root.glob("job_*/shards"):
            remove_what_can_be(folder)

    def _lock(self, path: Path) -> threading.Lock:
        return self._locks[hash(path) % _LOCKS]

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _is_shard(self, path: Path) -> bool:
        return "shards" in path.relative_to(self._root).parts

    def _here(self, folder: Path) -> Iterator[Path]:
        if folder.is_dir():
            yield from (p for p in folder.iterdir() if not p.name.startswith(DRAFT_PREFIX))

    def _bring(self, path: Path) -> None:
        try:
            content, etag = self._bucket.read(self._name(path))
        except FileNotFoundError:
            path.unlink(missing_ok=True)
            self._versions.pop(path, None)
        else:
            self._put(path, content, etag)

    def _put(self, path: Path, content: bytes, etag: str) -> None:
        make_folders(path.parent, self._root)
        draft = path.with_name(f"{DRAFT_PREFIX}{secrets.token_hex(8)}")
        try:
            write_new(draft, content)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        version = _version(path, etag)
        if version is not None:
            self._versions[path] = version

    def _download(
        self, path: Path, took: Callable[[int], None] = lambda _: None, most: int | None = None
    ) -> None:
        """Put the object in the place of what is here, whole or not at all; of one longer than ``most`` some more than that."""
        parts = self._bucket.parts(self._name(path))
        with self._held(path.parent) as folder:
            draft = folder / f"{DRAFT_PREFIX}{secrets.token_hex(8)}"
            try:
                with draft.open("xb") as file:
                    _give_to_owner_of(folder, file.fileno())
                    for part in parts:
                        file.write(part)
                        took(len(part))
                        if most is not None and file.tell() > most:
                            break
                draft.replace(folder / path.name)
            finally:
                draft.unlink(missing_ok=True)
            sync_folder(folder)

    @contextlib.contextmanager
    def _held(self, folder: Path) -> Iterator[Path]:
        """A path to a folder that leads there whatever is put in its place; it is made if it is missing.

        Ranks write in the folder above: a link in its place would lead where they may not write.
        """
        if folder.is_symlink():
            folder.unlink()
        is_new = not folder.exists()
        make_folders(folder, self._root)
        descriptor = os.open(folder, _ONLY_A_FOLDER)
        try:
            if is_new:
                _give_to_owner_of(folder.parent, descriptor)
            yield Path(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def _count(self, path: Path) -> None:
        """The bucket has it: it may go. Remove what is too much of such copies, the longest unused first."""
        aside: list[Path] = []
        with self._counting, contextlib.suppress(FileNotFoundError):
            size = path.lstat().st_size
            self._uncount(path)
            self._copies[path] = size
            self._copied_bytes += size
            # Some at once: a rank may have had tens of thousands uploaded, and then made one a terabyte long.
            for old in self._surplus():
                self._uncount(old)
                aside += _put_aside(old)
        # Not within: to free the pieces of which a rank has made one may take minutes, and the agent's loop counts, too.
        for doomed in aside:
            _unlink(doomed)

    def _surplus(self) -> list[Path]:
        """Copies that are too much, the longest unused first; some of them where there are many."""
        loading = set().union(*self._loading.values())
        surplus: list[Path] = []
        left = self._copied_bytes
        for path, size in self._copies.items():
            if left <= self._most_bytes or len(surplus) == _ASIDE_AT_ONCE:
                break
            if path not in loading:
                surplus.append(path)
                left -= size
        return surplus

    def _uncount(self, path: Path) -> None:
        self._copied_bytes -= self._copies.pop(path, 0)

    def _forget_below(self, path: Path) -> None:
        with self._counting:
            for known in _at_or_below(path, self._copies):
                self._uncount(known)
        for known in _at_or_below(path, list(self._versions)):
            self._versions.pop(known, None)


def _at_or_below(folder: Path, paths: Iterable[Path]) -> list[Path]:
    # By their texts: `is_relative_to` takes a hundred times as long, and a rank may have had any number uploaded.
    start = f"{folder}/"
    return [path for path in paths if f"{path}/".startswith(start)]


def _is_whole(path: Path, shard: ShardFile) -> bool:
    """Whether the copy is there, and as its rank voted; something else may be in its place."""
    try:
        return fault_of(path, shard) is None
    except OSError:
        return False


def _give_to_owner_of(folder: Path, descriptor: int) -> None:
    """What an agent puts where ranks of another user write is theirs: else they could not read it."""
    owner = folder.stat()
    if owner.st_uid != os.geteuid():
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


def _put_aside(path: Path) -> list[Path]:
    """Give a copy another name, by which nobody loads it; nothing where it is not there any more."""
    aside = path.with_name(f"{DRAFT_PREFIX}{secrets.token_hex(8)}")
    with contextlib.suppress(OSError), _only_folder(path.parent) as folder:
        os.rename(path.name, aside.name, src_dir_fd=folder, dst_dir_fd=folder)
        return [aside]
    return []


def _unlink(path: Path) -> None:
    """Remove a copy, if it is there."""
    with contextlib.suppress(OSError), _only_folder(path.parent) as folder:
        os.unlink(path.name, dir_fd=folder)


@contextlib.contextmanager
def _only_folder(path: Path) -> Iterator[int]:
    """A descriptor of a folder.

    Raises:
        OSError: It is not there, or by now a link that leads elsewhere.
    """
    folder = os.open(path, _ONLY_A_FOLDER)
    try:
        yield folder
    finally:
        os.close(folder)


def _version(path: Path, etag: str) -> _Version | None:
    """Which content is here: that of this ETag, as long as nobody has changed the file since."""
    try:
        about = path.lstat()
    except OSError:
        return None
    return etag, about.st_mtime_ns, about.st_ino
