"""The REST API, one method an endpoint: bodies and answers are the contract's own."""

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import httpx
from pydantic import BaseModel

from meshloom.client.answers import parsed
from meshloom.client.asynchronous.transport import AsyncTransport
from meshloom.client.downloads import PartialFile
from meshloom.client.errors import refusal
from services.contract.api.access import AuditPage, TokenCreated, TokenList, TokenRequest
from services.contract.api.plan_views import PlanList, PlanView
from services.contract.api.queue import CapacityView, DrainRequest, PoolList, QueueView
from services.contract.api.requests import CloneRequest, JobPatch
from services.contract.api.views import (
    AttemptList,
    CheckpointList,
    CheckpointView,
    CodeView,
    DiagnosisView,
    EventPage,
    EventView,
    Health,
    JobPage,
    JobView,
    LogPage,
    LogView,
    MetricsPart,
    MetricsView,
    NodeList,
    NodeView,
    RankList,
    ResumeRequest,
    StopRequest,
    UnreadableList,
    Version,
)
from services.contract.api.webhooks import WebhookCreated, WebhookList, WebhookRequest
from services.contract.jobs.code_archives import digest_of
from services.contract.jobs.traces import TraceList, TraceRequest, TraceView
from services.contract.storage.exports import ExportManifest

_NO_CONTENT: Final = 204
_LARGEST_PAGE: Final = 200
_LARGEST_PAGE_OF_NODES: Final = 1000
_PLANNED_WITHIN_S: Final = 90.0
_KEPT_WITHIN_S: Final = 120.0
_UPLOADING_PATIENCE_S: Final = 30.0


