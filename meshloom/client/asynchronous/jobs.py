"""Jobs as objects: submit them, watch them, change their course."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, Self

from meshloom.client.asynchronous.checkpoints import AsyncCheckpoint
from meshloom.client.asynchronous.rest import AsyncRestClient
from meshloom.client.errors import WaitTimeoutError
from meshloom.client.metrics import Metrics
from meshloom.client.progress import shown_progress
from services.contract.api.requests import CloneRequest, JobPatch
from services.contract.api.views import (
    AttemptView,
    DiagnosisView,
    EventView,
    JobView,
    LogView,
    Progress,
    RankView,
    ResumeRequest,
    StopRequest,
)
from services.contract.words.states import TERMINAL_STATES, JobState

CheckpointPolicy = Literal["required", "best_effort", "none"]
"""Whether a stop waits for a checkpoint, takes one if it can, or takes none."""

_RESTING_STATES: Final = TERMINAL_STATES | {JobState.PAUSED}
_POLL_S: Final = 0.5


class AsyncJob:
    """One job, as it was when it was last read.

    Methods that change it answer the job itself, with its new state.

    Attributes:
        view: All that the API tells of it.
    """

    def __init__(self, rest: AsyncRestClient, view: JobView) -> None:
        self._rest = rest
        self.view = view

    def __repr__(self) -> str:
        told = "?" if self.progress.of is None else self.progress.of
        return f"<job {self.id} {self.name!r}, {self.state}, step {self.progress.step}/{told}>"

    @property
    def id(self) -> str:
        """Its id."""
        return self.view.id

    @property
    def name(self) -> str:
        """Its name."""
        return self.view.name

    @property
    def state(self) -> JobState:
        """Where it stood."""
        return self.view.state

    @property
    def reason(self) -> str | None:
        """Why it stood there, in a sentence."""
        return self.view.reason

    @property
    def progress(self) -> Progress:
        """How far it was: step, loss, throughput, ETA."""
        return self.view.progress

    @property
    def has_ended(self) -> bool:
        """Whether it was SUCCEEDED, FAILED or CANCELLED."""
        return self.state in TERMINAL_STATES

    async def refresh(self) -> Self:
        """Read it again."""
        self.view = await self._rest.job(self.id)
        return self

    async def wait(self, *, timeout_s: float | None = None, poll_s: float = _POLL_S) -> Self:
        """Wait until it has ended or is paused, and read it.

        Args:
            timeout_s: Seconds; None: as long as it takes.
            poll_s: Seconds between two looks.

        Raises:
            WaitTimeoutError: It still runs. It goes on.
        """
        async for _ in self._looks(timeout_s, poll_s):
            pass
        return self

    async def watch(self, *, timeout_s: float | None = None, poll_s: float = _POLL_S) -> Self:
        """As ``wait``, and show its progress: in a notebook as one line that changes.

        Elsewhere each change of its state is printed as a line.
        """
        with shown_progress() as show:
            async for _ in self._looks(timeout_s, poll_s):
                show(self.view)
        return self

    async def metrics(
        self, *, max_points: int = 1000, from_step: int = 0, to_step: int | None = None
    ) -> Metrics:
        """Its steps, with the user's metrics, at most ``max_points`` (2 to 10 000) of them."""
        return Metrics(
            await self._rest.metrics(
                self.id, max_points=max_points, from_step=from_step, to_step=to_step
            )
        )

    async def logs(  # noqa: PLR0913 one parameter a filter
        self,
        *,
        follow: bool = False,
        rank: int | None = None,
        stream: Literal["stdout", "stderr"] | None = None,
        level: Literal["debug", "info", "warning", "error"] | None = None,
        text: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> AsyncIterator[LogView]:
        """What its ranks wrote, oldest first.

        Args:
            follow: Go on as lines come, until the job has ended.
            rank: Only this one's.
            stream: Only this one.
            level: This one and worse.
            text: Only lines with this text.
            since: Only lines of this time and later; it has a time zone.
            until: Only lines before this time; it has a time zone.
        """
        given = {"rank": rank, "stream": stream, "level": level, "text": text}
        filters = {name: value for name, value in given.items() if value is not None}
        for name, moment in (("since", since), ("until", until)):
            if moment is not None:
                filters[name] = moment.isoformat()
        read = self._rest.follow_logs if follow else self._rest.logs
        async for line in read(self.id, **filters):
            yield line

    async def events(
        self, *, follow: bool = False, after: str | None = None
    ) -> AsyncIterator[EventView]:
        """What happened to it, oldest first.

        Args:
            follow: Go on as events come, until the job has ended.
            after: Begin behind the event of this id.
        """
        if follow:
            async for event in self._rest.follow_events(self.id, last_id=after):
                yield event
            return
        while True:
            page = await self._rest.events(self.id, cursor=after)
            for event in page.items:
                yield event
            if page.next_cursor is None:
                return
            after = page.next_cursor

    async def ranks(self) -> Sequence[RankView]:
        """The ranks of its newest attempt."""
        return (await self._rest.ranks(self.id)).items

    async def attempts(self) -> Sequence[AttemptView]:
        """Its tries, oldest first."""
        return (await self._rest.attempts(self.id)).items

    async def diagnosis(self) -> DiagnosisView:
        """The verdict on its newest attempt that failed or was inspected."""
        return await self._rest.diagnosis(self.id)

    async def checkpoints(self) -> Sequence[AsyncCheckpoint]:
        """Its checkpoints, newest first."""
        found = await self._rest.checkpoints(self.id)
        return [AsyncCheckpoint(self._rest, view) for view in found.items]

    async def take_checkpoint(self) -> None:
        """Ask for a checkpoint at the next step on which the ranks agree."""
        await self._rest.take_checkpoint(self.id)

    async def pause(
        self, *, checkpoint: CheckpointPolicy = "best_effort", grace_s: float = 60.0
    ) -> Self:
        """Stop it so that ``resume`` continues it.

        Args:
            checkpoint: Whether it takes one before.
            grace_s: Seconds until ranks that still run are killed.
        """
        stop = StopRequest(checkpoint=checkpoint, grace_s=grace_s)
        self.view = await self._rest.pause(self.id, stop)
        return self

    async def cancel(
        self, *, checkpoint: CheckpointPolicy = "best_effort", grace_s: float = 60.0
    ) -> Self:
        """Stop it for good; arguments as of ``pause``."""
        stop = StopRequest(checkpoint=checkpoint, grace_s=grace_s)
        self.view = await self._rest.cancel(self.id, stop)
        return self

    async def kill(self) -> Self:
        """Stop it at once, without a checkpoint."""
        self.view = await self._rest.kill(self.id)
        return self

    async def resume(self, *, from_checkpoint: str | None = None) -> Self:
        """Go on from a checkpoint of it; from the latest committed one if none is named."""
        wanted = ResumeRequest(from_checkpoint=from_checkpoint)
        self.view = await self._rest.resume(self.id, wanted)
        return self

    async def clone(
        self,
        overrides: Mapping[str, Any] | None = None,
        *,
        from_checkpoint: str | None = None,
        idempotency_key: str | None = None,
    ) -> Self:
        """Submit another job of the same spec, and answer that one.

        Args:
            overrides: A JSON merge patch on the spec.
            from_checkpoint: A committed checkpoint of this job, ``latest`` or ``best``; None: from step 0.
            idempotency_key: The same key clones only once.
        """
        body = {"overrides": dict(overrides or {}), "from_checkpoint": from_checkpoint}
        wanted = CloneRequest.model_validate(body)
        view = await self._rest.clone(self.id, wanted, idempotency_key=idempotency_key)
        return type(self)(self._rest, view)

    async def patch(self, **changes: Any) -> Self:  # noqa: ANN401 checked by the model
        """Change ``priority``, ``labels``, ``checkpoint``, ``faults`` or ``resources``.

        Example:
            >>> await job.patch(priority=5, labels={"team": "vision"})  # doctest: +SKIP
        """
        self.view = await self._rest.patch(self.id, JobPatch.model_validate(changes))
        return self

    async def delete(self, *, purge_checkpoints: bool = False) -> bool:
        """Delete it, ended as it is; False while its checkpoints are still being removed."""
        return await self._rest.delete(self.id, purge_checkpoints=purge_checkpoints)

    async def _looks(self, timeout_s: float | None, poll_s: float) -> AsyncIterator[None]:
        """One look after another, the last once the job rests."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            await self.refresh()
            yield
            if self.state in _RESTING_STATES:
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"{self.id} is {self.state} after {timeout_s:g} s, at step "
                    f"{self.progress.step}; it goes on"
                )
            await asyncio.sleep(poll_s)


class AsyncJobs:
    """All jobs: ``client.jobs``."""

    def __init__(self, rest: AsyncRestClient) -> None:
        self._rest = rest

    async def submit(
        self, spec: Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> AsyncJob:
        """Submit a job.

        Args:
            spec: As in a YAML file; or ``{"plan_id": …}`` for a plan that was made.
            idempotency_key: With the same key and spec again, the same job is answered.

        Raises:
            RefusedError: The spec has faults; ``problem.errors`` names all of them.
        """
        view = await self._rest.submit(spec, idempotency_key=idempotency_key)
        return AsyncJob(self._rest, view)

    async def check(self, spec: Mapping[str, Any]) -> JobView:
        """What ``submit`` would make of a spec; nothing is kept. Raises RefusedError."""
        return await self._rest.submit(spec, dry_run=True)

    async def get(self, job_id: str) -> AsyncJob:
        """One job."""
        return AsyncJob(self._rest, await self._rest.job(job_id))

    async def list(
        self,
        *,
        state: Sequence[JobState | str] = (),
        label: Sequence[str] = (),
        owner: str | None = None,
        q: str | None = None,
        sort: str = "-created",
        limit: int | None = 50,
    ) -> Sequence[AsyncJob]:
        """Jobs, the newest first.

        Args:
            state: In any of these states.
            label: With all of these, each ``key`` or ``key=value``.
            owner: Only this subject's.
            q: Only those with this text in id or name.
            sort: ``created``, ``updated`` or ``priority``; with ``-`` the highest first.
            limit: So many at most; None: all.
        """
        asked = {"state": list(state), "label": list(label), "owner": owner, "q": q, "sort": sort}
        return [
            AsyncJob(self._rest, view) async for view in self._rest.all_jobs(limit=limit, **asked)
        ]
