"""Jobs in Redis. Every write is one Lua script: all of a decision, or nothing of it."""

import contextlib
import re
from collections.abc import Sequence
from typing import Any, Final

from services.contract import redis_keys as keys
from services.contract.long_work import in_turns
from services.contract.messages.commands import COMMAND
from services.contract.states import JobState
from services.controller.adapters.redis import scripts
from services.controller.adapters.redis.connection import (
    RedisClients,
    answering,
    is_mistyped,
    to_ms,
)
from services.controller.adapters.redis.job_rows import (
    KnownRows,
    Row,
    read_row,
    unreadable,
)
from services.controller.domain.effects import Decision, Send
from services.controller.domain.errors import (
    DeposedError,
    KeyReusedError,
    NotFoundError,
    RecordUnreadableError,
    StaleWriteError,
    StoreUnavailableError,
)
from services.controller.domain.history import creation
from services.controller.domain.record import Record
from services.controller.ports.jobs import (
    Actor,
    Change,
    Claim,
    Place,
    Stored,
    event_records,
)

_PAGE: Final = 256
_NOTHING_DOOMED: Final = (0, "", "")
# Of the keys that a commit takes first, so many must have their types.
_TYPED: Final = 6
_JOB_ID: Final = re.compile("job_[0-9a-z]{26}")


