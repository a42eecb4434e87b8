"""Backup and restore of Redis and of the storage: ``python -m services.controller.backup save|restore FOLDER``.

``save`` copies while everything runs. Redis first: what its copy names was committed before the
storage is copied. Of a job first the chain, then the shards that the chain commits: the other way
round a commit could come along whose shards do not. What retention takes meanwhile is seen in the
chain: then what the chain has gained since is copied, and nothing a second time. A bucket is copied
in the same way, into the same files.

``restore`` writes into empty folders, before Redis and agents are started on them. As root both keep
owners and modes.
"""

import argparse
import errno
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from services.contract.storage.commit_chain import DRAFT_PREFIX, CommitChain
from services.contract.storage.manifests import Manifest
from services.contract.storage.storage_address import BucketAddress, storage_address
from services.contract.system.durable import is_hollow, open_plain, open_plain_in, sync_folder
from services.contract.system.own_process import set_up_process
from services.contract.words.control_characters import one_line
from services.contract.words.ids import is_job_id

if TYPE_CHECKING:
    from services.contract.storage.bucket import Bucket

_AOF: Final = "appendonlydir"
_UNFINISHED: Final = ".unfinished"
_MOST_TRIES: Final = 100
_BLOCK: Final = 1 << 20
_FAILED: Final = 1
# Ranks may make folders within folders; ours are four deep.
_DEEPEST: Final = 32
_LONGEST_KEY: Final = 1024
_ONLY_A_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# What opening answers where a rank has put something else in a place, or holds a lease on what is there.
_OF_RANKS: Final = (errno.ELOOP, errno.ENOTDIR, errno.EINVAL, errno.ENXIO, errno.EAGAIN)


class BackupError(Exception):
    """The copy cannot be made; the text says what to do."""


class _HollowError(Exception):
    """Nearly all of a file is holes, which nothing of ours leaves: to copy it could take for ever."""


class _ChangedError(Exception):
    """What was being copied has been replaced or taken away."""


