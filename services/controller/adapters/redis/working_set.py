"""The active jobs in this process's memory, kept true by the stream of changes.

Every script that writes a job's record appends the job's id to that stream, in the same
transaction. Whoever asks reads what was appended since and loads those jobs alone. What the stream
does not tell is found all the same: an entry that was trimmed before it was read, a Redis that lost
its data, a write of a controller that knows no stream. The set is a cache: commits compare versions.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis import job_scripts
from services.controller.adapters.redis.connection import (
    RedisClients,
    answering,
    is_mistyped,
    raise_refusal,
)
from services.controller.adapters.redis.job_rows import Row
from services.controller.domain.errors import StoreUnavailableError
from services.controller.ports.jobs import Stored

COMPARED_EVERY_S: Final = 1.0
_MOST: Final = 1_000
# Redis compares so many in a fifth of a millisecond.
_FEW: Final = 256
# What is written while the two are compared is no divergence; the next comparison has it.
_COMPARISONS: Final = 3

ReadRows = Callable[[Sequence[str]], Awaitable[list[Row]]]
ParseRows = Callable[[Sequence[Row]], Awaitable[list[Stored]]]


class WorkingSet:
    """The active jobs.

    Args:
        clients: Redis.
        read: What is stored of these jobs.
        parse: The jobs of rows; those that cannot be read are left out.
        list_again: Called with jobs that somebody wrote who tells no changes, and so no lists either.
        compared_every_s: So often all are compared with what is in Redis, by a digest; few of them
            are each time.
    """

    def __init__(
        self,
        clients: RedisClients,
        read: ReadRows,
        parse: ParseRows,
        list_again: Callable[[Sequence[str]], Awaitable[None]],
        compared_every_s: float = COMPARED_EVERY_S,
    ) -> None:
        self._clients = clients
        self._read = read
        self._parse = parse
        self._list_again = list_again
        self._compared_every_s = compared_every_s
        self._digest = clients.reads.register_script(job_scripts.DIGEST_ACTIVE)
        self._turn = asyncio.Lock()
        self._seen: str | None = None
        self._compared_at = 0.0
        # Of each member of the set of active jobs, readable or not: version and length of the record.
        self._stamps: dict[str, str] = {}
        self._jobs: dict[str, Stored] = {}
        self._in_order: list[Stored] | None = None
        self._to_list: set[str] = set()

    async def jobs(self) -> list[Stored]:
        """All active jobs as of now, by id."""
        async with self._turn:
            if not await self._follow() or await self._has_diverged():
                await self._load_all()
            await self._list_others()
            if self._in_order is None:
                self._in_order = [self._jobs[name] for name in sorted(self._jobs)]
            return list(self._in_order)

    def committed(self, stored: Stored, text: str) -> None:
        """This process wrote a job, as ``text``.

        Others may have written it since, and that may be known already.
        """
        name = stored.job.id
        known = self._jobs.get(name)
        if known is None or known.version >= stored.version:
            return
        self._drop(name)
        if stored.job.is_active:
            self._stamps[name] = f"{stored.version} {len(text.encode())}"
            self._jobs[name] = stored

    async def _follow(self) -> bool:
        """Take in what changed; False if that cannot be told from the stream."""
        if self._seen is None:
            return False
        # With the entry that was read last: if that is gone, so may others be that were not read.
        entries = await self._entries("XRANGE", self._seen, "+", "COUNT", _MOST + 1)
        if not entries or entries[0][0] != self._seen or len(entries) > _MOST:
            return False
        changed: dict[str, str] = {}
        for _, fields in entries[1:]:
            name, version = fields.get("m", ""), fields.get("v", "")
            changed.pop(name, None)
            if fields.get("a") == "1":
                changed[name] = version
            else:
                self._drop(name)
        await self._load([n for n, version in changed.items() if self._version(n) != version])
        self._seen = entries[-1][0]
        return True

    def _version(self, name: str) -> str:
        return self._stamps.get(name, "").partition(" ")[0]

    async def _has_diverged(self) -> bool:
        """Whether Redis has other records, although the stream says nothing of it."""
        now = time.monotonic()
        if len(self._stamps) > _FEW and now - self._compared_at < self._compared_every_s:
            return False
        with self._clients.answering(keys.ACTIVE_JOBS):
            theirs = await self._digest(keys=[keys.ACTIVE_JOBS], args=[keys.job(""), ""])
        self._compared_at = now
        ours = "\n".join(f"{name} {self._stamps[name]}" for name in sorted(self._stamps))
        if hashlib.sha1(ours.encode(), usedforsecurity=False).hexdigest() == theirs:
            return False
        differing: set[str] | None = None
        for _ in range(_COMPARISONS):
            if not await self._follow():
                return True
            found = await self._differing()
            differing = found if differing is None else differing & found
            if not differing:
                return False
        self._to_list |= differing or set()
        return True

    async def _differing(self) -> set[str]:
        """The jobs of which Redis has another record, by one answer: a question a record takes a second for thousands."""
        with self._clients.answering(keys.ACTIVE_JOBS):
            lines = await self._digest(keys=[keys.ACTIVE_JOBS], args=[keys.job(""), "1"])
        theirs = dict(_name_and_stamp(line) for line in lines.split("\n") if line)
        names = theirs.keys() | self._stamps.keys()
        return {name for name in names if theirs.get(name) != self._stamps.get(name)}

    async def _list_others(self) -> None:
        """Have lists hold what such a controller wrote: later, if Redis takes no writes now."""
        if self._to_list:
            with contextlib.suppress(StoreUnavailableError):
                await self._list_again(sorted(self._to_list))
                self._to_list.clear()

    async def _load_all(self) -> None:
        # Before the jobs: what is written while they are read is read again.
        newest = await self._entries("XREVRANGE", "+", "-", "COUNT", 1)
        members = await self._members()
        self._stamps, self._jobs, self._in_order = {}, {}, None
        self._seen = None
        await self._load(members)
        self._seen = newest[0][0] if newest else None
        self._compared_at = time.monotonic()

    async def _load(self, names: Sequence[str]) -> None:
        """Read these members of the set of active jobs."""
        if not names:
            return
        # Before the records, for the same reason.
        stamps = await self._stamps_of(names)
        found = await self._parse(await self._read(names))
        # Nothing waits from here on: a look that is cancelled half-way must not leave the stamp of a job
        # that is missing, which no comparison would find.
        for name in names:
            self._drop(name)
        self._stamps |= stamps
        self._jobs |= {stored.job.id: stored for stored in found}

    async def _members(self) -> list[str]:
        with self._clients.answering(keys.ACTIVE_JOBS):
            found: Any = await self._clients.reads.smembers(keys.ACTIVE_JOBS)
        return sorted(found)

    async def _stamps_of(self, names: Sequence[str]) -> dict[str, str]:
        """As the script of the digest makes them."""
        with answering():
            async with self._clients.reads.pipeline(transaction=True) as pipe:
                for name in names:
                    pipe.hget(keys.job(name), "version")
                    pipe.hstrlen(keys.job(name), "doc")
                rows = await pipe.execute(raise_on_error=False)
            raise_refusal(rows)
        return {
            name: f"{version if isinstance(version, str) else ''} {length if isinstance(length, int) else 0}"
            for name, version, length in zip(names, rows[0::2], rows[1::2], strict=True)
        }

    def _drop(self, name: str) -> None:
        self._in_order = None
        self._stamps.pop(name, None)
        self._jobs.pop(name, None)

    async def _entries(self, *command: object) -> list[tuple[str, dict[str, str]]]:
        """Entries of the stream of changes; none where that has another type."""
        name, *arguments = command
        try:
            with answering():
                rows: Any = await self._clients.reads.execute_command(  # type: ignore[no-untyped-call] # not annotated in redis-py
                    name, keys.CHANGED_JOBS, *arguments
                )
        except StoreUnavailableError as error:
            if not is_mistyped(error.__cause__):
                raise
            self._clients.unreadable.note_type(keys.CHANGED_JOBS)
            return []
        self._clients.unreadable.forget(keys.CHANGED_JOBS)
        return _with_fields(rows)


def _name_and_stamp(line: str) -> tuple[str, str]:
    name, version, length = line.rsplit(" ", 2)
    return name, f"{version} {length}"


def _with_fields(rows: Iterable[Any]) -> list[tuple[str, dict[str, str]]]:
    return [(str(name), fields or {}) for name, fields in rows]