class RedisJobs:
    """The port ``JobStore``.

    Args:
        clients: Redis.
        telemetry_kept_s: So long after a job has ended its steps, output and history are kept.
    """

    def __init__(
        self, clients: RedisClients, telemetry_kept_s: int = keys.TELEMETRY_KEPT_S
    ) -> None:
        self._clients = clients
        self._known = KnownRows()
        self._telemetry_kept_s = telemetry_kept_s
        self._commit = clients.writes.register_script(scripts.COMMIT)
        self._create = clients.writes.register_script(scripts.CREATE)
        self._restore = clients.writes.register_script(scripts.RESTORE)
        self._delete = clients.writes.register_script(scripts.DELETE)
        self._send = clients.writes.register_script(scripts.SEND)

    async def create(self, decision: Decision, actor: Actor, claim: Claim | None) -> Stored:
        """See ``JobStore.create``."""
        job = decision.job
        with answering():
            status, told = await self._create(
                keys=[
                    keys.job(job.id),
                    keys.JOBS,
                    keys.ACTIVE_JOBS,
                    keys.job_events(job.id),
                    _claim_key(claim),
                    keys.job_history(job.id),
                ],
                args=[
                    job.id,
                    keys.WAKE,
                    keys.MESSAGE_FIELD,
                    job.model_dump_json(),
                    job.state,
                    job.created_ms,
                    "" if claim is None else claim.digest,
                    keys.IDEMPOTENCY_TTL_S,
                    *_listed(_bodies(event_records(decision, actor))),
                    *_listed(_bodies((creation(job),))),
                ],
            )
        self._refuse(status, job.id, told)
        if status == "ok" or claim is None:
            return Stored(job, 1)
        return _claimed(claim, told)

    async def restore(self, decision: Decision, actor: Actor, epoch: int) -> bool:
        """See ``JobStore.restore``."""
        job = decision.job
        puts = [t for c in job.checkpoints.values() for t in (c.id, c.model_dump_json())]
        with answering():
            status, told = await self._restore(
                keys=[
                    keys.job(job.id),
                    keys.JOBS,
                    keys.ACTIVE_JOBS,
                    keys.EPOCH,
                    keys.job_events(job.id),
                    keys.job_checkpoints(job.id),
                    keys.DELETED_JOBS,
                    keys.job_history(job.id),
                ],
                args=[
                    epoch,
                    job.id,
                    keys.WAKE,
                    keys.MESSAGE_FIELD,
                    job.model_dump_json(),
                    job.fence,
                    job.state,
                    int(job.is_active),
                    job.created_ms,
                    *_listed(_bodies(event_records(decision, actor))),
                    *_listed(puts),
                    *_listed(_bodies((creation(job),))),
                ],
            )
        self._refuse(status, job.id, told)
        return bool(status == "ok")

    async def was_deleted(self, job_id: str) -> bool:
        """See ``JobStore.was_deleted``."""
        with self._clients.answering(keys.DELETED_JOBS):
            return bool(await self._clients.reads.sismember(keys.DELETED_JOBS, job_id))

    async def claimed(self, claim: Claim) -> Stored | None:
        """See ``JobStore.claimed``."""
        with answering():
            text = await self._clients.reads.get(_claim_key(claim))
        return None if text is None else _claimed(claim, str(text))

    async def load(self, job_id: str) -> Stored:
        """See ``JobStore.load``."""
        # What is no id could name a key of another kind.
        rows = await self._rows([job_id]) if _JOB_ID.fullmatch(job_id) else []
        if not rows:
            raise _absent(job_id)
        return self._read(rows[0])

    async def commit(self, change: Change, epoch: int | None = None) -> Stored:
        """See ``JobStore.commit``."""
        job, sends = change.decision.job, change.decision.sends
        inboxes = list(dict.fromkeys(keys.node_inbox(send.node_id) for send in sends))
        puts = [text for c in change.changed_checkpoints for text in (c.id, c.model_dump_json())]
        outgoing = [
            text
            for send in sends
            for text in (str(inboxes.index(keys.node_inbox(send.node_id))), _json(send))
        ]
        doomed = change.deletes
        its_own = [
            keys.job(job.id),
            keys.ACTIVE_JOBS,
            keys.EPOCH,
            keys.job_events(job.id),
            keys.job_checkpoints(job.id),
            keys.job_history(job.id),
            keys.job_ranks(job.id),
            keys.job_steps(job.id),
            keys.job_logs(job.id),
            keys.job_stacks(job.id),
            keys.job_metrics(job.id),
        ]
        first_inbox = len(its_own) + 1  # as Lua counts
        with answering():
            status, told = await self._commit(
                keys=[*its_own, *inboxes, *([] if doomed is None else _doomed(doomed.job.id))],
                args=[
                    change.before.version,
                    "" if epoch is None else epoch,
                    job.id,
                    keys.WAKE,
                    keys.MESSAGE_FIELD,
                    job.model_dump_json(),
                    job.fence,
                    job.state,
                    int(job.is_active),
                    keys.EVENTS_KEPT,
                    first_inbox,
                    *(
                        _NOTHING_DOOMED
                        if doomed is None
                        else (first_inbox + len(inboxes), doomed.job.id, doomed.version)
                    ),
                    *_listed(_bodies(change.events)),
                    *_listed(puts),
                    *_listed(list(change.removed_checkpoints)),
                    *_listed(outgoing),
                    keys.HISTORY_KEPT,
                    *_listed(_bodies(change.history)),
                    self._telemetry_kept_s if job.is_terminal else "",
                ],
            )
        self._refuse(status, job.id, told)
        for key in its_own[:_TYPED]:
            self._clients.unreadable.forget(key)
        if doomed is not None:
            self._forget_names(doomed.job.id)
        return Stored(job, int(told))

    async def send(self, sends: tuple[Send, ...], epoch: int) -> None:
        """See ``JobStore.send``."""
        with answering():
            status = await self._send(
                keys=[keys.EPOCH, *(keys.node_inbox(send.node_id) for send in sends)],
                args=[epoch, keys.MESSAGE_FIELD, *(_json(send) for send in sends)],
            )
        self._refuse(status, "", "")

    async def delete(self, stored: Stored) -> None:
        """See ``JobStore.delete``."""
        await self._forget(stored.job.id, str(stored.version))

    async def delete_unread(self, job_id: str) -> None:
        """See ``JobStore.delete_unread``."""
        rows = await self._rows([job_id]) if _JOB_ID.fullmatch(job_id) else []
        if not rows:
            raise _absent(job_id)
        await self._forget(job_id, rows[0].version or "")

    async def active(self) -> list[Stored]:
        """See ``JobStore.active``."""
        with self._clients.answering(keys.ACTIVE_JOBS):
            members: Any = await self._clients.reads.smembers(keys.ACTIVE_JOBS)
        return await self._load(sorted(members))

    async def page(self, before: Place | None, limit: int) -> list[Stored]:
        """See ``JobStore.page``."""
        highest = "+inf" if before is None else before.created_ms
        found: list[Stored] = []
        offset = 0
        while len(found) < limit:
            with self._clients.answering(keys.JOBS):
                rows: Any = await self._clients.reads.zrevrangebyscore(
                    keys.JOBS, highest, "-inf", start=offset, num=_PAGE, withscores=True
                )
            places = [Place(to_ms(score), job_id) for job_id, score in rows]
            found += await self._load([p.id for p in places if before is None or p < before])
            offset += _PAGE
            if len(rows) < _PAGE:
                break
        return found[:limit]

    async def counts(self) -> dict[JobState, int]:
        """See ``JobStore.counts``."""
        totals = dict.fromkeys(JobState, 0)
        with self._clients.answering(keys.JOBS):
            names: Any = await self._clients.reads.zrange(keys.JOBS, 0, -1)
        with answering():
            for start in range(0, len(names), _PAGE):
                async with self._clients.reads.pipeline(transaction=False) as pipe:
                    for name in names[start : start + _PAGE]:
                        pipe.hget(keys.job(name), "state")
                    for state in await pipe.execute(raise_on_error=False):
                        if isinstance(state, Exception) and not is_mistyped(state):
                            raise state
                        if state in totals:  # a newer version may know more of them
                            totals[JobState(state)] += 1
        return totals

    async def _load(self, job_ids: list[str]) -> list[Stored]:
        found: list[Stored] = []
        async for row in in_turns(await self._rows(job_ids)):
            with contextlib.suppress(RecordUnreadableError):
                found.append(self._read(row))
        return found

    def _read(self, row: Row) -> Stored:
        """The job of a row.

        Raises:
            RecordUnreadableError: It makes no sense here, and is named as such.
        """
        key = keys.job(row.job_id)
        known = self._known.get(row)
        if known is not None:
            return known
        try:
            stored = read_row(row)
        except RecordUnreadableError as error:
            self._clients.unreadable.note(key, row.version, error.__cause__ or error)
            raise
        self._clients.unreadable.forget(key)
        self._known.put(row, stored)
        return stored

    async def _rows(self, job_ids: list[str]) -> list[Row]:
        found: list[Row] = []
        for start in range(0, len(job_ids), _PAGE):
            names = job_ids[start : start + _PAGE]
            with answering():
                # One transaction: a job and its checkpoints are read as of the same moment.
                async with self._clients.reads.pipeline(transaction=True) as pipe:
                    for name in names:
                        pipe.hmget(keys.job(name), ["doc", "version"])
                        pipe.hgetall(keys.job_checkpoints(name))
                    answers = await pipe.execute(raise_on_error=False)
            for name, record, index in zip(names, answers[0::2], answers[1::2], strict=True):
                row = self._row(name, record, index)
                if row is not None:
                    found.append(row)
        return found

    def _row(self, job_id: str, record: Any, index: Any) -> Row | None:  # noqa: ANN401 answers of Redis
        """What is stored of a job, as far as its keys have their types; None for nothing."""
        doc, version = (None, None) if is_mistyped(record) else record
        if doc is None and not is_mistyped(record):
            return None
        return Row(job_id, doc, version, None if is_mistyped(index) else index)

    async def _forget(self, job_id: str, version: str) -> None:
        with answering():
            status, told = await self._delete(
                keys=[keys.ACTIVE_JOBS, *_doomed(job_id)], args=[version, job_id]
            )
        self._refuse(status, job_id, told)
        self._forget_names(job_id)

    def _forget_names(self, job_id: str) -> None:
        """Nothing of a deleted job is unreadable any more, nor known."""
        self._known.forget(job_id)
        for key in _doomed(job_id):
            if job_id in key:
                self._clients.unreadable.forget_key(key)

    def _refuse(self, status: str, job_id: str, told: str) -> None:
        """Raise what a script's answer means, if it was not done; ``told``: the key that is mistyped."""
        if status == "mistyped":
            self._clients.unreadable.note_type(told)
            if job_id and job_id in told:
                raise RecordUnreadableError(unreadable(job_id, f"{told} has another type"))
            raise StoreUnavailableError(f"{told} has another type in Redis: rename or delete it")
        if status == "deposed":
            raise DeposedError("another controller leads now")
        if status == "gone":
            raise _absent(job_id)
        if status == "stale":
            raise StaleWriteError(f"job {job_id} changed meanwhile")


