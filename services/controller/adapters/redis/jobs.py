"""Jobs in Redis. Every write is one Lua script: all of a decision, or nothing of it."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from services.contract.messages.commands import COMMAND
from services.contract.redis import redis_keys as keys
from services.contract.system.long_work import in_turns
from services.contract.words.states import JobState
from services.controller.adapters.redis import job_scripts
from services.controller.adapters.redis.connection import (
    RedisClients,
    answering,
    is_mistyped,
)
from services.controller.adapters.redis.job_index import JobIndex, listing_of
from services.controller.adapters.redis.job_rows import (
    PARTS,
    SPLIT_MARK,
    KnownRows,
    Row,
    keys_of_commit,
    keys_of_deletion,
    read_by_turns,
    read_row,
    split,
    unreadable,
)
from services.controller.adapters.redis.shared_reads import SharedReads
from services.controller.adapters.redis.telemetry_life import TelemetryLife
from services.controller.adapters.redis.telemetry_names import PLAIN_NAMES, TelemetryNames
from services.controller.adapters.redis.working_set import COMPARED_EVERY_S, WorkingSet
from services.controller.domain.decisions.history import creation
from services.controller.domain.errors import (
    DeposedError,
    KeyReusedError,
    NotFoundError,
    RecordUnreadableError,
    StaleWriteError,
    StoreUnavailableError,
)
from services.controller.domain.job.effects import Decision, Send
from services.controller.domain.record import Record
from services.controller.ports.jobs import (
    DEFAULT_QUOTA,
    Actor,
    Among,
    Change,
    Claim,
    JobSummary,
    Place,
    Quota,
    Stored,
    event_records,
)

_PAGE: Final = 256
_FEW: Final = 16
_NOTHING_DOOMED: Final = (0, "", "")
# Of the keys that a commit takes first, so many must have their types.
_TYPED: Final = 6
_JOB_ID: Final = re.compile("job_[0-9a-z]{26}")


class RedisJobs:
    """The port ``JobStore``.

    Args:
        clients: Redis.
        telemetry: The server that has telemetry; unset: the same.
        telemetry_kept_s: So long after a job has ended its steps, output and history are kept.
        compared_every_s: See ``WorkingSet``.
        quota: How many jobs an owner may have.
        names: Where telemetry is; agents are told.
    """

    def __init__(
        self,
        clients: RedisClients,
        telemetry: RedisClients | None = None,
        telemetry_kept_s: int = keys.TELEMETRY_KEPT_S,
        compared_every_s: float = COMPARED_EVERY_S,
        quota: Quota = DEFAULT_QUOTA,
        names: TelemetryNames = PLAIN_NAMES,
    ) -> None:
        self._clients = clients
        self._known = KnownRows()
        self._reads = SharedReads[Stored]()
        self._index = JobIndex(clients, self._rows, self._load)
        self._active = WorkingSet(
            clients, self._rows, self._parsed, self._index.list_again, compared_every_s
        )
        self._telemetry_kept_s = telemetry_kept_s
        self._names = names
        self._life = TelemetryLife(telemetry or clients, telemetry_kept_s, names)
        self._quota = quota
        self._commit = clients.script(job_scripts.COMMIT)
        self._create = clients.script(job_scripts.CREATE)
        self._restore = clients.script(job_scripts.RESTORE)
        self._delete = clients.script(job_scripts.DELETE)
        self._send = clients.script(job_scripts.SEND)

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
                    keys.CHANGED_JOBS,
                    keys.EVENT_FEED,
                    keys.jobs_not_ended(job.owner),
                    keys.jobs_of_owner(job.owner),
                    keys.idempotency_of("" if claim is None else claim.subject),
                ],
                args=[
                    job.id,
                    keys.WAKE,
                    keys.MESSAGE_FIELD,
                    job.model_dump_json(),
                    job.state,
                    job.created_ms,
                    *listing_of(job),
                    "" if claim is None else claim.digest,
                    keys.IDEMPOTENCY_TTL_S,
                    self._quota.not_ended,
                    self._quota.kept,
                    keys.job(""),
                    self._quota.spec_bytes,
                    keys.CLAIMS_KEPT,
                    *_listed(_bodies(event_records(decision, actor))),
                    *_listed(_bodies((creation(job),))),
                    keys.CHANGES_KEPT,
                ],
            )
        self._quota.refuse(status, job.owner)
        self._refuse(status, job.id, told)
        if status == "ok" or claim is None:
            await self._life.begin(job.id)
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
                    keys.CHANGED_JOBS,
                    keys.EVENT_FEED,
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
                    *listing_of(job),
                    *_listed(_bodies(event_records(decision, actor))),
                    *_listed(puts),
                    *_listed(_bodies((creation(job),))),
                    keys.CHANGES_KEPT,
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
        if not _JOB_ID.fullmatch(job_id):  # it could name a key of another kind
            raise _absent(job_id)

        async def read() -> Stored:
            rows = await self._rows([job_id])
            if not rows:
                raise _absent(job_id)
            return await self._read(rows[0])

        return await self._reads.of(job_id, read)

    async def commit(self, change: Change, epoch: int | None = None) -> Stored:
        """See ``JobStore.commit``.

        Who leads splits the record, and from then on a commit writes the parts that it changed. Who
        does not leads none astray: beside a leader of an older version records stay as it reads them.
        """
        job, before = change.decision.job, change.before.job
        doc, changed = split(job, before)
        status, told = await self._commit_as(change, epoch, doc, changed, must_be_split=True)
        if status == "whole":
            doc, changed = (job.model_dump_json(), {}) if epoch is None else split(job, None)
            status, told = await self._commit_as(change, epoch, doc, changed)
        self._quota.refuse(status, job.owner)
        self._refuse(status, job.id, told)
        for key in keys_of_commit(job.id)[:_TYPED]:
            self._clients.unreadable.forget(key)
        stored = Stored(job, int(told))
        self._active.committed(stored, doc)
        if change.deletes is not None:
            await self._forget_more(change.deletes.job.id)
        if job.is_terminal:
            await self._life.end(job.id)
        elif before.is_terminal:
            await self._life.go_on(job.id)
        return stored

    async def _commit_as(
        self,
        change: Change,
        epoch: int | None,
        doc: str,
        parts: Mapping[str, str],
        *,
        must_be_split: bool = False,
    ) -> tuple[str, str]:
        """What the script answers. ``must_be_split``: nothing is written to a record that is whole."""
        job, sends = change.decision.job, change.decision.sends
        inboxes = list(dict.fromkeys(keys.node_inbox(send.node_id) for send in sends))
        puts = [part for c in change.changed_checkpoints for part in (c.id, c.model_dump_json())]
        outgoing = [
            part
            for send in sends
            for part in (str(inboxes.index(keys.node_inbox(send.node_id))), self._json(send))
        ]
        history = _bodies(change.history)
        doomed = change.deletes
        its_own = keys_of_commit(job.id)
        first_inbox = len(its_own) + 1  # as Lua counts
        with answering():
            status, told = await self._commit(
                keys=[
                    *its_own,
                    *inboxes,
                    *([] if doomed is None else keys_of_deletion(doomed.job.id)),
                ],
                args=[
                    change.before.version,
                    "" if epoch is None else epoch,
                    job.id,
                    keys.WAKE,
                    keys.MESSAGE_FIELD,
                    doc,
                    job.fence,
                    job.state,
                    int(job.is_active),
                    keys.EVENTS_KEPT,
                    job.created_ms,
                    *listing_of(job),
                    SPLIT_MARK if must_be_split else "",
                    *_listed([text for part in parts.items() for text in part]),
                    first_inbox,
                    *(
                        _NOTHING_DOOMED
                        if doomed is None
                        else (first_inbox + len(inboxes), doomed.job.id, doomed.version)
                    ),
                    keys.jobs_not_ended(job.owner),
                    self._quota.not_ended if change.begins_again else "",
                    keys.job(""),
                    self._quota.spec_bytes if change.begins_again else "",
                    *_listed(_bodies(change.events)),
                    *_listed(puts),
                    *_listed(list(change.removed_checkpoints)),
                    *_listed(outgoing),
                    _kept_of(history),
                    *_listed(history),
                    self._telemetry_kept_s if job.is_terminal else "",
                    keys.CHANGES_KEPT,
                ],
            )
        return str(status), str(told)

    async def send(self, sends: tuple[Send, ...], epoch: int) -> None:
        """See ``JobStore.send``."""
        with answering():
            status = await self._send(
                keys=[keys.EPOCH, *(keys.node_inbox(send.node_id) for send in sends)],
                args=[epoch, keys.MESSAGE_FIELD, *(self._json(send) for send in sends)],
            )
        self._refuse(status, "", "")

    def _json(self, send: Send) -> str:
        return COMMAND.dump_json(self._names.told(send.command)).decode()

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
        return await self._active.jobs()

    async def page(self, before: Place | None, limit: int) -> list[Stored]:
        """See ``JobStore.page``."""
        found: list[Stored] = []
        count = min(limit, _PAGE)
        while len(found) < limit:
            places = await self._index.places(keys.JOBS, before, count)
            found += await self._load([place.id for place in places])
            if len(places) < count:
                break
            before = places[-1]
            # Of a run of records that cannot be read a few are passed over at a time.
            count = min(max(limit - len(found), _FEW), _PAGE)
        return found[:limit]

    async def summaries(self, among: Among, before: Place | None, limit: int) -> list[JobSummary]:
        """See ``JobStore.summaries``."""
        return await self._index.summaries(among, before, limit)

    async def summaries_of(self, job_ids: Sequence[str]) -> list[JobSummary]:
        """See ``JobStore.summaries_of``."""
        return await self._index.summaries_of(job_ids)

    async def several(self, job_ids: Sequence[str]) -> list[Stored]:
        """See ``JobStore.several``."""
        wanted = set(job_ids)
        known: dict[str, Stored] = {}
        with contextlib.suppress(StoreUnavailableError):  # then they are read as all others are
            known = {s.job.id: s for s in await self._active.jobs() if s.job.id in wanted}
        others = [name for name in job_ids if name not in known]
        known |= {stored.job.id: stored for stored in await self._load(others)}
        return [known[name] for name in job_ids if name in known]

    async def index(self) -> int:
        """See ``JobStore.index``."""
        return await self._index.build()

    async def counts(self) -> dict[JobState, int]:
        """See ``JobStore.counts``."""
        counted = await self._index.counts()
        if counted is not None:
            return counted
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

    async def _load(self, job_ids: Sequence[str]) -> list[Stored]:
        return await self._parsed(await self._rows(job_ids))

    async def _parsed(self, rows: Sequence[Row]) -> list[Stored]:
        """The jobs of rows; those that cannot be read are left out."""
        found: list[Stored] = []
        async for row in in_turns(rows):
            with contextlib.suppress(RecordUnreadableError):
                found.append(await self._read(row))
        return found

    async def _read(self, row: Row) -> Stored:
        """The job of a row.

        Raises:
            RecordUnreadableError: It makes no sense here, and is named as such.
        """
        key = keys.job(row.job_id)
        known = self._known.get(row)
        if known is not None:
            return known
        try:
            stored = await read_by_turns(row, self._known.unchanged(row))
        except RecordUnreadableError as error:
            self._clients.unreadable.note(key, row.version, error.__cause__ or error)
            raise
        self._clients.unreadable.forget(key)
        self._known.put(row, stored)
        return stored

    async def _rows(self, job_ids: Sequence[str]) -> list[Row]:
        found: list[Row] = []
        for start in range(0, len(job_ids), _PAGE):
            names = job_ids[start : start + _PAGE]
            with answering():
                # One transaction: a job and its checkpoints are read as of the same moment.
                async with self._clients.reads.pipeline(transaction=True) as pipe:
                    for name in names:
                        pipe.hmget(keys.job(name), ["doc", "version", *PARTS])
                        pipe.hgetall(keys.job_checkpoints(name))
                    answers = await pipe.execute(raise_on_error=False)
            for name, record, index in zip(names, answers[0::2], answers[1::2], strict=True):
                row = self._row(name, record, index)
                if row is not None:
                    found.append(row)
        return found

    def _row(self, job_id: str, record: Any, index: Any) -> Row | None:  # noqa: ANN401 answers of Redis
        """What is stored of a job, as far as its keys have their types; None for nothing."""
        doc, version, *parts = (None, None) if is_mistyped(record) else record
        if doc is None and not is_mistyped(record):
            return None
        checkpoints = None if is_mistyped(index) else index
        return Row(job_id, doc, version, checkpoints, tuple(parts))

    async def _forget(self, job_id: str, version: str) -> None:
        with answering():
            status, told = await self._delete(
                keys=[keys.ACTIVE_JOBS, *keys_of_deletion(job_id), keys.CHANGED_JOBS],
                args=[version, job_id, keys.CHANGES_KEPT],
            )
        self._refuse(status, job_id, told)
        await self._forget_more(job_id)

    async def _forget_more(self, job_id: str) -> None:
        """Of a deleted job nothing is unreadable any more, nor known, nor are its ranks' reports kept."""
        await self._life.forget(job_id)
        self._known.forget(job_id)
        for key in keys_of_deletion(job_id):
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


def _claimed(claim: Claim, text: str) -> Stored:
    digest, _, doc = text.partition(" ")
    if digest != claim.digest:
        raise KeyReusedError(
            f"Idempotency-Key {claim.key!r} was used for another request; take a new key"
        )
    return read_row(Row("of this Idempotency-Key", doc, "1", {}))


def _absent(job_id: str) -> NotFoundError:
    return NotFoundError(f"there is no job {job_id}")


def _kept_of(history: Sequence[str]) -> int:
    """How many entries are kept behind these."""
    longest = max((len(text.encode()) for text in history), default=1)
    return min(keys.HISTORY_KEPT, max(keys.HISTORY_BYTES // longest, len(history)))


def _bodies(records: Sequence[Record]) -> list[str]:
    return [record.model_dump_json() for record in records]


def _listed(texts: list[str]) -> list[str]:
    """A list as the scripts take it: its length, then its items."""
    return [str(len(texts)), *texts]
