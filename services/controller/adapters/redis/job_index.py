"""Summaries and indexes of jobs: lists and counts read these, never whole records.

A record has beside the job itself what lists choose by (``summary``) and the names of the indexes in
which it stands (``listed``). The scripts that write a record write both, so a list is never behind.
Records that an older version wrote have neither: ``build`` adds them, and until it is done lists are
made from all jobs.
"""

import heapq
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from services.contract.redis import redis_keys as keys
from services.contract.words.states import JobState
from services.controller.adapters.redis import job_scripts
from services.controller.adapters.redis.connection import (
    RedisClients,
    answering,
    raise_refusal,
    to_ms,
)
from services.controller.adapters.redis.job_rows import Row, read_by_turns
from services.controller.domain.errors import RecordUnreadableError
from services.controller.domain.job.job import Job
from services.controller.ports.jobs import Among, JobSummary, Place, Stored

_PAGE: Final = 256
_TRIES: Final = 16


def listing_of(job: Job) -> tuple[str, str]:
    """A job's summary, and the names of the indexes in which it stands, as the scripts take them."""
    names = [keys.jobs_in_state(job.state), keys.jobs_of_owner(job.owner)]
    if not job.is_terminal:
        names.append(keys.jobs_not_ended(job.owner))
    for label, value in job.spec.labels.items():
        names += [keys.jobs_with_label(label), keys.jobs_with_label(f"{label}={value}")]
    return JobSummary.of(job).model_dump_json(), json.dumps(names)