def _claim_key(claim: Claim | None) -> str:
    return keys.idempotency("", "") if claim is None else keys.idempotency(claim.subject, claim.key)


def _doomed(job_id: str) -> list[str]:
    """The keys of a job that is deleted, as the scripts take them."""
    return [
        keys.job(job_id),
        keys.JOBS,
        keys.DELETED_JOBS,
        keys.job_events(job_id),
        keys.job_ranks(job_id),
        keys.job_steps(job_id),
        keys.job_logs(job_id),
        keys.job_stacks(job_id),
        keys.job_metrics(job_id),
        keys.job_checkpoints(job_id),
        keys.job_history(job_id),
    ]


def _claimed(claim: Claim, text: str) -> Stored:
    digest, _, doc = text.partition(" ")
    if digest != claim.digest:
        raise KeyReusedError(
            f"Idempotency-Key {claim.key!r} was used for another request; take a new key"
        )
    return read_row(Row("of this Idempotency-Key", doc, "1", {}))


def _absent(job_id: str) -> NotFoundError:
    return NotFoundError(f"there is no job {job_id}")


def _json(send: Send) -> str:
    return COMMAND.dump_json(send.command).decode()


def _bodies(records: Sequence[Record]) -> list[str]:
    return [record.model_dump_json() for record in records]


def _listed(texts: list[str]) -> list[str]:
    """A list as the scripts take it: its length, then its items."""
    return [str(len(texts)), *texts]
