"""Rounds through the storage: jobs that Redis has lost are reported, what nobody needs is removed.

Each minute an agent goes through the jobs that had ranks here: those are its to look after. It goes
through all jobs of the storage as it starts, when Redis may have lost some (it was away, the lease was
gone, a running job is unknown to it), until none of them is lost, and about once an hour, for the jobs
whose nodes are gone.

Of many agents that share a storage, the one on the node of rank 0 reports a lost job, and those that run
ranks of it. The others do so if it is still lost some seconds later.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from services.contract.jobs.traces import drafts as trace_drafts
from services.contract.messages.facts import Fact, RunningGang
from services.contract.redis import redis_keys
from services.contract.storage.job_cards import JobCard
from services.contract.system.cancellation import end_if_told
from services.contract.system.durable import StorageAwayError
from services.contract.words.states import TERMINAL_STATES, JobState
from services.worker.agent.host.folders import NodeFolder
from services.worker.agent.host.reserve import (
    REMOVED_WITHIN_S,
    in_removing_thread,
    in_storage_thread,
)
from services.worker.agent.storage.job_storage import Storage
from services.worker.agent.storage.record_files import records_folder
from services.worker.agent.streams.redis_clients import REDIS_AWAY

EVERY_S: Final = 60.0
ALL_EVERY_S: Final = 3600.0
"""The mean time between two rounds through all jobs; random, for agents start together."""
SOON_S: Final = 1.0
OTHERS_AFTER_S: Final = 5.0
GRACE_S: Final = 900.0
_AT_ONCE: Final = 256
_UNADOPTED_STATES: Final = frozenset({JobState.PAUSED, JobState.QUEUED})
"""Of a job that was found again, as long as its ranks are not its own again."""
_log = structlog.get_logger()


@dataclass(frozen=True)
class JobInRedis:
    """What Redis says of a job: nothing (``state`` None), its state, or that it was deleted."""

    state: str | None
    deleted: bool

    @property
    def is_lost(self) -> bool:
        """Redis knows nothing of it, and nobody deleted it."""
        return self.state is None and not self.deleted

    @property
    def is_over(self) -> bool:
        """No attempt of it runs."""
        return self.deleted or self.state in TERMINAL_STATES


@dataclass(frozen=True)
class Holdings:
    """What a node has: its id, the storage, its own files, and by job its newest gang and last step."""

    node_id: str
    storage: Storage
    folder: NodeFolder
    gangs: Callable[[], Mapping[str, tuple[RunningGang, int]]]


class StorageRounds:
    """Goes its rounds for one life of an agent. Run ``run`` as a task.

    Args:
        redis: A client that does not retry; only read from.
        holdings: What is gone through.
        tell: Takes the facts, in order.
        grace_s: For how many seconds something must be seen to be of no use before it goes.
    """

    def __init__(
        self,
        redis: Redis,
        holdings: Holdings,
        tell: Callable[[Fact], None],
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        self._redis = redis
        self._node_id = holdings.node_id
        self._storage = holdings.storage
        self._files = holdings.storage.files
        self._folder = holdings.folder
        self._gangs = holdings.gangs
        self._tell = tell
        self._grace_s = grace_s
        self._useless_since: dict[str, dict[Path, float]] = {}
        self._all_due_at = time.monotonic()
        self._others_since: dict[str, float] = {}
        self._removing: asyncio.Task[None] | None = None

    async def run(self, asked: asyncio.Event) -> None:
        """Go now, each minute, and through all jobs whenever ``asked`` is set; until cancelled."""
        while True:
            end_if_told()
            if asked.is_set():
                self._all_due_at = time.monotonic()
            asked.clear()
            rest_s = EVERY_S
            try:
                if await self.go():
                    rest_s = SOON_S
                elif self._others_since:
                    rest_s = OTHERS_AFTER_S * random.uniform(1, 3)  # noqa: S311 no secret
            except REDIS_AWAY as error:
                _log.warning("round_given_up", why=str(error))
            except OSError as error:
                _log.warning("storage_does_not_answer", why=str(error))
            except Exception:  # noqa: BLE001 whatever lies there, gangs train on
                _log.exception("round_failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await asked.wait()

    async def go(self) -> bool:
        """One round; answers whether ranks here wait to be adopted, so that the next is soon due.

        Raises:
            RedisError: Redis is away; nothing was concluded from that.
            OSError: The storage does not answer.
        """
        gangs = self._gangs()
        is_of_all = time.monotonic() >= self._all_due_at
        jobs = await in_storage_thread(self._files.jobs)
        if not is_of_all:
            own = {*gangs, *await asyncio.to_thread(self._folder.jobs)}
            jobs = [job_id for job_id in jobs if job_id in own]
        known = await self._jobs_in_redis(jobs)
        unknown = [job_id for job_id, found in known.items() if found.is_lost]
        lost = await in_storage_thread(self._cards_of, unknown)
        if is_of_all and not lost:
            self._all_due_at = time.monotonic() + ALL_EVERY_S * random.uniform(0.5, 1.5)  # noqa: S311 no secret
        self._others_since = {job: at for job, at in self._others_since.items() if job in lost}
        for job_id, job_in_redis in known.items():
            stands = job_in_redis.state in _UNADOPTED_STATES and job_id in gangs
            is_ours = job_id in lost and self._is_ours_to_report(lost[job_id], gangs)
            with _passing_over(job_id):
                if stands or is_ours:
                    await self._report(job_id, gangs)
                elif job_in_redis.deleted:
                    await in_storage_thread(self._put_away, job_id)
        # One that was told of just now may need to be told again, once all its nodes have joined.
        waiting = any(
            known[job].is_lost or known[job].state in _UNADOPTED_STATES
            for job in gangs
            if job in known
        )
        over = {job_id for job_id, s in known.items() if s.is_over and job_id not in gangs}
        remove = partial(self._remove_orphans, jobs, over, is_of_all=is_of_all)
        if not await self._go_on_removing(remove) and is_of_all:
            self._all_due_at = time.monotonic()
        await asyncio.to_thread(self._folder.prune, [j for j, s in known.items() if s.deleted])
        return waiting

    async def _jobs_in_redis(self, jobs: list[str]) -> dict[str, JobInRedis]:
        found: dict[str, JobInRedis] = {}
        for start in range(0, len(jobs), _AT_ONCE):
            some = jobs[start : start + _AT_ONCE]
            async with self._redis.pipeline(transaction=True) as pipe:
                for job_id in some:
                    pipe.hget(redis_keys.job(job_id), "state")
                    pipe.sismember(redis_keys.DELETED_JOBS, job_id)
                answers: list[Any] = await pipe.execute(raise_on_error=False)
            pairs = zip(answers[0::2], answers[1::2], strict=True)
            found |= zip(some, map(_said, pairs), strict=True)
        return found

    def _cards_of(self, jobs: Iterable[str]) -> dict[str, JobCard]:
        """The cards by which jobs are found again; one that was deleted has none."""
        cards = ((job_id, self._storage.card(job_id)) for job_id in jobs)
        return {job_id: card for job_id, card in cards if card is not None}

    def _is_ours_to_report(self, card: JobCard, gangs: Mapping[str, object]) -> bool:
        if card.job_id in gangs or card.plan.ranks[0].node_id == self._node_id:
            return True
        now = time.monotonic()
        return now - self._others_since.setdefault(card.job_id, now) >= OTHERS_AFTER_S

    async def _report(self, job_id: str, gangs: Mapping[str, tuple[RunningGang, int]]) -> None:
        running, last_step = gangs.get(job_id, (None, 0))
        facts = await in_storage_thread(self._storage.find_job, job_id, running, last_step)
        if facts:
            count = sum(len(fact.manifests) for fact in facts)
            _log.warning("job_unknown_to_redis", job=job_id, checkpoints=count)
        for fact in facts:
            self._tell(fact)

    def _put_away(self, job_id: str) -> None:
        records = records_folder(self._files.root, job_id)
        if self._storage.put_card_away(job_id):
            _log.info("card_put_away", job=job_id)
            self._remove(records)
        elif os.path.lexists(records):
            self._remove(records)

    async def _go_on_removing(self, remove: Callable[[], None]) -> bool:
        """Remove, unless what an earlier round removes takes long: lost jobs are looked for meanwhile."""
        begins = self._removing is None
        if self._removing is None:
            self._removing = asyncio.create_task(in_removing_thread(remove))
        await asyncio.wait({self._removing}, timeout=REMOVED_WITHIN_S)
        if self._removing.done():
            removing, self._removing = self._removing, None
            removing.result()
        return begins

    def _remove_orphans(self, jobs: Iterable[str], over: Set[str], *, is_of_all: bool) -> None:
        """Shards that no manifest names, drafts, unfinished traces; each only after it was so for long.

        Args:
            jobs: Those that are gone through.
            over: Those of them of which no attempt runs.
            is_of_all: Whether there are no others.
        """
        if is_of_all:
            self._useless_since = {job: self._useless_since.get(job, {}) for job in jobs}
        for job_id in jobs:
            with _passing_over(job_id):
                self._remove_orphans_of(job_id, is_over=job_id in over)

    def _remove_orphans_of(self, job_id: str, *, is_over: bool) -> None:
        chain = self._storage.chain(job_id)
        useless = [*chain.drafts(), *chain.abandoned(passed_over=True)]
        useless += trace_drafts(self._files.root, job_id)
        if is_over:
            useless += chain.uncommitted()
        known, now = self._useless_since.get(job_id, {}), time.monotonic()
        self._useless_since[job_id] = {path: known.get(path, now) for path in useless}
        for path, since in self._useless_since[job_id].items():
            if now - since >= self._grace_s:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        try:
            self._files.remove(path)
        except FileNotFoundError:
            return
        except OSError as error:  # the next round tries again
            _log.warning("not_removed", path=str(path), why=str(error))
        else:
            _log.info("orphan_removed", path=str(path))


def _said(answers: tuple[object, object]) -> JobInRedis:
    """What a record's state and the set of deleted jobs say of a job.

    One of another type is no lost one: "", which is no state.

    Raises:
        RedisError: Redis refused.
    """
    state, deleted = answers
    if isinstance(state, ResponseError) and str(state).startswith("WRONGTYPE"):
        state = ""
    for each in (state, deleted):
        if isinstance(each, RedisError):
            raise each
    return JobInRedis(None if state is None else str(state), bool(deleted))


@contextlib.contextmanager
def _passing_over(job_id: str) -> Iterator[None]:
    """Within, what lies in one job's folder keeps no other job from being found or looked after: ranks write there.

    Raises:
        StorageAwayError: The storage does not answer for any job.
    """
    try:
        yield
    except StorageAwayError:
        raise
    except Exception as error:  # noqa: BLE001 whatever lies there
        _log.warning("job_passed_over", job=job_id, why=f"{type(error).__name__}: {error}")