def save(redis: Path, checkpoints: Path | BucketAddress, backup: Path) -> int:
    """Copy both into ``backup``, which appears whole or not at all; returns the number of jobs.

    Args:
        redis: Redis's folder (its ``dir``), with the folder of its append-only file.
        checkpoints: The storage's root, ``MESHLOOM_CHECKPOINT_ROOT``.
        backup: A new folder.

    Raises:
        BackupError: ``backup`` is there, Redis writes no append-only file, or a checkpoint is damaged.
        OSError: A folder cannot be read or written.
    """
    if backup.exists():
        raise BackupError(f"{backup} is there: name a new folder, or move the older backup away")
    if not (redis / _AOF).is_dir():
        raise BackupError(f"{redis} has no {_AOF}: start Redis 7 or newer with `--appendonly yes`")
    draft = backup.with_name(f"{backup.name}{_UNFINISHED}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700, parents=True)
    _again(lambda: _copy_redis(redis / _AOF, draft / "redis" / _AOF), "Redis")
    _like(redis, draft / "redis")
    if isinstance(checkpoints, Path):
        jobs = _copy_storage(checkpoints, draft / "checkpoints")
    else:
        jobs = _copy_bucket(_bucket(checkpoints), draft / "checkpoints")
    os.sync()
    draft.rename(backup)
    sync_folder(backup.parent)
    return jobs


def restore(redis: Path, checkpoints: Path | BucketAddress, backup: Path) -> int:
    """Copy a backup back into the empty ``redis`` and ``checkpoints``; returns the number of jobs.

    What was saved of a folder can be restored into a bucket, and the other way round.

    Raises:
        BackupError: ``backup`` is none, or there is something in one of the two.
        OSError: A folder cannot be read or written.
    """
    if not (backup / "redis" / _AOF).is_dir() or not (backup / "checkpoints").is_dir():
        raise BackupError(f"{backup} is no backup of `save`")
    bucket = None if isinstance(checkpoints, Path) else _bucket(checkpoints)
    full = [
        f for f in (redis, checkpoints) if isinstance(f, Path) and f.is_dir() and any(f.iterdir())
    ]
    if full or (bucket is not None and (bucket.names("") or bucket.folders(""))):
        raise BackupError(
            f"{full[0] if full else checkpoints} is not empty: stop what uses it, and move its content away first"
        )
    _copy_tree((backup / "redis").resolve(), redis)
    if isinstance(checkpoints, Path):
        _copy_tree((backup / "checkpoints").resolve(), checkpoints)
    elif bucket is not None:
        _fill(bucket, backup / "checkpoints")
    os.sync()
    return len(list((backup / "checkpoints").glob("job_*")))


def _copy_redis(source: Path, target: Path) -> None:
    # While a rewrite replaces it, there is another one, temp-…, that is not yet in force.
    manifests = [m for m in source.glob("*.manifest") if not m.name.startswith("temp-")]
    if len(manifests) != 1:
        raise BackupError(
            f"{source} has {len(manifests)} manifests, where Redis has one: is it the folder of a Redis that runs?"
        )
    (manifest,) = manifests
    before = manifest.read_text(errors="surrogateescape")
    shutil.rmtree(target, ignore_errors=True)
    _make_like(source, target)
    # Lines such as `file appendonly.aof.1.base.rdb seq 1 type b`; the last file grows while it is copied.
    names = [line.split()[1] for line in before.splitlines() if line.startswith("file ")]
    for name in names:
        try:
            _copy_file(source / name, target / name)
        except FileNotFoundError:
            raise _ChangedError from None
    # A rewrite replaces the files and then the manifest.
    if manifest.read_text(errors="surrogateescape") != before:
        raise _ChangedError
    _copy_file(manifest, target / manifest.name)


def _copy_storage(source: Path, target: Path) -> int:
    _make_like(source, target)
    jobs = 0
    for path in sorted(source.iterdir()):
        if path.is_symlink():
            # Agents follow it: left out, what the job has committed would be missing without a word.
            if is_job_id(path.name) and path.is_dir():
                raise BackupError(
                    f"{path} is a link and no folder of a job: put the folder in its place, or mount it there"
                )
            continue
        if not path.is_dir():
            _copy_beside_jobs(path, target / path.name)
        elif (path / "chain").is_dir():
            _again(partial(_copy_job, path, target, set()), f"job {path.name}")
            _say_damaged(target, path.name)
            jobs += (target / path.name).is_dir()
        else:
            _copy_tree(path, target / path.name)
    return jobs


def _copy_beside_jobs(source: Path, target: Path) -> None:
    folder = os.open(source.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _copy_plain(folder, source, target)
    finally:
        os.close(folder)


def _copy_job(source: Path, root: Path, copied: set[str]) -> None:
    """Copy what is new; ``copied`` names the checkpoints whose shards were copied by an earlier try.

    Raises:
        _ChangedError: A checkpoint that the chain's copy commits was retired meanwhile, or all of the job was deleted.
    """
    if not (source / "chain").is_dir():
        shutil.rmtree(root / source.name, ignore_errors=True)
        return  # deleted meanwhile
    try:
        _copy_new(source, root, copied)
    except FileNotFoundError:
        if (source / "chain").is_dir():
            raise
        raise _ChangedError from None


def _copy_new(source: Path, root: Path, copied: set[str]) -> None:
    target = root / source.name
    _make_like(source, target)
    # Records are never replaced.
    chain = target / "chain"
    known = {path.name for path in chain.iterdir()} if chain.is_dir() else set()
    _copy_tree(source / "chain", chain, without=known)
    if (source / "shards").is_dir():
        _make_like(source / "shards", target / "shards")
    gone = _copy_committed(root, source.name, copied, partial(_copy_shards, source, target))
    if gone:
        alive = CommitChain(source.parent, source.name).committed_ids()
        for name in gone.keys() & alive:
            raise gone[name]
        raise _ChangedError
    _copy_tree(source, target, without=("chain", "shards"))


def _copy_committed(
    root: Path, job: str, copied: set[str], copy: Callable[[Manifest], None]
) -> dict[str, FileNotFoundError]:
    """Make the shards below ``root`` those that the chain there commits; returns the checkpoints that are gone."""
    chain, gone = CommitChain(root, job), {}
    committed = {manifest.checkpoint_id: manifest for manifest in chain.committed()}
    for name in copied - committed.keys():
        shutil.rmtree(chain.shard_folder(name), ignore_errors=True)
        copied.remove(name)
    for name in sorted(committed.keys() - copied):
        try:
            copy(committed[name])
        except FileNotFoundError as error:
            shutil.rmtree(chain.shard_folder(name), ignore_errors=True)
            gone[name] = error
        else:
            copied.add(name)
    return gone


def _say_damaged(root: Path, job: str) -> None:
    """Name the records of a copied chain that cannot be read: what they commit is nowhere else named."""
    for record in CommitChain(root, job).read().damaged:
        sys.stderr.write(
            f"backup: {f'{job}/chain/{record.name}'!a} is damaged: if it commits a checkpoint, the shards of that are "
            f"left out: {record.reason!a}\n"
        )


def _copy_shards(source: Path, target: Path, manifest: Manifest) -> None:
    folder = Path("shards") / manifest.checkpoint_id
    if (source / folder).is_symlink():
        raise BackupError(f"{source / folder} is a link and no folder of shards")
    _make_like(source / folder, target / folder)
    for shard in manifest.shards:
        path = source / folder / shard.name
        try:
            digest = _copy_file(path, target / folder / shard.name)
        except _HollowError:
            raise _damaged(str(path), "that of a file full of holes", shard.sha256) from None
        except BlockingIOError:
            raise BackupError(
                f"{path} cannot be read while a process holds a lease on it: end the ranks of "
                f"{source.name}, then save again"
            ) from None
        if digest != shard.sha256:
            raise _damaged(str(path), digest, shard.sha256)


def _bucket(address: BucketAddress) -> "Bucket":
    # Only here, for one who has no bucket need not have boto3.
    from services.contract.storage.bucket import Bucket  # noqa: PLC0415

    return Bucket(address)


def _copy_bucket(bucket: "Bucket", target: Path) -> int:
    target.mkdir()
    for job in sorted(bucket.folders("")):
        _again(partial(_copy_job_of, bucket, job, target, set()), f"job {job}")
        _say_damaged(target, job)
    _fetch_below(bucket, "", target, deeper=False)
    return len(list(target.glob("job_*")))


def _copy_job_of(bucket: "Bucket", job: str, root: Path, copied: set[str]) -> None:
    """As `_copy_job`."""
    target = root / job
    chain = bucket.names(f"{job}/chain").keys()
    if not chain:
        shutil.rmtree(target, ignore_errors=True)
    for name in sorted(chain):
        if not (target / "chain" / name).exists():
            try:
                _fetch(bucket, f"{job}/chain/{name}", root)
            except FileNotFoundError:  # records go with all of their job
                raise _ChangedError from None
    for error in _copy_committed(root, job, copied, partial(_fetch_shards, bucket, root)).values():
        if bucket.names(f"{job}/chain").keys() != chain:
            raise _ChangedError
        raise error
    # An object may have the name of a folder, too, which no file can: what lies in folders is ours.
    for folder in (*sorted(bucket.folders(job) - {"chain", "shards"}), ""):
        _fetch_below(bucket, f"{job}/{folder}".rstrip("/"), root, deeper=bool(folder))


def _fetch_shards(bucket: "Bucket", root: Path, manifest: Manifest) -> None:
    for shard in manifest.shards:
        name = f"{manifest.job_id}/shards/{manifest.checkpoint_id}/{shard.name}"
        digest = _fetch(bucket, name, root)
        if digest != shard.sha256:
            raise _damaged(f"{bucket.address}/{name}", digest, shard.sha256)


def _fetch_below(bucket: "Bucket", folder: str, root: Path, *, deeper: bool) -> None:
    for further in bucket.folders(folder) if deeper else ():
        _fetch_below(bucket, f"{folder}/{further}", root, deeper=True)
    for name in bucket.names(folder):
        place = f"{folder}/{name}".lstrip("/")
        try:
            _fetch(bucket, place, root)
        except FileNotFoundError:
            continue
        except (FileExistsError, NotADirectoryError):
            _say_left_out(root / place, "a folder has its name")


def _fetch(bucket: "Bucket", name: str, root: Path) -> str:
    """The sha256 of what was copied."""
    digest, parts = hashlib.sha256(), bucket.parts(name)
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as writing:
        for part in parts:
            digest.update(part)
            writing.write(part)
    return digest.hexdigest()


def _fill(bucket: "Bucket", source: Path) -> None:
    """Chains last: what a commit names is there before it."""
    files = [path for path in source.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path.parent.name == "chain", path)):
        name = path.relative_to(source).as_posix()
        key = f"{bucket.address.prefix}/{name}"
        # Lists of objects are XML, which has no control characters, and names are UTF-8. Ours are printable.
        if not name.isprintable() or len(key.encode()) > _LONGEST_KEY:
            _say_left_out(path, "no object can have its name")
        else:
            bucket.upload(name, path)


def _damaged(place: str, found: str, voted: str) -> BackupError:
    return BackupError(
        f"{place} is damaged: its sha256 is {found}, its manifest says {voted}; delete the "
        "checkpoint, then save again"
    )


def _copy_tree(source: Path, target: Path, *, without: Collection[str] = ()) -> None:
    """All plain files below ``source``; what vanishes meanwhile is left out.

    So is what only a rank's user code leaves there to prevent copies; each is named on stderr. Folders are held
    open: whatever a rank puts in the place of one meanwhile, nothing is copied that lies elsewhere.
    """
    folder = os.open(source, _ONLY_A_FOLDER)
    try:
        _copy_folder(folder, source, target, without, _DEEPEST)
    finally:
        os.close(folder)


def _copy_folder(
    folder: int, source: Path, target: Path, without: Collection[str], depth: int
) -> None:
    target.mkdir(parents=True, exist_ok=True)
    _take_on(target, os.fstat(folder))
    for name in sorted(os.listdir(folder)):
        if name in without or name.startswith(DRAFT_PREFIX):
            continue
        path = source / name
        mode = _mode(folder, name)
        if stat.S_ISDIR(mode) and not depth:
            _say_left_out(path, f"it is more than {_DEEPEST} folders deep")
        elif stat.S_ISDIR(mode):
            inner = _opened(path, partial(os.open, name, _ONLY_A_FOLDER, dir_fd=folder))
            if inner is not None:
                try:
                    _copy_folder(inner, path, target / name, (), depth - 1)
                finally:
                    os.close(inner)
        else:
            _copy_plain(folder, path, target / name)


def _copy_plain(folder: int, source: Path, target: Path) -> None:
    """What is at ``source`` in this folder, if it is a plain file; what cannot be copied of such is named."""
    if not stat.S_ISREG(_mode(folder, source.name)):
        return
    file = _opened(source, partial(open_plain_in, folder, source.name))
    if file is not None:
        try:
            _copy_opened(file, target)
        except _HollowError:
            _say_left_out(source, "nearly all of it is holes")


def _mode(folder: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def _opened(path: Path, opening: Callable[[], int]) -> int | None:
    """A descriptor of what was there a moment ago; None where it is left out."""
    try:
        return opening()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in _OF_RANKS:
            raise
        _say_left_out(path, f"it cannot be opened: {error.strerror}")
        return None


def _say_left_out(path: Path, why: str) -> None:
    sys.stderr.write(f"backup: {str(path)!a} is left out: {why}\n")


def _copy_file(source: Path, target: Path) -> str:
    """The sha256 of what was copied.

    Raises:
        _HollowError: Nothing was.
    """
    return _copy_opened(open_plain(source), target)


def _copy_opened(descriptor: int, target: Path) -> str:
    with os.fdopen(descriptor, "rb") as reading:
        if is_hollow(descriptor):
            raise _HollowError
        status = os.fstat(descriptor)
        digest = hashlib.sha256()
        _write_copy(reading, status.st_size, target, digest)
    _take_on(target, status)
    return digest.hexdigest()


def _write_copy(reading: BinaryIO, size: int, target: Path, digest: "hashlib._Hash") -> None:
    left = size  # and no more: who writes there may make it longer for ever, at no cost with holes
    with target.open("xb") as writing:
        while left and (block := reading.read(min(left, _BLOCK))):
            digest.update(block)
            writing.write(block)
            left -= len(block)


def _make_like(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    _like(source, target)


def _like(source: Path, target: Path) -> None:
    _take_on(target, source.stat())


def _take_on(path: Path, status: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.chown(path, status.st_uid, status.st_gid)
    # Who runs a file has the rights of its owner by bits that a rank may have set.
    path.chmod(status.st_mode & (0o7777 if stat.S_ISDIR(status.st_mode) else 0o777))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _again(copy: Callable[[], None], what: str) -> None:
    """Copy until nothing has changed meanwhile.

    Raises:
        BackupError: It changed each time.
    """
    for _ in range(_MOST_TRIES):
        try:
            return copy()
        except _ChangedError:
            continue
    raise BackupError(
        f"{what} changed {_MOST_TRIES} times while it was copied: save at a quieter time"
    )


def _address(text: str) -> Path | BucketAddress:
    address = storage_address(text)
    return address if isinstance(address, BucketAddress) else Path(text)


def main() -> None:
    """Save or restore. Exit code 1: it could not be done, and why is on stderr."""
    # Credentials of a bucket are in its environment, and it may run for long beside ranks of the same user.
    set_up_process(holds_secrets=True)
    parser = argparse.ArgumentParser(prog="python -m services.controller.backup")
    parser.add_argument("action", choices=["save", "restore"])
    parser.add_argument("--redis", type=Path, required=True, help="Redis's folder")
    parser.add_argument(
        "--checkpoints",
        type=_address,
        required=True,
        help="the storage's root, a folder or s3://BUCKET/PREFIX",
    )
    parser.add_argument("backup", type=Path, help="the backup's folder")
    given = parser.parse_args()
    action = save if given.action == "save" else restore
    try:
        jobs = action(given.redis, given.checkpoints, given.backup)
    except (BackupError, OSError) as error:
        # What the server of a bucket answers is in it.
        sys.stderr.write(f"backup: {one_line(str(error))}\n")
        sys.exit(_FAILED)
    sys.stdout.write(f"{given.action}: Redis and {jobs} jobs with their checkpoints\n")


if __name__ == "__main__":
    main()
