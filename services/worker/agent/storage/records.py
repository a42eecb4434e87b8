"""A job's curve and output between Redis and storage: closed when it has ended, brought back when asked.

What is brought back is written beside what Redis has, into streams that the controller made and puts
together: an agent may remove nothing of a job in Redis.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import structlog
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from services.contract.messages.commands import CloseRecords, RecallRecords
from services.contract.messages.facts import Fact, RecordsClosed
from services.contract.redis import redis_keys
from services.contract.system.cancellation import end_if_told
from services.worker.agent.host.reserve import in_storage_thread
from services.worker.agent.storage.journal import Journal
from services.worker.agent.storage.record_files import (
    CLOSED_BYTES,
    EVENTS,
    KINDS,
    Entries,
    EntryId,
    Kind,
    close,
    is_closed,
    publish,
    read_entries,
    records_folder,
)
from services.worker.agent.storage.shared_files import SharedFiles, as_shared
from services.worker.agent.streams.redis_clients import (
    REDIS_AWAY,
    RULES_ARE_OLD,
    Connections,
    NewestFirst,
    while_away,
)

_AT_ONCE: Final = 1_000
# Where a page did not come in time; what is long would be met again at once if more were asked for later.
_FEWER: Final = 10
_DONE: Final = """
if redis.call('HGET', KEYS[1], 'asked') == ARGV[1] then
  redis.call('HSET', KEYS[1], 'done', ARGV[1])
