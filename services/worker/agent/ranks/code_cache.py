"""The uploaded code of this node: fetched once by its digest, unpacked for ranks and probes to read.

::

    <home>/nodes/<node id>/code/<hex>.tar.gz    the archive as it was uploaded
    <home>/nodes/<node id>/code/<hex>/          the same unpacked, read-only
    <root>/<job id>/code.tar.gz                 of each job with such code that was launched

An archive comes from Redis, or from the job's folder of the storage where Redis has lost it. What lies
here is compared with the archive at every use, and the archive with its digest; a damaged one is made
again. Nobody writes here but the agent, which alone has the node's folder.
"""

import asyncio
import contextlib
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Protocol

import structlog
from redis.asyncio import Redis

from services.contract.jobs.code_archives import (
    MOST_CODE_MIB,
    CodeArchiveError,
    digest_of,
    hex_of,
    is_unpacked,
    unpack,
)
from services.contract.redis import redis_keys as keys
from services.contract.storage.commit_chain import DRAFT_PREFIX
from services.contract.system.cancellation import end_if_told
from services.contract.system.durable import open_plain, sync_folder, write_new
from services.contract.system.rank_user import RankUser
from services.worker.agent.host.removal import remove_tree
from services.worker.agent.host.reserve import in_storage_thread
from services.worker.agent.streams.redis_clients import REDIS_AWAY, while_away

KEPT_UNUSED: Final = 16
_OF_A_JOB: Final = "code.tar.gz"
_ARCHIVE: Final = ".tar.gz"
_MOST_BYTES: Final = MOST_CODE_MIB << 20
_REDIS_WITHIN_S: Final = 15.0
_ENTERED_BY_OTHERS: Final = 0o711
_log = structlog.get_logger()


class NoCodeError(Exception):
    """This node cannot have the code that a job names; the text says why, and what to do."""


class Copies(Protocol):
    """The storage, as far as copies of archives are concerned: a part of ``SharedFiles``."""

    @property
    def root(self) -> Path: ...  # noqa: D102 see SharedFiles
    def pull_file(self, path: Path) -> None: ...  # noqa: D102 see SharedFiles
    def publish(self, path: Path) -> None: ...  # noqa: D102 see SharedFiles


