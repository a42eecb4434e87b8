"""Rounds through the storage: jobs that Redis has lost are reported, what nobody needs is removed."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
from redis.asyncio import Redis

from services.contract.jobs.traces import drafts as trace_drafts
from services.contract.messages.facts import Fact, RunningGang
from services.contract.redis import redis_keys
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.job_cards import jobs_in, put_card_away
from services.contract.system.cancellation import end_if_told
from services.contract.words.states import TERMINAL_STATES, JobState
from services.worker.agent.host.folders import NodeFolder
from services.worker.agent.host.removal import remove_tree
from services.worker.agent.storage.job_storage import Storage
from services.worker.agent.storage.record_files import records_folder
from services.worker.agent.streams.redis_clients import REDIS_AWAY

EVERY_S: Final = 60.0
SOON_S: Final = 1.0
GRACE_S: Final = 900.0
_AT_ONCE: Final = 256
_UNADOPTED_STATES: Final = frozenset({JobState.PAUSED, JobState.QUEUED})
"""Of a job that was found again, as long as its ranks are not its own again."""
_log = structlog.get_logger()


@dataclass(frozen=True)
class Standing:
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
    """What a node has: the storage, its own files, and by job its newest gang and last step."""

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
        self._storage = holdings.storage
        self._folder = holdings.folder
        self._gangs = holdings.gangs
        self._tell = tell
        self._grace_s = grace_s
        self._useless_since: dict[Path, float] = {}

    async def run(self, asked: asyncio.Event) -> None:
        """Go now, each minute, and whenever ``asked`` is set; until cancelled."""
        while True:
            end_if_told()
            asked.clear()
            rest_s = EVERY_S
            try:
                if await self.go():
                    rest_s = SOON_S
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
        jobs = await asyncio.to_thread(jobs_in, self._storage.root)
        standings = await self._standings(jobs)
        gangs = self._gangs()
        for job_id, standing in standings.items():
            stands = standing.state in _UNADOPTED_STATES and job_id in gangs
            if standing.is_lost or stands:
                await self._report(job_id, gangs)
            elif standing.deleted:
                await asyncio.to_thread(self._put_away, job_id)
        # One that was told of just now may need to be told again, once all its nodes have joined.
        waiting = any(
            standings[job].is_lost or standings[job].state in _UNADOPTED_STATES
            for job in gangs
            if job in standings
        )
        over = [job_id for job_id, s in standings.items() if s.is_over and job_id not in gangs]
        await asyncio.to_thread(self._remove_orphans, jobs, over)
        await asyncio.to_thread(self._folder.prune, [j for j, s in standings.items() if s.deleted])
        return waiting

    async def _standings(self, jobs: list[str]) -> dict[str, Standing]:
        found: dict[str, Standing] = {}
        for start in range(0, len(jobs), _AT_ONCE):
            some = jobs[start : start + _AT_ONCE]
            async with self._redis.pipeline(transaction=True) as pipe:
                for job_id in some:
                    pipe.hget(redis_keys.job(job_id), "state")
                    pipe.sismember(redis_keys.DELETED_JOBS, job_id)
                answers: list[Any] = await pipe.execute()
            for job_id, state, deleted in zip(some, answers[0::2], answers[1::2], strict=True):
                found[job_id] = Standing(state, bool(deleted))
        return found

    async def _report(self, job_id: str, gangs: Mapping[str, tuple[RunningGang, int]]) -> None:
        running, last_step = gangs.get(job_id, (None, 0))
        fact = await asyncio.to_thread(self._storage.find_job, job_id, running, last_step)
        if fact is not None:
            _log.warning("job_unknown_to_redis", job=job_id, checkpoints=len(fact.manifests))
            self._tell(fact)

    def _put_away(self, job_id: str) -> None:
        if put_card_away(self._storage.root, job_id):
            _log.info("card_put_away", job=job_id)
        records = records_folder(self._storage.root, job_id)
        if os.path.lexists(records):
            _remove(records)

    def _remove_orphans(self, jobs: Iterable[str], over: Iterable[str]) -> None:
        """Shards that no manifest names, drafts, unfinished traces; each only after it was so for long."""
        useless: list[Path] = []
        for job_id in jobs:
            chain = CommitChain(self._storage.root, job_id)
            useless += chain.drafts()
            useless += chain.abandoned()
            useless += trace_drafts(self._storage.root, job_id)
        for job_id in over:
            useless += CommitChain(self._storage.root, job_id).uncommitted()
        now = time.monotonic()
        self._useless_since = {path: self._useless_since.get(path, now) for path in useless}
        for path, since in self._useless_since.items():
            if now - since >= self._grace_s:
                _remove(path)


def _remove(path: Path) -> None:
    try:
        remove_tree(path)
    except FileNotFoundError:
        return
    except OSError as error:  # the next round tries again
        _log.warning("not_removed", path=str(path), why=str(error))
    else:
        _log.info("orphan_removed", path=str(path))
