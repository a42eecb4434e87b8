"""What ranks tell, in Redis: samples, curves, output; and what of it is in storage alone."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.contract.messages.commands import RecallRecords
from services.contract.messages.telemetry import (
    MetricRecord,
    RankProgress,
    RankSample,
    RankStacks,
    StepRecord,
)
from services.contract.redis import redis_keys as keys
from services.contract.system.long_work import in_turns
from services.contract.words.bounds import MOST_RANKS
from services.contract.words.states import TERMINAL_STATES
from services.controller.adapters.redis import record_scripts
from services.controller.adapters.redis.connection import (
    MAX_BLOCK_S,
    RedisClients,
    answer_behind,
    answering,
    is_mistyped,
    raise_refusal,
)
from services.controller.adapters.redis.machines import entries_of
from services.controller.adapters.redis.record_streams import (
    METRICS,
    OLDER_EVENTS,
    OUTPUT,
    STEPS,
    Bounds,
    RecordStreams,
)
from services.controller.adapters.redis.telemetry_names import PLAIN_NAMES, TelemetryNames
from services.controller.domain.errors import (
    CursorExpiredError,
    StoreUnavailableError,
    TelemetryUnavailableError,
)
from services.controller.ports.machines import Entry, Log

_BEGINNING: Final = "0-0"
# A long job has many steps: between two reads the loop gets to renew its lease.
_STEPS_A_READ: Final = 2_000
_LONGEST_SAMPLES: Final = 64 << 20
# Brought back by an agent, they are read at once and kept beside what controllers write.
_LONGEST_EVENTS: Final = 128 << 20
# A sample has some twenty fields and two tables of 64 groups at most: of one with millions of lists each is made before
# the first is refused. Between so many samples others have the loop.
_PARTS_OF_A_SAMPLE: Final = 1_024
_SAMPLES_AT_ONCE: Final = 200
# The same of records: one of the user's metrics has 32 KiB at most.
_RECORDS_AT_ONCE: Final = 100
# Estimates of the queue are made at each change: so long they do with the steps that were read.
_RECENT_S: Final = 1.0
# A server for telemetry that did not answer is asked again after so long: each look would wait for it.
_LEFT_ALONE_S: Final = 3.0
# An agent has so long to bring back what storage has; then somebody may ask again.
_ASKED_S: Final = 60
_LONGEST_QUESTION: Final = 64
# Where records are brought back to, and where they belong.
_RECORDS: Final = (
    (keys.recalled_steps, keys.job_steps),
    (keys.recalled_metrics, keys.job_metrics),
    (keys.recalled_logs, keys.job_logs),
)
_log = structlog.get_logger()
_Record = TypeVar("_Record", StepRecord, MetricRecord)
_OfRank = TypeVar("_OfRank", RankProgress, RankSample)


class _Recent(NamedTuple):
    read_s: float
    steps: list[StepRecord]


class RedisTelemetry:
    """The port ``Telemetry``.

    Args:
        clients: Redis.
        telemetry: The server that has telemetry; unset: the same.
        names: Where agents write.
    """

    def __init__(
        self,
        clients: RedisClients,
        telemetry: RedisClients | None = None,
        names: TelemetryNames = PLAIN_NAMES,
    ) -> None:
        self._clients = clients
        self._told = telemetry or clients
        self._names = names
        self._away: tuple[float, str] | None = None
        self._recent: dict[tuple[str, int], _Recent] = {}
        self._streams = RecordStreams(self._told)
        self._ask_back = self._told.script(record_scripts.ASK_BACK)
        self._tell_agent = clients.script(record_scripts.TELL_AGENT)
        self._is_answered = self._told.script(record_scripts.IS_ANSWERED)
        self._put_together = self._told.script(record_scripts.PUT_TOGETHER)
        self._closed = clients.script(record_scripts.RECORDS_CLOSED)
        self._let_go = self._told.script(record_scripts.LET_GO)

    async def samples(self, job_ids: Sequence[str]) -> Mapping[str, dict[int, RankSample]]:
        """See ``Telemetry.samples``."""
        return await self._of_ranks(RankSample, job_ids)

    async def progress(self, job_ids: Sequence[str]) -> Mapping[str, dict[int, RankProgress]]:
        """See ``Telemetry.progress``."""
        return await self._of_ranks(RankProgress, job_ids)

    async def _of_ranks(
        self, kind: type[_OfRank], job_ids: Sequence[str]
    ) -> dict[str, dict[int, _OfRank]]:
        of_fit_size = await self._of_fit_size(job_ids)
        fit = [name for name in job_ids if name in of_fit_size]
        with self._telling():
            async with self._told.reads.pipeline(transaction=False) as pipe:
                for job_id in fit:
                    pipe.hgetall(self._ranks(job_id))
                rows = await pipe.execute(raise_on_error=False)
            told = self._clients.unreadable.of_their_type(map(self._ranks, fit), rows)
        known = dict(zip(fit, told, strict=True))
        return {name: await self._read_ranks(kind, name, known.get(name)) for name in job_ids}

    async def _read_ranks(
        self, kind: type[_OfRank], job_id: str, row: Mapping[str, str] | None
    ) -> dict[int, _OfRank]:
        def parse(text: str) -> _OfRank:
            parts = sum(map(text.count, "[{,"))
            if parts > _PARTS_OF_A_SAMPLE:
                raise ValueError(f"{parts} parts")
            return kind.model_validate_json(text)

        found: list[_OfRank] = []
        texts = iter((row or {}).values())
        while some := list(islice(texts, _SAMPLES_AT_ONCE)):
            found += self._clients.unreadable.read_all(self._ranks(job_id), parse, some)
            await asyncio.sleep(0)
        return {each.rank: each for each in found}

    async def _of_fit_size(self, job_ids: Sequence[str]) -> frozenset[str]:
        """Jobs whose samples can be read. Every agent may add to them, and the loops read them."""
        names = [self._ranks(job_id) for job_id in job_ids]
        with self._telling():
            async with self._told.reads.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hlen(name)
                    pipe.memory_usage(name, samples=0)
                rows = await pipe.execute(raise_on_error=False)
            counts = self._clients.unreadable.of_their_type(names, rows[0::2])
            raise_refusal(rows[1::2])
        found = zip(job_ids, names, counts, rows[1::2], strict=True)
        fit, room = set(), _LONGEST_SAMPLES
        # Of all together no more is read than of one: what is large leaves out none that is small.
        for job_id, name, count, size in sorted(found, key=_size):
            room -= size or 0
            if (count or 0) > MOST_RANKS or room < 0:
                self._clients.unreadable.note(
                    name, None, ValueError(f"{count} ranks, {size} bytes")
                )
            else:
                fit.add(job_id)
        return frozenset(fit)

    def _ranks(self, job_id: str) -> str:
        return keys.job_ranks(self._names.of(job_id))

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
        return await self._all(StepRecord, keys.job_steps(self._names.of(job_id)))

    async def last_metrics(
        self, job_ids: Sequence[str], count: int
    ) -> Mapping[str, list[MetricRecord]]:
        """See ``Telemetry.last_metrics``."""
        return await self._last(MetricRecord, keys.job_metrics, job_ids, count)

    async def metrics(self, job_id: str) -> list[MetricRecord]:
        """See ``Telemetry.metrics``."""
        return await self._all(MetricRecord, keys.job_metrics(self._names.of(job_id)))

    async def _last(
        self, kind: type[_Record], key: Callable[[str], str], job_ids: Sequence[str], count: int
    ) -> dict[str, list[_Record]]:
        names = [key(self._names.of(job_id)) for job_id in job_ids]
        with self._telling():
            told = await self._streams.last(names, _bounds(kind), count)
        found = {
            job_id: await self._records(kind, name, entries)
            for job_id, name, entries in zip(job_ids, names, told, strict=True)
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
        after = None
        while True:
            with self._telling():
                entries, _ = await self._streams.rows(key, _bounds(kind), after, _STEPS_A_READ)
            records += await self._records(kind, key, entries)
            if len(entries) < _STEPS_A_READ:
                return records
            after = entries[-1].id

    async def _records(
        self, kind: type[_Record], key: str, entries: Iterable[Entry]
    ) -> list[_Record]:
        texts = (entry.body for entry in entries)
        found: list[_Record] = []
        while some := list(islice(texts, _RECORDS_AT_ONCE)):
            found += self._clients.unreadable.read_all(key, kind.model_validate_json, some)
            await asyncio.sleep(0)
        return found

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
        told: list[RankStacks] = []
        async for text in in_turns((rows or {}).values()):
            told += read_all(key, RankStacks.model_validate_json, [text])
        return sorted(told, key=lambda entry: entry.rank)

    async def whole(self, job_id: str) -> str | None:
        """See ``Telemetry.whole``."""
        with self._telling():
            said: Any = await self._told.reads.get(keys.job_records(self._names.of(job_id)))
        whole: str | None = said
        return whole

    async def is_empty(self, job_id: str) -> bool:
        """See ``Telemetry.is_empty``."""
        names = [here(self._names.of(job_id)) for _, here in _RECORDS]
        with self._telling():
            return not await self._told.reads.exists(*names)

    async def ask_back(self, job_id: str, fence: int, node_id: str) -> bool:
        """See ``Telemetry.ask_back``."""
        asked = secrets.token_hex(8)
        command = self._names.told(RecallRecords(job_id=job_id, fence=fence, asked=asked))
        name = self._names.recalled(job_id)
        streams = [back(name) for back, _ in _RECORDS]
        made = [keys.recalled(name), *streams, keys.recalled_events(name)]
        with self._telling():
            is_first = await self._ask_back(keys=made, args=[asked, _ASKED_S])
        if is_first:
            async with self._undone_unless_done(self._told, *made):
                with answering():
                    await self._tell_agent(
                        keys=[keys.node_inbox(node_id)],
                        args=[keys.MESSAGE_FIELD, command.model_dump_json()],
                    )
        return bool(is_first)

    async def put_together(self, job_id: str, *, has_ended: bool) -> bool:
        """See ``Telemetry.put_together``."""
        name = self._names.recalled(job_id)
        with self._telling():
            if not await self._is_answered(keys=[keys.recalled(name)], args=[_LONGEST_QUESTION]):
                return False
            size: int | None = await self._told.reads.memory_usage(
                keys.recalled_events(name), samples=0
            )
            if (size or 0) > _LONGEST_EVENTS:
                error = ValueError(f"{size} bytes")
                self._clients.unreadable.note(keys.recalled_events(name), None, error)
                return False
            events = await self._all_events(keys.recalled_events(name))
        older = keys.job_older_events(job_id)
        if events:
            with answering():
                # Beside the controller's own, which no agent writes.
                async with self._clients.writes.pipeline(transaction=True) as pipe:
                    pipe.delete(older)
                    for event in events:
                        pipe.xadd(older, {keys.MESSAGE_FIELD: event.body}, id=event.id)
                    pipe.expire(older, keys.RECALLED_S)
                    await pipe.execute()
        here = self._names.of(job_id)
        async with self._undone_unless_done(self._clients, *([older] if events else ())):
            with self._telling():
                return bool(
                    await self._put_together(
                        keys=[
                            keys.recalled(name),
                            keys.job_records(here),
                            keys.recalled_events(name),
                            keys.RECALLED_JOBS,
                            *(key for back, to in _RECORDS for key in (back(name), to(here))),
                        ],
                        args=[
                            keys.RECALLED_S if has_ended else "",
                            here,
                            keys.RECALLED_BYTES,
                            keys.RECALLED_STAYS_S,
                            STEPS.most,
                            *(to("%s") for to in (keys.job_records, *(to for _, to in _RECORDS))),
                        ],
                    )
                )

    async def _all_events(self, key: str) -> list[Entry]:
        """Those that were brought back."""
        found, _ = await self._streams.rows(key, OLDER_EVENTS, None, OLDER_EVENTS.most)
        return [event for event in found if event.body]

    @contextlib.asynccontextmanager
    async def _undone_unless_done(self, clients: RedisClients, *made: str) -> AsyncIterator[None]:
        """Delete what was made on one server if the other one refuses what belongs to it."""
        try:
            yield
        except StoreUnavailableError:
            if made:
                with contextlib.suppress(StoreUnavailableError), answering():
                    await clients.writes.delete(*made)
            raise

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
        last = [
            await self._newest(keys.job_steps(self._names.of(job_id)), STEPS),
            await self._newest(keys.job_metrics(self._names.of(job_id)), METRICS),
        ]
        with answering():
            status = await self._closed(
                keys=[
                    keys.job(job_id),
                    keys.job_last(job_id),
                    keys.job_events(job_id),
                    keys.job_older_events(job_id),
                    keys.job_history(job_id),
                ],
                args=[
                    fence,
                    keys.RECALLED_S,
                    *last,
                    events_to or "",
                    keys.LAST_EVENTS_KEPT,
                    *TERMINAL_STATES,
                ],
            )
        if status == "ok":
            name = self._names.of(job_id)
            names = [*(here(name) for _, here in _RECORDS), keys.job_records(name)]
            with self._telling():
                await self._let_go(keys=names, args=[keys.RECALLED_S])

    async def _newest(self, key: str, bounds: Bounds) -> str:
        """The last few records in a stream as they are, a line each."""
        with self._telling():
            (entries,) = await self._streams.last([key], bounds, keys.LAST_KEPT)
        return "\n".join(entry.body for entry in entries if entry.body)

    async def read(self, job_id: str, log: Log, after: str | None, limit: int) -> list[Entry]:
        """See ``Telemetry.read``."""
        key = self._log_key(job_id, log)
        if log is Log.OUTPUT:
            with self._telling():
                rows, first = await self._streams.rows(key, OUTPUT, after, limit)
        else:
            rows, first = await self._own_rows(key, after, limit)
        if log is not Log.EVENTS:
            _refuse_trimmed(after, first)
            return rows
        older, first_older = await self._own_rows(keys.job_older_events(job_id), after, limit)
        _refuse_trimmed(after, first_older or first)
        by_id = {_order(entry.id): entry for entry in (*older, *rows)}
        return [by_id[place] for place in sorted(by_id)][:limit]

    async def _own_rows(
        self, key: str, after: str | None, limit: int
    ) -> tuple[list[Entry], list[Entry]]:
        """Up to ``limit`` entries behind ``after`` of a stream that only controllers append to, and its first one."""
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
        is_output = log is Log.OUTPUT
        with self._telling() if is_output else answering():
            try:
                streams = (self._told if is_output else self._clients).streams
                key = self._log_key(job_id, log)
                wait = ("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", key, after or _BEGINNING)
                await answer_behind(streams, wait, block_ms / 1000, ("XLEN", key))
                # Nothing is behind the last one: it tells only whether the wait was refused.
                await streams.xread({key: "$"}, count=1)
            except ResponseError as error:
                if not is_mistyped(error):
                    raise
                # Whoever reads it says so; it will have no entry by itself.
                await asyncio.sleep(block_ms / 1000)

    def _log_key(self, job_id: str, log: Log) -> str:
        if log is Log.OUTPUT:
            return keys.job_logs(self._names.of(job_id))
        return (keys.job_events if log is Log.EVENTS else keys.job_history)(job_id)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """As ``answering``; a server of telemetry's own is named, and left alone for a while if it is away."""
        if self._away is not None and time.monotonic() < self._away[0]:
            raise TelemetryUnavailableError(self._away[1])
        try:
            with answering():
                yield
        except StoreUnavailableError as error:
            if self._told is self._clients:
                raise
            if self._away is None:
                _log.warning("telemetry_unavailable", why=error.why)
            told = f"the one for telemetry: {error}"
            self._away = time.monotonic() + _LEFT_ALONE_S, told
            raise TelemetryUnavailableError(told) from error
        self._away = None

    async def _answers(self, client: Redis, key: str, *commands: tuple[Any, ...]) -> list[Any]:
        """What these commands answer of one key, all of one moment; None where it has another type."""
        with answering():
            async with client.pipeline(transaction=True) as pipe:
                for name, *arguments in commands:
                    pipe.execute_command(name, key, *arguments)
                rows = await pipe.execute(raise_on_error=False)
            return self._clients.unreadable.of_their_type([key] * len(rows), rows)


def _bounds(kind: type[_Record]) -> Bounds:
    return STEPS if kind is StepRecord else METRICS


def _size(found: tuple[str, str, Any, Any]) -> int:
    return found[3] if isinstance(found[3], int) else 0


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