end
"""
_log = structlog.get_logger()


class RecordKeeper:
    """Carries out ``CloseRecords`` and ``RecallRecords``.

    Args:
        connections: To Redis.
        node_id: Who reports.
        files: The storage.
        journal: Of this life: what it holds is written first.
    """

    def __init__(
        self, connections: Connections, node_id: str, files: SharedFiles | Path, journal: Journal
    ) -> None:
        self._redis = connections.writing
        self._telemetry = connections.telemetry
        self._node_id = node_id
        self._files = as_shared(files)
        self._root = self._files.root
        self._journal = journal
        self._newest = NewestFirst(connections.telemetry)
        self._done = connections.telemetry.register_script(_DONE)

    async def carry_out(self, command: CloseRecords | RecallRecords) -> Sequence[Fact]:
        """Do what is commanded, and answer with what is to be told."""
        if isinstance(command, CloseRecords):
            return await self._close(command)
        await self._recall(command)
        return ()

    async def _close(self, command: CloseRecords) -> Sequence[Fact]:
        """Put all that there is of an ended job's records into its folder, compressed.

        Redis is read too: it has what another node had not written yet when it was lost.
        """
        await self._journal.flush(command.job_id)
        events_to = None
        folder = records_folder(self._root, command.job_id)
        try:
            await in_storage_thread(self._files.require_known)
            await in_storage_thread(self._files.pull_missing, folder)
            before = await in_storage_thread(_names, folder)
            for kind in (*KINDS.values(), EVENTS):
                more = await self._in_redis(command, kind)
                await in_storage_thread(close, self._root, command.job_id, kind, more)
                events_to = str(max(more)) if kind is EVENTS and more else None
            await in_storage_thread(self._publish, folder, before)
        except OSError as error:  # Redis keeps them longer then
            _log.warning("records_not_closed", job=command.job_id, why=str(error))
            return ()
        return (
            RecordsClosed(
                job_id=command.job_id,
                fence=command.fence,
                node_id=self._node_id,
                events_to=events_to,
            ),
        )

    async def close_older(self, job_id: str, fence: int) -> None:
        """Put together what attempts before this one left, so that their files do not grow in number."""
        await self._journal.flush(job_id)
        folder = records_folder(self._root, job_id)
        try:
            await in_storage_thread(self._files.pull_missing, folder)
            before = await in_storage_thread(_names, folder)
            for kind in KINDS.values():
                await in_storage_thread(close, self._root, job_id, kind, {}, before_fence=fence)
            await in_storage_thread(self._publish, folder, before)
        except OSError as error:  # they are read as they are
            _log.warning("records_not_put_together", job=job_id, why=str(error))

    def _publish(self, folder: Path, before: set[str]) -> None:
        """Have all nodes see what was closed, then no longer what it was made of."""
        after = _names(folder)
        for name in filter(is_closed, sorted(after)):
            publish(self._files, folder / name)
        for name in sorted(before - after):
            publish(self._files, folder / name)

    async def _recall(self, command: RecallRecords) -> None:
        """Bring back what storage has; whoever asked waits for it."""
        job_id = command.job_id
        if not await in_storage_thread(self._files.holds, self._root / job_id):
            # It would be told that there is nothing, by a node whose storage is not mounted.
            _log.warning("storage_has_no_such_job", job=job_id, root=str(self._root))
            return
        await self._journal.flush(job_id)
        try:
            folder = records_folder(self._root, job_id)
            await in_storage_thread(self._files.pull_missing, folder)
            for kind in (*KINDS.values(), EVENTS):
                entries = await in_storage_thread(read_entries, self._root, job_id, kind)
                await self._bring_back(kind.recalled(command.telemetry_name), entries)
            name = redis_keys.recalled(command.telemetry_name)
            await self._done(keys=[name], args=[command.asked])
        except NoPermissionError as error:
            _log.error("recall_refused", job=job_id, why=str(error), advice=RULES_ARE_OLD)
        except (OSError, *REDIS_AWAY) as error:  # whoever asked may ask again
            _log.warning("records_not_recalled", job=job_id, why=str(error))

    async def _bring_back(self, key: str, entries: Entries) -> None:
        left = iter(entries.items())
        while batch := tuple(itertools.islice(left, _AT_ONCE)):
            async with self._telemetry.pipeline(transaction=False) as pipe:
                for name, body in batch:
                    told: Any = {redis_keys.MESSAGE_FIELD: body}
                    pipe.xadd(key, told, id=str(name), nomkstream=True)
                answers = await pipe.execute(raise_on_error=False)
            for answer in answers:
                # Of a command that was given twice, the first time has brought a part of it.
                if isinstance(answer, Exception) and not _is_there(answer):
                    raise answer

    async def _in_redis(self, command: CloseRecords, kind: Kind) -> Entries:
        found: Entries = {}
        # Of the controller's own an agent's user may read these alone, and no agent adds any.
        is_told = kind is not EVENTS
        start, at_once, room = "+" if is_told else "-", _AT_ONCE, CLOSED_BYTES
        key = kind.key(command.telemetry_name if is_told else command.job_id)
        while (len(found) < kind.kept and room > 0) or not is_told:
            end_if_told()
            try:
                if is_told:
                    rows = await self._newest.rows(key, start, at_once)
                else:
                    rows = _bodies(await self._redis.xrange(key, start, count=at_once))
            except NoPermissionError as error:
                _log.error(
                    "closing_refused",
                    key=kind.key(command.job_id),
                    why=str(error),
                    advice=RULES_ARE_OLD,
                )
                return {}
            except ResponseError as error:  # of another type: what storage has is all there is
                _log.warning(
                    "stream_unreadable", job=command.job_id, kind=kind.name, why=str(error)
                )
                return found
            except REDIS_AWAY as error:
                if at_once == 1:
                    # Redis takes seconds itself for an entry of hundreds of megabytes, in which nobody gets an answer.
                    _log.warning(
                        "stream_unreadable", job=command.job_id, kind=kind.name, why=str(error)
                    )
                    break
                at_once = max(at_once // _FEWER, 1)
                await self._until_redis_answers(self._telemetry if is_told else self._redis)
                continue
            if not rows:
                break
            for entry, body in rows:
                if kind.is_one(body):
                    found[EntryId.parse(entry)] = body
                    room -= len(body)
            start = f"({rows[-1][0]}"
        return found

    async def _until_redis_answers(self, client: Redis) -> None:
        async for attempt in while_away(
            lambda why: _log.warning("records_wait_for_redis", why=why)
        ):
            with attempt:
                end_if_told()
                await client.ping()


def _bodies(rows: Any) -> list[tuple[str, str]]:  # noqa: ANN401 an answer of Redis
    return [(entry, fields.get(redis_keys.MESSAGE_FIELD, "")) for entry, fields in rows]


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _is_there(error: Exception) -> bool:
    return isinstance(error, ResponseError) and "equal or smaller" in str(error)