class CodeCache:
    """Uploaded code, on behalf of one node.

    Args:
        redis: A client that does not retry; only read from.
        folder: Where the code lies; made when it is first needed.
        copies: The storage, where jobs keep their copies.
        ranks_are: The system user of ranks; None: this process's own.
    """

    def __init__(
        self, redis: Redis, folder: Path, copies: Copies | Path, ranks_are: RankUser | None = None
    ) -> None:
        self._redis = redis
        self._folder = folder
        self._copies = None if isinstance(copies, Path) else copies
        self._storage_root = copies if isinstance(copies, Path) else copies.root
        self._ranks_are = ranks_are
        self._in_use: Counter[str] = Counter()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @contextlib.asynccontextmanager
    async def kept(self, digest: str | None) -> AsyncIterator[Path | None]:
        """The folder of an archive, which stays until the block ends; None of none.

        Raises:
            NoCodeError: See ``acquire``.
            OSError: See ``acquire``.
        """
        if digest is None:
            yield None
            return
        folder = await self.acquire(digest)
        try:
            yield folder
        finally:
            self.release(digest)

    async def acquire(self, digest: str, job_id: str | None = None) -> Path:
        """The folder of an archive, which stays until it is released.

        With ``job_id`` the job's folder in the storage gets a copy, and is where the archive comes
        from if Redis has it no longer.

        Raises:
            NoCodeError: It is nowhere to be had, or none that may be unpacked.
            OSError: A disk refuses.
        """
        name = hex_of(digest)
        self._in_use[name] += 1
        try:
            async with self._locks[name]:
                body = await self._archive(digest, job_id)
                await asyncio.to_thread(self._make_whole, name, body)
                if job_id is not None:
                    await in_storage_thread(self._keep_copy, self._storage_root / job_id, body)
            await asyncio.to_thread(self._remove_least_used, frozenset(self._in_use))
        except BaseException as error:
            self.release(digest)
            if isinstance(error, CodeArchiveError):
                raise NoCodeError(f"the uploaded code {digest} is refused: {error}") from error
            raise
        return self._folder / name

    def release(self, digest: str) -> None:
        """A user of the folder has ended; the folder may be removed."""
        self._in_use[hex_of(digest)] -= 1
        self._in_use += Counter()

    async def _archive(self, digest: str, job_id: str | None) -> bytes:
        place = self._folder / f"{hex_of(digest)}{_ARCHIVE}"
        body = await asyncio.to_thread(_read, place, digest)
        if body is None:
            body = await self._from_redis(digest)
        if body is None and job_id is not None:
            copy = self._storage_root / job_id / _OF_A_JOB
            if self._copies is not None:
                await in_storage_thread(self._copies.pull_file, copy)
            body = await in_storage_thread(_read, copy, digest)
        if body is None:
            where = "" if job_id is None else f" nor complete in {self._storage_root / job_id}"
            raise NoCodeError(
                f"the uploaded code {digest} is neither in Redis{where}: upload the same files again "
                "(meshloom submit FILE --code DIR --dry-run)"
            )
        return body

    async def _from_redis(self, digest: str) -> bytes | None:
        """The archive, if Redis holds it whole; a Redis that is away is waited for."""

        def say(why: str) -> None:
            _log.warning("code_not_fetched", digest=digest, why=why)

        body = None
        try:
            async for attempt in while_away(say, give_up_s=_REDIS_WITHIN_S):
                with attempt:
                    end_if_told()
                    body = await self._parts(keys.code(hex_of(digest)))
        except REDIS_AWAY as error:
            say(str(error))
            return None
        if body is None or await asyncio.to_thread(digest_of, body) == digest:
            return body
        _log.error("code_damaged_in_redis", digest=digest)
        return None

    async def _parts(self, key: str) -> bytes | None:
        count: Any = await self._redis.hget(key, keys.CODE_PARTS)
        body = bytearray()
        ask: Any = self._redis.execute_command
        for number in range(int(count) if str(count).isdecimal() else 0):
            # Of the client's answers these alone are no text.
            part = await ask("HGET", key, str(number), NEVER_DECODE=True)
            if part is None or len(body) + len(part) > _MOST_BYTES:
                return None
            body += part
        return bytes(body) or None

    def _make_whole(self, name: str, body: bytes) -> None:
        """See that the archive lies there as it is, and unpacked."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._ranks_are is not None:  # they enter; what lies beside it has rights of its own
            for entered in (self._folder, self._folder.parent, self._folder.parent.parent):
                entered.chmod(_ENTERED_BY_OTHERS)
        folder, place = self._folder / name, self._folder / f"{name}{_ARCHIVE}"
        if not is_unpacked(body, folder):
            if folder.exists():
                _log.error("code_damaged_on_disk", digest=name)
            draft = self._folder / f"{DRAFT_PREFIX}{secrets.token_hex(8)}"
            try:
                unpack(body, draft)
                _remove(folder)
                draft.rename(folder)
            finally:
                _remove(draft)
        if _read(place, digest_of(body)) is None:
            _write(place, body)
        os.utime(place)

    def _keep_copy(self, job_folder: Path, body: bytes) -> None:
        """Keep an archive beside the job's checkpoints, unless it lies there."""
        place = job_folder / _OF_A_JOB
        if _read(place, digest_of(body)) is None:
            job_folder.mkdir(parents=True, exist_ok=True)
            _write(place, body)
            if self._copies is not None:
                try:
                    self._copies.publish(place)
                except OSError:
                    place.unlink(missing_ok=True)  # else the next launch takes it for published
                    raise

    def _remove_least_used(self, in_use: frozenset[str]) -> None:
        """Of archives that nobody has, the last used ones stay."""
        unused = [
            (path.stat().st_mtime_ns, path)
            for path in self._folder.glob(f"*{_ARCHIVE}")
            if path.name.removesuffix(_ARCHIVE) not in in_use
        ]
        for _, path in sorted(unused)[: max(len(unused) - KEPT_UNUSED, 0)]:
            path.unlink(missing_ok=True)
            _remove(path.with_name(path.name.removesuffix(_ARCHIVE)))
            _log.info("code_removed", digest=path.name)


def forget_drafts(folder: Path) -> None:
    """Remove what an agent that died was about to unpack, to keep or to remove."""
    for path in folder.glob(f"{DRAFT_PREFIX}*"):
        if path.is_dir():
            _remove(path)
        else:
            path.unlink(missing_ok=True)


def _write(place: Path, body: bytes) -> None:
    draft = place.with_name(f"{DRAFT_PREFIX}{secrets.token_hex(8)}")
    try:
        write_new(draft, body)
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(place.parent)


def _read(place: Path, digest: str) -> bytes | None:
    """What lies there, if it has this digest."""
    try:
        with open(open_plain(place), "rb") as file:  # noqa: PTH123 a descriptor, not a path
            body = file.read(_MOST_BYTES + 1)
    except OSError:
        return None
    return body if digest_of(body) == digest else None


def _remove(folder: Path) -> None:
    """Remove a folder of which nobody may write; one that somebody imports from goes at once."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    if not folder.exists():
        return
    doomed = folder
    if not folder.name.startswith(DRAFT_PREFIX):
        doomed = folder.rename(folder.with_name(f"{DRAFT_PREFIX}{secrets.token_hex(8)}"))
    remove_tree(doomed)
