"""Backup and restore of Redis and of the storage: ``python -m services.controller.backup save|restore FOLDER``.

``save`` copies while everything runs. Redis first: what its copy names was committed before the
storage is copied. Of a job first the chain, then the shards that the chain commits: the other way
round a commit could come along whose shards do not. What retention takes meanwhile is seen in the
chain, and that job is copied again.

``restore`` writes into empty folders, before Redis and agents are started on them. As root both keep
owners and modes.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from services.contract.storage.commit_chain import DRAFT_PREFIX, CommitChain
from services.contract.storage.manifests import Manifest
from services.contract.system.durable import open_plain, sync_folder

_AOF: Final = "appendonlydir"
_UNFINISHED: Final = ".unfinished"
_MOST_TRIES: Final = 100
_BLOCK: Final = 1 << 20
_FAILED: Final = 1


class BackupError(Exception):
    """The copy cannot be made; the text says what to do."""


class _ChangedError(Exception):
    """What was being copied has been replaced or taken away."""


def save(redis: Path, checkpoints: Path, backup: Path) -> int:
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
    _again(lambda: _copy_redis(redis / _AOF, draft / "redis" / _AOF), draft / "redis", "Redis")
    _like(redis, draft / "redis")
    jobs = _copy_storage(checkpoints, draft / "checkpoints")
    os.sync()
    draft.rename(backup)
    sync_folder(backup.parent)
    return jobs


def restore(redis: Path, checkpoints: Path, backup: Path) -> int:
    """Copy a backup back into the empty folders ``redis`` and ``checkpoints``; returns the number of jobs.

    Raises:
        BackupError: ``backup`` is none, or one of the folders is not empty.
        OSError: A folder cannot be read or written.
    """
    if not (backup / "redis" / _AOF).is_dir() or not (backup / "checkpoints").is_dir():
        raise BackupError(f"{backup} is no backup of `save`")
    for folder in (redis, checkpoints):
        if folder.is_dir() and any(folder.iterdir()):
            raise BackupError(
                f"{folder} is not empty: stop what uses it, and move its content away first"
            )
    for name, folder in (("redis", redis), ("checkpoints", checkpoints)):
        _copy_tree(backup / name, folder)
    os.sync()
    return len(list(checkpoints.glob("job_*")))


def _copy_redis(source: Path, target: Path) -> None:
    # While a rewrite replaces it, there is another one, temp-…, that is not yet in force.
    (manifest,) = source.glob("[!t]*.manifest")
    before = manifest.read_text()
    _make_like(source, target)
    # Lines such as `file appendonly.aof.1.base.rdb seq 1 type b`; the last file grows while it is copied.
    names = [line.split()[1] for line in before.splitlines() if line.startswith("file ")]
    for name in names:
        try:
            _copy_file(source / name, target / name)
        except FileNotFoundError:
            raise _ChangedError from None
    # A rewrite replaces the files and then the manifest.
    if manifest.read_text() != before:
        raise _ChangedError
    _copy_file(manifest, target / manifest.name)


def _copy_storage(source: Path, target: Path) -> int:
    _make_like(source, target)
    jobs = 0
    for path in sorted(source.iterdir()):
        if path.is_symlink():
            continue
        if not path.is_dir():
            with contextlib.suppress(FileNotFoundError):
                _copy_file(path, target / path.name)
        elif (path / "chain").is_dir():
            copy = target / path.name
            _again(lambda path=path: _copy_job(path, target), copy, f"job {path.name}")  # type: ignore[misc]
            jobs += copy.is_dir()
        else:
            _copy_tree(path, target / path.name)
    return jobs


def _copy_job(source: Path, root: Path) -> None:
    target = root / source.name
    if not source.is_dir():
        return  # deleted meanwhile
    _make_like(source, target)
    _copy_tree(source / "chain", target / "chain")
    if (source / "shards").is_dir():
        _make_like(source / "shards", target / "shards")
    for manifest in CommitChain(root, source.name).committed():
        try:
            _copy_shards(source, target, manifest)
        except FileNotFoundError:
            alive = {m.checkpoint_id for m in CommitChain(source.parent, source.name).committed()}
            if manifest.checkpoint_id not in alive:
                raise _ChangedError from None
            raise
    _copy_tree(source, target, without=("chain", "shards"))


def _copy_shards(source: Path, target: Path, manifest: Manifest) -> None:
    folder = Path("shards") / manifest.checkpoint_id
    if (source / folder).is_symlink():
        raise BackupError(f"{source / folder} is a link and no folder of shards")
    _make_like(source / folder, target / folder)
    for shard in manifest.shards:
        path = source / folder / shard.name
        digest = _copy_file(path, target / folder / shard.name)
        if digest != shard.sha256:
            raise BackupError(
                f"{path} is damaged: its sha256 is {digest}, its manifest says {shard.sha256}; "
                "delete the checkpoint, then save again"
            )


def _copy_tree(source: Path, target: Path, *, without: Sequence[str] = ()) -> None:
    """All plain files below ``source``; what vanishes meanwhile is left out."""
    _make_like(source, target)
    for path in _listed(source):
        if path.name in without or path.name.startswith(DRAFT_PREFIX) or path.is_symlink():
            continue
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir():
                _copy_tree(path, target / path.name)
            elif path.is_file():
                _copy_file(path, target / path.name)


def _listed(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        yield from sorted(folder.iterdir())


def _copy_file(source: Path, target: Path) -> str:
    """The sha256 of what was copied."""
    digest = hashlib.sha256()
    with os.fdopen(open_plain(source), "rb") as reading, target.open("xb") as writing:
        while block := reading.read(_BLOCK):
            digest.update(block)
            writing.write(block)
        status = os.fstat(reading.fileno())
    _take_on(target, status)
    return digest.hexdigest()


def _make_like(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    _like(source, target)


def _like(source: Path, target: Path) -> None:
    _take_on(target, source.stat())


def _take_on(path: Path, status: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.chown(path, status.st_uid, status.st_gid)
    path.chmod(status.st_mode & 0o7777)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _again(copy: Callable[[], None], target: Path, what: str) -> None:
    """Copy until nothing has changed meanwhile.

    Raises:
        BackupError: It changed each time.
    """
    for _ in range(_MOST_TRIES):
        try:
            return copy()
        except _ChangedError:
            shutil.rmtree(target)
    raise BackupError(
        f"{what} changed {_MOST_TRIES} times while it was copied: save at a quieter time"
    )


def main() -> None:
    """Save or restore. Exit code 1: it could not be done, and why is on stderr."""
    parser = argparse.ArgumentParser(prog="python -m services.controller.backup")
    parser.add_argument("action", choices=["save", "restore"])
    parser.add_argument("--redis", type=Path, required=True, help="Redis's folder")
    parser.add_argument("--checkpoints", type=Path, required=True, help="the storage's root")
    parser.add_argument("backup", type=Path, help="the backup's folder")
    given = parser.parse_args()
    action = save if given.action == "save" else restore
    try:
        jobs = action(given.redis, given.checkpoints, given.backup)
    except (BackupError, OSError) as error:
        sys.stderr.write(f"backup: {error}\n")
        sys.exit(_FAILED)
    sys.stdout.write(f"{given.action}: Redis and {jobs} jobs with their checkpoints\n")


if __name__ == "__main__":
    main()
