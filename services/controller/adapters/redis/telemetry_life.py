"""How long what agents write of a job lives, which may be on a server of its own.

It follows what is committed of the job, and is not part of it: where this server does not answer, or the controller
ends in between, decisions stand, and what they mean for telemetry is caught up with later or goes by its age.
"""

import contextlib
from collections.abc import Iterator

import structlog

from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis import record_scripts
from services.controller.adapters.redis.connection import RedisClients, answering
from services.controller.adapters.redis.telemetry_names import TelemetryNames
from services.controller.domain.errors import StoreUnavailableError

_log = structlog.get_logger()


class TelemetryLife:
    """Begins, ends and deletes the telemetry of jobs.

    Args:
        clients: Of the server that has telemetry.
        kept_s: So long it is kept after a job has ended.
        names: Where it is.
    """

    def __init__(self, clients: RedisClients, kept_s: int, names: TelemetryNames) -> None:
        self._clients = clients
        self._names = names
        self._kept_s = kept_s
        self._end = clients.script(record_scripts.LET_GO)

    async def begin(self, job_id: str) -> None:
        """The job is new: all that will be here is all there is. If this fails, storage is asked as well."""
        with _passing(job_id):
            await self._clients.writes.set(keys.job_records(self._names.of(job_id)), "1")

    async def end(self, job_id: str) -> None:
        """The job has ended."""
        with _passing(job_id):
            await self._end(keys=self._names.keys(job_id), args=[self._kept_s])

    async def go_on(self, job_id: str) -> None:
        """A job that had ended goes on. If this fails, storage has what goes."""
        with _passing(job_id):
            async with self._clients.writes.pipeline(transaction=False) as pipe:
                for key in self._names.keys(job_id):
                    pipe.persist(key)
                await pipe.execute()

    async def forget(self, job_id: str) -> None:
        """The job is deleted."""
        with _passing(job_id):
            await self._clients.writes.delete(*self._names.keys(job_id))
        for key in self._names.keys(job_id):
            self._clients.unreadable.forget_key(key)


@contextlib.contextmanager
def _passing(job_id: str) -> Iterator[None]:
    try:
        with answering():
            yield
    except StoreUnavailableError as error:
        _log.warning("telemetry_life_not_followed", job=job_id, why=error.why)
