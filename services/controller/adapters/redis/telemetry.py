"""What ranks tell, in Redis: samples, curves, output; and what of it is in storage alone."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.contract.messages.commands import RecallRecords
from services.contract.messages.telemetry import MetricRecord, RankSample, RankStacks, StepRecord
from services.contract.redis import redis_keys as keys
from services.contract.words.bounds import MOST_RANKS
from services.contract.words.states import TERMINAL_STATES
from services.controller.adapters.redis import record_scripts
from services.controller.adapters.redis.connection import (
    MAX_BLOCK_S,
    RedisClients,
    answering,
    is_mistyped,
)
from services.controller.adapters.redis.machines import entries_of
from services.controller.domain.errors import CursorExpiredError
from services.controller.ports.machines import Entry, Log

_BEGINNING: Final = "0-0"
# A long job has many steps: between two reads the loop gets to renew its lease.
_STEPS_A_READ: Final = 2_000
_LONGEST_SAMPLES: Final = 64 << 20
# Estimates of the queue are made at each change: so long they do with the steps that were read.
_RECENT_S: Final = 1.0
# An agent has so long to bring back what storage has; then somebody may ask again.
_ASKED_S: Final = 60
# Where records are brought back to, and where they belong.
_RECORDS: Final = (
    (keys.recalled_steps, keys.job_steps),
    (keys.recalled_metrics, keys.job_metrics),
    (keys.recalled_logs, keys.job_logs),
)
_Record = TypeVar("_Record", StepRecord, MetricRecord)


class _Recent(NamedTuple):
    read_s: float
    steps: list[StepRecord]


class RedisTelemetry:
    """The port ``Telemetry``.

    Args:
        clients: Redis.
        recalled_s: So long what storage has of an ended job stays here for whoever reads it.
    """

    def __init__(self, clients: RedisClients, recalled_s: int = keys.RECALLED_S) -> None:
        self._clients = clients
        self._recalled_s = recalled_s
        self._recent: dict[tuple[str, int], _Recent] = {}
        self._ask_back = clients.script(record_scripts.ASK_BACK)
        self._put_together = clients.script(record_scripts.PUT_TOGETHER)
        self._closed = clients.script(record_scripts.RECORDS_CLOSED)

    async def samples(self, job_ids: Sequence[str]) -> Mapping[str, dict[int, RankSample]]:
        """See ``Telemetry.samples``."""
        of_fit_size = await self._of_fit_size(job_ids)
        fit = [name for name in job_ids if name in of_fit_size]
        with answering():
            async with self._clients.reads.pipeline(transaction=False) as pipe:
                for job_id in fit:
                    pipe.hgetall(keys.job_ranks(job_id))
                rows = await pipe.execute(raise_on_error=False)
            told = self._clients.unreadable.of_their_type(map(keys.job_ranks, fit), rows)
        known = dict(zip(fit, told, strict=True))
        return {name: self._samples(name, known.get(name) or {}) for name in job_ids}

    async def _of_fit_size(self, job_ids: Sequence[str]) -> frozenset[str]:
        """Jobs whose samples can be read. Every agent may add to them, and the loops read them."""
        names = [keys.job_ranks(job_id) for job_id in job_ids]
        with answering():
            async with self._clients.reads.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hlen(name)
                    pipe.memory_usage(name, samples=0)
                rows = await pipe.execute(raise_on_error=False)
            counts = self._clients.unreadable.of_their_type(names, rows[0::2])
        fit = set()
        for job_id, name, count, size in zip(job_ids, names, counts, rows[1::2], strict=True):
            if isinstance(size, Exception):
                raise size
            if (count or 0) > MOST_RANKS or (size or 0) > _LONGEST_SAMPLES:
                self._clients.unreadable.note(
                    name, None, ValueError(f"{count} ranks, {size} bytes")
                )
            else:
                fit.add(job_id)
        return frozenset(fit)

    def _samples(self, job_id: str, row: Mapping[str, str]) -> dict[int, RankSample]:
        read_all = self._clients.unreadable.read_all
        told = read_all(keys.job_ranks(job_id), RankSample.model_validate_json, row.values())
        return {sample.rank: sample for sample in told}

    async def last_steps(
        self, job_ids: Sequence[str], count: int
    ) -> Mapping[str, list[StepRecord]]:
        """See ``Telemetry.last_steps``."""
        return await self._last(StepRecord, keys.job_steps, job_ids, count)

    async def recent_steps(
        self, job_ids: Sequence[str], count: int
    ) -> Mapping[str, list[StepRecord]]:
        """See ``Telemetry.recent_steps``."""
        now = time.monotonic()
        known = {
            (name, kept): entry
            for (name, kept), entry in self._recent.items()
            if entry.read_s > now - _RECENT_S
        }
        missing = [name for name in job_ids if (name, count) not in known]
        if missing:
            read = await self.last_steps(missing, count)
            known |= {(name, count): _Recent(now, read[name]) for name in missing}
        self._recent = known
        return {name: known[name, count].steps for name in job_ids}

    async def steps(self, job_id: str) -> list[StepRecord]:
        """See ``Telemetry.steps``."""
        return await self._all(StepRecord, keys.job_steps(job_id))

    async def last_metrics(
        self, job_ids: Sequence[str], count: int
    ) -> Mapping[str, list[MetricRecord]]:
        """See ``Telemetry.last_metrics``."""
        return await self._last(MetricRecord, keys.job_metrics, job_ids, count)

    async def metrics(self, job_id: str) -> list[MetricRecord]:
        """See ``Telemetry.metrics``."""
        return await self._all(MetricRecord, keys.job_metrics(job_id))

    async def _last(
        self, kind: type[_Record], key: Callable[[str], str], job_ids: Sequence[str], count: int
    ) -> dict[str, list[_Record]]:
        with answering():
            async with self._clients.reads.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.xrevrange(key(job_id), count=count)
                rows = await pipe.execute(raise_on_error=False)
            told = self._clients.unreadable.of_their_type(map(key, job_ids), rows)
        found = {
            job_id: self._records(kind, key(job_id), entries_of(row or [])[::-1])
            for job_id, row in zip(job_ids, told, strict=True)
        }
        return found | await self._last_of_ended(kind, [name for name in found if not found[name]])

    async def _last_of_ended(
        self, kind: type[_Record], job_ids: Sequence[str]
    ) -> dict[str, list[_Record]]:
        """The last records of jobs whose others are in storage alone; nothing of any other job."""
        if not job_ids:
            return {}
        names = [keys.job_last(job_id) for job_id in job_ids]
        field = "steps" if kind is StepRecord else "metrics"
        with answering():
            async with self._clients.reads.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hget(name, field)
                rows = await pipe.execute(raise_on_error=False)
            told = self._clients.unreadable.of_their_type(names, rows)
        read_all = self._clients.unreadable.read_all
        return {
            job_id: read_all(name, kind.model_validate_json, (row or "").split("\n") if row else ())
            for job_id, name, row in zip(job_ids, names, told, strict=True)
        }

    async def _all(self, kind: type[_Record], key: str) -> list[_Record]:
        records: list[_Record] = []
        start = "-"
        while True:
            command = ("XRANGE", start, "+", "COUNT", _STEPS_A_READ)
            (rows,) = await self._answers(self._clients.reads, key, command)
            entries = entries_of(rows or [])
            records += self._records(kind, key, entries)
            if len(entries) < _STEPS_A_READ:
                return records
            start = f"({entries[-1].id}"

    def _records(self, kind: type[_Record], key: str, entries: Iterable[Entry]) -> list[_Record]:
        texts = (entry.body for entry in entries)
        return self._clients.unreadable.read_all(key, kind.model_validate_json, texts)

    async def keep_stacks(self, job_id: str, stacks: Sequence[RankStacks]) -> None:
        """See ``Telemetry.keep_stacks``."""
        if not stacks:
            return
        pairs = [part for entry in stacks for part in (str(entry.rank), entry.model_dump_json())]
        await self._answers(self._clients.writes, keys.job_stacks(job_id), ("HSET", *pairs))

    async def stacks(self, job_id: str) -> list[RankStacks]:
        """See ``Telemetry.stacks``."""
        key = keys.job_stacks(job_id)
        (rows,) = await self._answers(self._clients.reads, key, ("HGETALL",))
        read_all = self._clients.unreadable.read_all
        told = read_all(key, RankStacks.model_validate_json, (rows or {}).values())
        return sorted(told, key=lambda entry: entry.rank)

    async def is_whole(self, job_id: str) -> bool:
        """See ``Telemetry.is_whole``."""
        with answering():
            return bool(await self._clients.reads.exists(keys.job_records(job_id)))

    async def is_empty(self, job_id: str) -> bool:
        """See ``Telemetry.is_empty``."""
        names = [here(job_id) for _, here in _RECORDS]
        with answering():
            return not await self._clients.reads.exists(*names)

    async def ask_back(self, job_id: str, fence: int, node_id: str) -> bool:
        """See ``Telemetry.ask_back``."""
        asked = secrets.token_hex(8)
        command = RecallRecords(job_id=job_id, fence=fence, asked=asked)
        with answering():
            return bool(
                await self._ask_back(
                    keys=[
                        keys.recalled(job_id),
                        keys.node_inbox(node_id),
                        *(back(job_id) for back, _ in _RECORDS),
                        keys.recalled_events(job_id),
                    ],
                    args=[asked, _ASKED_S, keys.MESSAGE_FIELD, command.model_dump_json()],
                )
            )

    async def put_together(self, job_id: str) -> bool:
        """See ``Telemetry.put_together``."""
        events = (keys.recalled_events, keys.job_older_events)
        streams = [key(job_id) for pair in (events, *_RECORDS) for key in pair]
        with answering():
            return bool(
                await self._put_together(
                    keys=[
                        keys.recalled(job_id),
                        keys.job(job_id),
                        keys.job_records(job_id),
                        *streams,
                    ],
                    args=[self._recalled_s, *TERMINAL_STATES],
                )
            )

    async def lacks_events(self, job_id: str) -> bool:
        """See ``Telemetry.lacks_events``."""
        name = keys.job_last(job_id)
        (first_kept,) = await self._answers(self._clients.reads, name, ("HEXISTS", "events"))
        if not first_kept:
            return False
        with answering():
            return not await self._clients.reads.exists(keys.job_older_events(job_id))

    async def closed(self, job_id: str, fence: int, events_to: str | None) -> None:
        """See ``Telemetry.closed``."""
        with answering():
            await self._closed(
                keys=[
                    keys.job(job_id),
                    keys.job_last(job_id),
                    keys.job_steps(job_id),
                    keys.job_metrics(job_id),
                    keys.job_events(job_id),
                    keys.job_older_events(job_id),
                    keys.job_logs(job_id),
                    keys.job_records(job_id),
                    keys.job_history(job_id),
                ],
                args=[
                    fence,
                    self._recalled_s,
                    keys.LAST_KEPT,
                    keys.MESSAGE_FIELD,
                    events_to or "",
                    keys.LAST_EVENTS_KEPT,
                    *TERMINAL_STATES,
                ],
            )

    async def read(self, job_id: str, log: Log, after: str | None, limit: int) -> list[Entry]:
        """See ``Telemetry.read``."""
        rows, first = await self._rows(_log_key(job_id, log), after, limit)
        if log is not Log.EVENTS:
            _refuse_trimmed(after, first)
            return rows
        older, first_older = await self._rows(keys.job_older_events(job_id), after, limit)
        _refuse_trimmed(after, first_older or first)
        by_id = {_order(entry.id): entry for entry in (*older, *rows)}
        return [by_id[place] for place in sorted(by_id)][:limit]

    async def _rows(
        self, key: str, after: str | None, limit: int
    ) -> tuple[list[Entry], list[Entry]]:
        """Up to ``limit`` entries of a stream behind ``after``, and its first one."""
        rows, first = await self._answers(
            self._clients.reads,
            key,
            ("XRANGE", "-" if after is None else f"({after}", "+", "COUNT", limit),
            ("XRANGE", "-", "+", "COUNT", 1),
        )
        return entries_of(rows or []), entries_of(first or [])

    async def wait(self, job_id: str, log: Log, after: str | None, timeout_s: float) -> None:
        """See ``Telemetry.wait``."""
        block_ms = max(int(min(timeout_s, MAX_BLOCK_S) * 1000), 1)
        with answering():
            try:
                await self._clients.streams.xread(
                    {_log_key(job_id, log): after or _BEGINNING}, count=1, block=block_ms
                )
            except ResponseError as error:
                if not is_mistyped(error):
                    raise
                # Whoever reads it says so; it will have no entry by itself.
                await asyncio.sleep(block_ms / 1000)

    async def _answers(self, client: Redis, key: str, *commands: tuple[Any, ...]) -> list[Any]:
        """What these commands answer of one key, all of one moment; None where it has another type."""
        with answering():
            async with client.pipeline(transaction=True) as pipe:
                for name, *arguments in commands:
                    pipe.execute_command(name, key, *arguments)
                rows = await pipe.execute(raise_on_error=False)
            return self._clients.unreadable.of_their_type([key] * len(rows), rows)


def _refuse_trimmed(after: str | None, first: list[Entry]) -> None:
    if after is None or after == _BEGINNING or not first:
        return
    if _order(after) < _order(first[0].id):
        raise CursorExpiredError(
            f"what follows {after} was trimmed; the oldest entry kept is {first[0].id}"
        )


def _order(entry_id: str) -> tuple[int, int]:
    time_ms, _, number = entry_id.partition("-")
    return int(time_ms), int(number or 0)


def _log_key(job_id: str, log: Log) -> str:
    builders = {
        Log.EVENTS: keys.job_events,
        Log.HISTORY: keys.job_history,
        Log.OUTPUT: keys.job_logs,
    }
    return builders[log](job_id)