class JobIndex:
    """The summaries and indexes.

    Args:
        clients: Redis.
        read: What is stored of these jobs.
        load: The jobs of these ids that can be read.
    """

    def __init__(
        self,
        clients: RedisClients,
        read: Callable[[Sequence[str]], Awaitable[list[Row]]],
        load: Callable[[Sequence[str]], Awaitable[list[Stored]]],
    ) -> None:
        self._clients = clients
        self._read = read
        self._load = load
        self._put = clients.script(job_scripts.LIST_JOB)
        # By how much the indexes differed when they were built last, for records that nobody can list.
        self._surplus = 0

    async def summaries(self, among: Among, before: Place | None, limit: int) -> list[JobSummary]:
        """See ``JobStore.summaries``."""
        names = await self._narrowest(among)
        found: list[JobSummary] = []
        while len(found) < limit:
            rows = [await self.places(name, before, _PAGE) for name in names]
            merged = heapq.merge(*rows, reverse=True)
            places = list(itertools.islice(dict.fromkeys(merged), _PAGE))
            found += await self.summaries_of([place.id for place in places])
            if len(places) < _PAGE:
                break
            before = places[-1]
        return found[:limit]

    async def places(self, name: str, before: Place | None, limit: int) -> list[Place]:
        """Up to ``limit`` places of one index before that one, newest first."""
        highest = "+inf" if before is None else before.created_ms
        count = limit + 1  # the place itself may be the first
        while True:
            # All of one moment: by parts, a deletion meanwhile would hide the job behind the first part.
            with self._clients.answering(name):
                rows: Any = await self._clients.reads.zrevrangebyscore(
                    name, highest, "-inf", start=0, num=count, withscores=True
                )
            places = (Place(to_ms(score), job_id) for job_id, score in rows)
            found = [place for place in places if before is None or place < before]
            if len(found) >= limit or len(rows) < count:
                return found[:limit]
            count *= 2  # many of the same time as the place

    async def counts(self) -> dict[JobState, int] | None:
        """How many jobs are in each state; None while the indexes do not hold all of them."""
        if not await self._is_whole():
            return None
        found, total = await self._counted()
        # One that is in no index, or was left in one by an older version, is counted by its record.
        return found if sum(found.values()) == total else None

    async def build(self) -> int:
        """Add what older versions left out, and remove what they left behind; answers of how many jobs."""
        if await self._is_whole():
            found, total = await self._counted()
            surplus = sum(found.values()) - total
            if surplus in {0, self._surplus}:
                return 0
        count = 0
        before: Place | None = None
        while places := await self.places(keys.JOBS, before, _PAGE):
            await self.list_again([place.id for place in places])
            count += len(places)
            before = places[-1]
        for state in JobState:
            await self._remove_deleted(keys.jobs_in_state(state))
        with answering():
            await self._clients.writes.set(keys.JOB_INDEX, keys.JOB_INDEX_FORMAT)
        found, total = await self._counted()
        self._surplus = sum(found.values()) - total
        return count

    async def _counted(self) -> tuple[dict[JobState, int], int]:
        """How many jobs each index by state holds, and how many there are."""
        names = {state: keys.jobs_in_state(state) for state in JobState}
        counted = await self._cards([keys.JOBS, *names.values()])
        total = counted[keys.JOBS]
        if total is None:
            with self._clients.answering(keys.JOBS):  # it says itself which key it is
                total = int(await self._clients.reads.zcard(keys.JOBS))
        return {state: counted[name] or 0 for state, name in names.items()}, total

    async def _remove_deleted(self, name: str) -> None:
        """Take jobs out of an index that an older version deleted."""
        before: Place | None = None
        while places := await self.places(name, before, _PAGE):
            with answering():
                async with self._clients.reads.pipeline(transaction=False) as pipe:
                    for place in places:
                        pipe.zscore(keys.JOBS, place.id)
                    scores = await pipe.execute()
                gone = [p.id for p, score in zip(places, scores, strict=True) if score is None]
                if gone:
                    await self._clients.writes.zrem(name, *gone)
            before = places[-1]

    async def list_again(self, job_ids: Sequence[str]) -> None:
        """Put these jobs into the indexes in which their present records are to stand."""
        left = list(job_ids)
        for _ in range(_TRIES):
            rows = await self._read(left)
            listings = [await _listing(row) for row in rows]
            with answering():
                async with self._clients.writes.pipeline(transaction=False) as pipe:
                    for row, listing in zip(rows, listings, strict=True):
                        await self._put(
                            keys=[keys.job(row.job_id), keys.JOBS],
                            args=[
                                row.version or "",
                                row.job_id,
                                *listing,
                                keys.jobs_in_state(""),
                            ],
                            client=pipe,
                        )
                    told = await pipe.execute()
            # Written meanwhile, maybe by an older version: as it is now, then.
            left = [row.job_id for row, said in zip(rows, told, strict=True) if said == "stale"]
            if not left:
                return

    async def _narrowest(self, among: Among) -> Sequence[str]:
        """The names of the indexes that together hold all of them and the fewest others."""
        ways: list[list[str]] = [[keys.jobs_with_label(label)] for label in among.labels]
        if among.states:
            ways.append([keys.jobs_in_state(state) for state in sorted(among.states)])
        if among.owner is not None:
            ways.append([keys.jobs_of_owner(among.owner)])
        if not ways or not await self._is_whole():
            return [keys.JOBS]
        counted = await self._cards([name for way in ways for name in way])
        usable = [way for way in ways if None not in (counted[name] for name in way)]
        return min(usable, key=lambda w: sum(counted[n] or 0 for n in w), default=[keys.JOBS])

    async def _is_whole(self) -> bool:
        with self._clients.answering(keys.JOB_INDEX):
            built = await self._clients.reads.get(keys.JOB_INDEX)
        return bool(built == keys.JOB_INDEX_FORMAT)

    async def _cards(self, names: Sequence[str]) -> Mapping[str, int | None]:
        """How many stand in each index; None where that has another type."""
        with answering():
            # As of one moment: what does not add up has all records read again.
            async with self._clients.reads.pipeline(transaction=True) as pipe:
                for name in names:
                    pipe.zcard(name)
                rows = await pipe.execute(raise_on_error=False)
            told = self._clients.unreadable.of_their_type(names, rows)
        return dict(zip(names, told, strict=True))

    async def summaries_of(self, job_ids: Sequence[str]) -> list[JobSummary]:
        """See ``JobStore.summaries_of``."""
        with answering():
            async with self._clients.reads.pipeline(transaction=False) as pipe:
                for name in job_ids:
                    pipe.hmget(keys.job(name), ["summary", "state"])
                rows = await pipe.execute(raise_on_error=False)
            raise_refusal(rows)
        known: dict[str, JobSummary] = {}
        missing: list[str] = []
        for name, row in zip(job_ids, rows, strict=True):
            summary = None if isinstance(row, Exception) else _summary(*row)
            if summary is None:
                missing.append(name)
            else:
                known[name] = summary
        for stored in await self._load(missing) if missing else ():
            known[stored.job.id] = JobSummary.of(stored.job)
        return [known[name] for name in job_ids if name in known]


def _summary(text: str | None, state: str | None) -> JobSummary | None:
    """None where an older version wrote the record, or a newer one that knows more states."""
    if text is None or state not in set(JobState):
        return None
    try:
        told = JobSummary.model_validate_json(text)
    except ValidationError:
        return None
    # An older version writes the state alone.
    return told if told.state == state else told.model_copy(update={"state": JobState(state)})


async def _listing(row: Row) -> tuple[str, str]:
    """A job's summary and its indexes; nothing of one that cannot be read."""
    try:
        return listing_of((await read_by_turns(row)).job)
    except RecordUnreadableError:
        return "", ""
