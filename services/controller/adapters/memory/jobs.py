"""Jobs in memory. No method awaits between its look and its write: each is one transaction."""

from collections.abc import Sequence

from services.contract.redis import redis_keys as keys
from services.contract.words.states import JobState
from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.decisions.history import HistoryEntry, creation
from services.controller.domain.errors import KeyReusedError, NotFoundError, StaleWriteError
from services.controller.domain.job.effects import Decision, Send
from services.controller.domain.job.job import Job
from services.controller.ports.event_feed import FeedEntry
from services.controller.ports.jobs import (
    DEFAULT_QUOTA,
    Actor,
    Among,
    Change,
    Claim,
    EventRecord,
    JobSummary,
    Place,
    Quota,
    Stored,
    event_records,
)
from services.controller.ports.machines import Log


class MemoryJobs:
    """The port ``JobStore``."""

    def __init__(self, server: MemoryServer, quota: Quota = DEFAULT_QUOTA) -> None:
        self._server = server
        self._quota = quota

    async def create(self, decision: Decision, actor: Actor, claim: Claim | None) -> Stored:
        """See ``JobStore.create``."""
        if claim is not None:
            earlier = await self.claimed(claim)
            if earlier is not None:
                return earlier
        kept, not_ended, spec_bytes = self._jobs_of(decision.job)
        self._quota.refuse(self._quota.exceeded_by(not_ended, kept, spec_bytes), decision.job.owner)
        stored = Stored(decision.job, 1)
        self._server.jobs[decision.job.id] = stored
        if claim is not None:
            self._server.claims[claim.subject, claim.key] = (claim, stored)
            own = [made for made in self._server.claims if made[0] == claim.subject]
            for oldest in own[: -keys.CLAIMS_KEPT]:
                del self._server.claims[oldest]
        self._log(decision.job, event_records(decision, actor), (creation(decision.job),))
        await self._server.wake()
        return stored

    async def claimed(self, claim: Claim) -> Stored | None:
        """See ``JobStore.claimed``."""
        known = self._server.claims.get((claim.subject, claim.key))
        if known is None:
            return None
        if known[0].digest != claim.digest:
            raise KeyReusedError(f"Idempotency-Key {claim.key!r} was used for another request")
        return known[1]

    async def restore(self, decision: Decision, actor: Actor, epoch: int) -> bool:
        """See ``JobStore.restore``."""
        self._server.refuse_deposed(epoch)
        job = decision.job
        if job.id in self._server.jobs or job.id in self._server.deleted:
            return False
        self._server.jobs[job.id] = Stored(job, 1)
        self._log(job, event_records(decision, actor), (creation(job),))
        await self._server.wake()
        return True

    async def was_deleted(self, job_id: str) -> bool:
        """See ``JobStore.was_deleted``."""
        return job_id in self._server.deleted

    async def load(self, job_id: str) -> Stored:
        """See ``JobStore.load``."""
        if job_id not in self._server.jobs:
            raise NotFoundError(f"there is no job {job_id}")
        return self._server.jobs[job_id]

    async def commit(self, change: Change, epoch: int | None = None) -> Stored:
        """See ``JobStore.commit``."""
        self._server.refuse_deposed(epoch)
        job = change.decision.job
        known = await self.load(job.id)
        if known.version != change.before.version or known.job.fence > job.fence:
            raise StaleWriteError(f"job {job.id} changed meanwhile")
        if change.begins_again:
            _, not_ended, spec_bytes = self._jobs_of(known.job)
            self._quota.refuse(self._quota.exceeded_by(not_ended, spec_bytes=spec_bytes), job.owner)
        if change.deletes is not None:
            await self.delete(change.deletes)
        stored = Stored(job, known.version + 1)
        self._server.jobs[job.id] = stored
        self._log(job, change.events, change.history)
        self._server.deliver(change.decision.sends)
        await self._server.wake()
        return stored

    def _jobs_of(self, further: Job) -> tuple[int, int, int]:
        """How many its owner has, how many of them have not ended, and the bytes of their specs with its own."""
        jobs = [s.job for s in self._server.jobs.values() if s.job.owner == further.owner]
        not_ended = [job for job in jobs if not job.is_terminal]
        return len(jobs), len(not_ended), sum(map(_spec_bytes, [*not_ended, further]))

    async def send(self, sends: tuple[Send, ...], epoch: int) -> None:
        """See ``JobStore.send``."""
        self._server.refuse_deposed(epoch)
        self._server.deliver(sends)
        await self._server.wake()

    async def delete(self, stored: Stored) -> None:
        """See ``JobStore.delete``."""
        job_id = stored.job.id
        known = self._server.jobs.get(job_id)
        if known is None or known.version != stored.version:
            raise StaleWriteError(f"job {job_id} changed meanwhile")
        await self.delete_unread(job_id)

    async def delete_unread(self, job_id: str) -> None:
        """See ``JobStore.delete_unread``."""
        job = (await self.load(job_id)).job
        del self._server.jobs[job_id]
        if job.fence:
            self._server.deleted.add(job_id)
        for log in Log:
            self._server.logs.pop((job_id, log), None)
        self._server.samples.pop(job_id, None)
        self._server.steps.pop(job_id, None)
        self._server.metrics.pop(job_id, None)
        self._server.stacks.pop(job_id, None)

    async def active(self) -> list[Stored]:
        """See ``JobStore.active``."""
        everything = sorted(self._server.jobs.values(), key=lambda stored: stored.job.id)
        return [stored for stored in everything if stored.job.is_active]

    async def page(self, before: Place | None, limit: int) -> list[Stored]:
        """See ``JobStore.page``."""
        by_place = {Place(s.job.created_ms, s.job.id): s for s in self._server.jobs.values()}
        places = sorted((p for p in by_place if before is None or p < before), reverse=True)
        return [by_place[place] for place in places[:limit]]

    async def summaries(self, among: Among, before: Place | None, limit: int) -> list[JobSummary]:
        """See ``JobStore.summaries``."""
        found = await self.page(before, len(self._server.jobs))
        states = among.states or set(JobState)
        return [JobSummary.of(s.job) for s in found if s.job.state in states][:limit]

    async def summaries_of(self, job_ids: Sequence[str]) -> list[JobSummary]:
        """See ``JobStore.summaries_of``."""
        return [JobSummary.of(stored.job) for stored in await self.several(job_ids)]

    async def several(self, job_ids: Sequence[str]) -> list[Stored]:
        """See ``JobStore.several``."""
        return [self._server.jobs[name] for name in job_ids if name in self._server.jobs]

    async def index(self) -> int:
        """See ``JobStore.index``."""
        return 0

    async def counts(self) -> dict[JobState, int]:
        """See ``JobStore.counts``."""
        totals = dict.fromkeys(JobState, 0)
        for stored in self._server.jobs.values():
            totals[stored.job.state] += 1
        return totals

    def _log(
        self, job: Job, events: tuple[EventRecord, ...], history: tuple[HistoryEntry, ...]
    ) -> None:
        for log, records in ((Log.EVENTS, events), (Log.HISTORY, history)):
            self._server.logs[job.id, log] += [
                self._server.entry(record.model_dump_json()) for record in records
            ]
        for entry in map(self._server.entry, (record.model_dump_json() for record in events)):
            self._server.feed.append(FeedEntry(entry.id, entry.body, job.id))


def _spec_bytes(job: Job) -> int:
    return len(job.model_dump_json(include={"spec", "asked"}).encode())