class AsyncRestClient(AsyncTransport):
    """Every endpoint as one method. ``AsyncClient`` has jobs and checkpoints as objects instead.

    Methods raise ``UnreachableError`` if nobody answers, and ``RefusedError`` with the problem if
    the controller refuses. ``Mapping`` bodies are sent as JSON, and checked by the controller.
    """

    async def submit(
        self, spec: Mapping[str, Any], *, idempotency_key: str | None = None, dry_run: bool = False
    ) -> JobView:
        """Submit a job; with the same key and spec again, the same job is answered.

        ``{"plan_id": …}`` in place of a spec runs that very plan.
        """
        response = await self.request(
            "POST",
            "/v1/jobs",
            json=dict(spec),
            params={"dry_run": "true"} if dry_run else {},
            headers={"Idempotency-Key": idempotency_key or secrets.token_hex(16)},
        )
        return parsed(response, JobView)

    async def upload_code(self, body: bytes) -> tuple[CodeView, bool]:
        """Upload an archive unless it is there; answers what is kept, and whether it was sent."""
        path = f"/v1/code/{digest_of(body)}"
        known = await self.send("GET", path)
        if known.status_code == httpx.codes.OK:
            return parsed(known, CodeView), False
        if known.status_code != httpx.codes.NOT_FOUND:
            raise refusal(known)
        response = await self.request(
            "PUT",
            path,
            content=body,
            headers={"Content-Type": "application/gzip"},
            # Its turn may come late, and it is judged before it is answered.
            read_timeout_s=_KEPT_WITHIN_S,
            patience_s=_UPLOADING_PATIENCE_S,
        )
        return parsed(response, CodeView), True

    async def plan(self, spec: Mapping[str, Any], *, fresh: bool = False) -> PlanView:
        """Have a plan made for a spec; it may still be PROBING. ``fresh``: profile again."""
        params = {"fresh": "true"} if fresh else {}
        response = await self.request(
            "POST",
            "/v1/plans",
            json=dict(spec),
            params=params,
            # The controller may wait for the profile, longer than for other answers.
            read_timeout_s=_PLANNED_WITHIN_S,
        )
        return parsed(response, PlanView)

    async def plans(self, *, limit: int = 50, **filters: str) -> PlanList:
        """Plans, newest first; ``filters`` are ``state``, ``owner`` and ``cursor``."""
        return await self.get("/v1/plans", PlanList, {"limit": limit, **filters})

    async def get_plan(self, plan_id: str) -> PlanView:
        """One plan."""
        return await self.get(f"/v1/plans/{plan_id}", PlanView)

    async def clone(
        self,
        job_id: str,
        wanted: CloneRequest,
        *,
        idempotency_key: str | None = None,
        dry_run: bool = False,
    ) -> JobView:
        """Submit another job of the same spec; with the same key again, the same one is answered."""
        response = await self.request(
            "POST",
            f"/v1/jobs/{job_id}/clone",
            json=wanted.model_dump(mode="json", exclude_defaults=True),
            params={"dry_run": "true"} if dry_run else {},
            headers={"Idempotency-Key": idempotency_key or secrets.token_hex(16)},
        )
        return parsed(response, JobView)

    async def patch(self, job_id: str, patch: JobPatch) -> JobView:
        """Change a job as it is now; refused (412) if somebody else changes it meanwhile."""
        path = f"/v1/jobs/{job_id}"
        seen = await self.request("GET", path)
        response = await self.request(
            "PATCH",
            path,
            json=patch.model_dump(mode="json", exclude_unset=True),
            # Where something on the way drops it, the controller refuses the change.
            headers={"If-Match": seen.headers.get("ETag", '""')},
        )
        return parsed(response, JobView)

    async def delete(self, job_id: str, *, purge_checkpoints: bool = False) -> bool:
        """Delete a finished job; False while its checkpoints are still being removed."""
        params = {"purge_checkpoints": "true"} if purge_checkpoints else {}
        response = await self.request("DELETE", f"/v1/jobs/{job_id}", params=params)
        return response.status_code == _NO_CONTENT

    async def jobs(self, *, limit: int = 50, **filters: str) -> JobPage:
        """The newest jobs; or as in the API: ``state``, ``label``, ``owner``, ``q``, ``sort``."""
        return await self.get("/v1/jobs", JobPage, {"limit": limit, **filters})

    async def all_jobs(
        self, *, limit: int | None = None, **filters: str | list[str] | None
    ) -> AsyncIterator[JobView]:
        """As ``jobs``, page after page, at most ``limit`` of them; a filter may be a list."""
        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            size = _LARGEST_PAGE if left is None else min(left, _LARGEST_PAGE)
            asked = {"limit": size, "cursor": cursor, **filters}
            page = await self.get("/v1/jobs", JobPage, asked)
            for job in page.items:
                yield job
            if page.next_cursor is None:
                return
            left = None if left is None else left - len(page.items)
            cursor = page.next_cursor

    async def job(self, job_id: str) -> JobView:
        """One job."""
        return await self.get(f"/v1/jobs/{job_id}", JobView)

    async def ranks(self, job_id: str) -> RankList:
        """The ranks of its newest attempt."""
        return await self.get(f"/v1/jobs/{job_id}/ranks", RankList)

    async def diagnose(self, job_id: str) -> None:
        """Have its running ranks inspected."""
        await self._act(job_id, "diagnose", None)

    async def diagnosis(self, job_id: str) -> DiagnosisView:
        """The verdict on its newest attempt that failed or was inspected."""
        return await self.get(f"/v1/jobs/{job_id}/diagnosis", DiagnosisView)

    async def attempts(self, job_id: str) -> AttemptList:
        """Its tries."""
        return await self.get(f"/v1/jobs/{job_id}/attempts", AttemptList)

    async def metrics(
        self,
        job_id: str,
        *,
        max_points: int = 1000,
        from_step: int = 0,
        to_step: int | None = None,
    ) -> MetricsView:
        """Its steps, at most ``max_points`` (2 to 10 000) of them, thinned out evenly."""
        asked = {"max_points": max_points, "from_step": from_step, "to_step": to_step}
        return await self.get(f"/v1/jobs/{job_id}/metrics", MetricsView, asked)

    async def some_metrics(
        self, job_id: str, names: Sequence[str], *, max_points: int = 1000
    ) -> MetricsPart:
        """Those of these names."""
        asked = {"name": list(names), "max_points": max_points}
        return await self.get(f"/v1/jobs/{job_id}/metrics", MetricsPart, asked)

    async def record_trace(self, job_id: str, wanted: TraceRequest) -> TraceView:
        """Have ranks record their next steps."""
        response = await self.request(
            "POST", f"/v1/jobs/{job_id}/traces", json=wanted.model_dump(mode="json")
        )
        return parsed(response, TraceView)

    async def trace(self, job_id: str, trace_id: str) -> TraceView:
        """One trace."""
        return await self.get(f"/v1/jobs/{job_id}/traces/{trace_id}", TraceView)

    async def traces(self, job_id: str) -> TraceList:
        """Its newest traces, newest first."""
        return await self.get(f"/v1/jobs/{job_id}/traces", TraceList)

    async def checkpoints(self, job_id: str) -> CheckpointList:
        """Its checkpoints, newest first."""
        return await self.get(f"/v1/jobs/{job_id}/checkpoints", CheckpointList)

    async def checkpoint(self, checkpoint_id: str) -> CheckpointView:
        """One checkpoint."""
        return await self.get(f"/v1/checkpoints/{checkpoint_id}", CheckpointView)

    async def verify(self, checkpoint_id: str) -> CheckpointView:
        """Have a node read every file of it."""
        return await self._keep("POST", checkpoint_id, "/verify")

    async def export(self, checkpoint_id: str) -> CheckpointView:
        """Have a node put its model together as safetensors files."""
        return await self._keep("POST", checkpoint_id, "/export")

    async def export_files(self, checkpoint_id: str) -> ExportManifest:
        """The files of its export, with sizes and digests."""
        return await self.get(f"/v1/checkpoints/{checkpoint_id}/files", ExportManifest)

    async def download(self, checkpoint_id: str, name: str, file: PartialFile) -> None:
        """Download a file of its export, or what is missing of it."""
        await self.fetch(f"/v1/checkpoints/{checkpoint_id}/files/{name}", file)

    async def pin(self, checkpoint_id: str, *, keep: bool = True) -> CheckpointView:
        """Keep it whatever retention says, or no longer."""
        return await self._keep("POST", checkpoint_id, "/pin" if keep else "/unpin")

    async def remove_checkpoint(self, checkpoint_id: str) -> CheckpointView:
        """Delete it, if nothing needs it."""
        return await self._keep("DELETE", checkpoint_id, "")

    async def events(
        self, job_id: str, *, limit: int = 200, cursor: str | None = None
    ) -> EventPage:
        """What happened to it."""
        asked = {"limit": limit, "cursor": cursor}
        return await self.get(f"/v1/jobs/{job_id}/events", EventPage, asked)

    async def nodes(self) -> NodeList:
        """All nodes, by name."""
        page = await self.get("/v1/nodes", NodeList, {"limit": _LARGEST_PAGE_OF_NODES})
        found = page.items
        while page.next_cursor is not None:
            asked = {"limit": _LARGEST_PAGE_OF_NODES, "cursor": page.next_cursor}
            page = await self.get("/v1/nodes", NodeList, asked)
            found += page.items
        return NodeList(items=found)

    async def node(self, node_id: str) -> NodeView:
        """One node."""
        return await self.get(f"/v1/nodes/{node_id}", NodeView)

    async def queue(self) -> QueueView:
        """Who waits for slots, and why."""
        return await self.get("/v1/queue", QueueView)

    async def pools(self) -> PoolList:
        """See ``GET /v1/pools``."""
        return await self.get("/v1/pools", PoolList)

    async def capacity(self) -> CapacityView:
        """Which slots are free."""
        return await self.get("/v1/capacity", CapacityView)

    async def drain(self, node_id: str, how: DrainRequest) -> NodeView:
        """Have a node's gangs checkpoint and move, and place no more there."""
        body = how.model_dump(mode="json")
        response = await self.request("POST", f"/v1/nodes/{node_id}/drain", json=body)
        return parsed(response, NodeView)

    async def forget(self, node_id: str) -> None:
        """Delete the record of a lost node."""
        await self.request("DELETE", f"/v1/nodes/{node_id}")

    async def undrain(self, node_id: str) -> NodeView:
        """Have gangs placed on the node again."""
        response = await self.request("POST", f"/v1/nodes/{node_id}/undrain")
        return parsed(response, NodeView)

    async def version(self) -> Version:
        """Which build answers."""
        return await self.get("/version", Version)

    async def unreadable(self, *, limit: int = 100) -> UnreadableList:
        """Records that the controller cannot read; only who operates it may ask."""
        return await self.get("/v1/unreadable", UnreadableList, {"limit": limit})

    async def readiness(self) -> Health:
        """Whether the controller and its Redis can serve, and if not, what is wrong."""
        response = await self.send("GET", "/readyz", patience_s=0)
        return parsed(response, Health)

    async def cancel(self, job_id: str, stop: StopRequest) -> JobView:
        """Stop the job for good, after a checkpoint as asked."""
        return await self._act(job_id, "cancel", stop)

    async def pause(self, job_id: str, stop: StopRequest) -> JobView:
        """Stop the job so that ``resume`` continues it."""
        return await self._act(job_id, "pause", stop)

    async def resume(self, job_id: str, resume: ResumeRequest) -> JobView:
        """Go on from a checkpoint."""
        return await self._act(job_id, "resume", resume)

    async def kill(self, job_id: str) -> JobView:
        """Stop the job at once, without a checkpoint."""
        return await self._act(job_id, "kill", None)

    async def take_checkpoint(self, job_id: str) -> None:
        """Ask for a checkpoint at the next agreed step."""
        await self.request("POST", f"/v1/jobs/{job_id}/checkpoints")

    async def create_token(self, wanted: TokenRequest) -> TokenCreated:
        """Make a token; the answer is the only place where its secret stands."""
        response = await self.request("POST", "/v1/tokens", json=wanted.model_dump(mode="json"))
        return parsed(response, TokenCreated)

    async def tokens(self) -> TokenList:
        """All tokens."""
        return await self.get("/v1/tokens", TokenList)

    async def revoke_token(self, token_id: str) -> None:
        """Revoke a token."""
        await self.request("DELETE", f"/v1/tokens/{token_id}")

    async def create_webhook(self, wanted: WebhookRequest) -> WebhookCreated:
        """Have events sent to a URL; the answer is the only place where its secret stands."""
        response = await self.request("POST", "/v1/webhooks", json=wanted.model_dump(mode="json"))
        return parsed(response, WebhookCreated)

    async def webhooks(self) -> WebhookList:
        """One's own webhooks; for an operator all."""
        return await self.get("/v1/webhooks", WebhookList)

    async def remove_webhook(self, webhook_id: str) -> None:
        """Remove a webhook."""
        await self.request("DELETE", f"/v1/webhooks/{webhook_id}")

    async def audit(self, *, limit: int = 100) -> AuditPage:
        """The newest requests that changed something or were refused."""
        return await self.get("/v1/audit", AuditPage, {"limit": limit})

    async def logs(self, job_id: str, **filters: str | int) -> AsyncIterator[LogView]:
        """Its output so far; filters as in the API, such as ``rank``, ``text`` or ``since``."""
        cursor: dict[str, str] = {}
        while True:
            response = await self.request(
                "GET", f"/v1/jobs/{job_id}/logs", params={**filters, **cursor}
            )
            page = parsed(response, LogPage)
            for line in page.items:
                yield line
            if page.next_cursor is None or not page.items:
                return
            cursor = {"cursor": page.next_cursor}

    async def follow_logs(self, job_id: str, **filters: str | int) -> AsyncIterator[LogView]:
        """Its output as it comes, from the beginning; ends when the job has ended."""
        params = {"follow": "true", **filters}
        async for line in self.follow(f"/v1/jobs/{job_id}/logs", LogView, params):
            yield line

    async def follow_events(
        self, job_id: str, *, last_id: str | None = None
    ) -> AsyncIterator[EventView]:
        """What happens to a job, behind ``last_id``; ends when the job has ended."""
        async for event in self.follow(f"/v1/jobs/{job_id}/events", EventView, {}, last_id):
            yield event

    async def all_events(
        self, *, limit: int = 200, cursor: str | None = None, **filters: str | list[str] | None
    ) -> EventPage:
        """Events of all jobs, oldest first; ``kind``, ``job_id``, ``owner``, ``label`` as in the API."""
        asked = {"limit": limit, "cursor": cursor, **filters}
        return await self.get("/v1/events", EventPage, asked)

    async def follow_all_events(
        self, *, last_id: str | None = None, **filters: str | list[str]
    ) -> AsyncIterator[EventView]:
        """Events of all jobs as they come, behind ``last_id`` or from now on; it does not end.

        With ``replay="true"`` it begins with the oldest that is kept.
        """
        async for event in self.follow("/v1/events", EventView, filters, last_id):
            yield event

    async def _act(self, job_id: str, verb: str, body: BaseModel | None) -> JobView:
        content = None if body is None else body.model_dump(mode="json", exclude_none=True)
        response = await self.request("POST", f"/v1/jobs/{job_id}/{verb}", json=content)
        return parsed(response, JobView)

    async def _keep(self, method: str, checkpoint_id: str, verb: str) -> CheckpointView:
        response = await self.request(method, f"/v1/checkpoints/{checkpoint_id}{verb}")
        return parsed(response, CheckpointView)
