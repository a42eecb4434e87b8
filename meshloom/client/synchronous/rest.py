"""The REST API, one method an endpoint: bodies and answers are the contract's own."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import httpx
from pydantic import BaseModel

from meshloom.client.answers import parsed
from meshloom.client.downloads import PartialFile
from meshloom.client.errors import refusal
from meshloom.client.synchronous.transport import Transport
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


class RestClient(Transport):
    """Every endpoint as one method. ``Client`` has jobs and checkpoints as objects instead.

    Methods raise ``UnreachableError`` if nobody answers, and ``RefusedError`` with the problem if
    the controller refuses. ``Mapping`` bodies are sent as JSON, and checked by the controller.
    """

    def submit(
        self, spec: Mapping[str, Any], *, idempotency_key: str | None = None, dry_run: bool = False
    ) -> JobView:
        """Submit a job; with the same key and spec again, the same job is answered.

        ``{"plan_id": …}`` in place of a spec runs that very plan.
        """
        response = self.request(
            "POST",
            "/v1/jobs",
            json=dict(spec),
            params={"dry_run": "true"} if dry_run else {},
            headers={"Idempotency-Key": idempotency_key or secrets.token_hex(16)},
        )
        return parsed(response, JobView)

    def upload_code(self, body: bytes) -> tuple[CodeView, bool]:
        """Upload an archive unless it is there; answers what is kept, and whether it was sent."""
        path = f"/v1/code/{digest_of(body)}"
        known = self.send("GET", path)
        if known.status_code == httpx.codes.OK:
            return parsed(known, CodeView), False
        if known.status_code != httpx.codes.NOT_FOUND:
            raise refusal(known)
        response = self.request(
            "PUT",
            path,
            content=body,
            headers={"Content-Type": "application/gzip"},
            # Its turn may come late, and it is judged before it is answered.
            read_timeout_s=_KEPT_WITHIN_S,
            patience_s=_UPLOADING_PATIENCE_S,
        )
        return parsed(response, CodeView), True

    def plan(self, spec: Mapping[str, Any], *, fresh: bool = False) -> PlanView:
        """Have a plan made for a spec; it may still be PROBING. ``fresh``: profile again."""
        params = {"fresh": "true"} if fresh else {}
        response = self.request(
            "POST",
            "/v1/plans",
            json=dict(spec),
            params=params,
            # The controller may wait for the profile, longer than for other answers.
            read_timeout_s=_PLANNED_WITHIN_S,
        )
        return parsed(response, PlanView)

    def plans(self, *, limit: int = 50, **filters: str) -> PlanList:
        """Plans, newest first; ``filters`` are ``state``, ``owner`` and ``cursor``."""
        return self.get("/v1/plans", PlanList, {"limit": limit, **filters})

    def get_plan(self, plan_id: str) -> PlanView:
        """One plan."""
        return self.get(f"/v1/plans/{plan_id}", PlanView)

    def clone(
        self,
        job_id: str,
        wanted: CloneRequest,
        *,
        idempotency_key: str | None = None,
        dry_run: bool = False,
    ) -> JobView:
        """Submit another job of the same spec; with the same key again, the same one is answered."""
        response = self.request(
            "POST",
            f"/v1/jobs/{job_id}/clone",
            json=wanted.model_dump(mode="json", exclude_defaults=True),
            params={"dry_run": "true"} if dry_run else {},
            headers={"Idempotency-Key": idempotency_key or secrets.token_hex(16)},
        )
        return parsed(response, JobView)

    def patch(self, job_id: str, patch: JobPatch) -> JobView:
        """Change a job as it is now; refused (412) if somebody else changes it meanwhile."""
        path = f"/v1/jobs/{job_id}"
        seen = self.request("GET", path)
        response = self.request(
            "PATCH",
            path,
            json=patch.model_dump(mode="json", exclude_unset=True),
            # Where something on the way drops it, the controller refuses the change.
            headers={"If-Match": seen.headers.get("ETag", '""')},
        )
        return parsed(response, JobView)

    def delete(self, job_id: str, *, purge_checkpoints: bool = False) -> bool:
        """Delete a finished job; False while its checkpoints are still being removed."""
        params = {"purge_checkpoints": "true"} if purge_checkpoints else {}
        response = self.request("DELETE", f"/v1/jobs/{job_id}", params=params)
        return response.status_code == _NO_CONTENT

    def jobs(self, *, limit: int = 50, **filters: str) -> JobPage:
        """The newest jobs; or as in the API: ``state``, ``label``, ``owner``, ``q``, ``sort``."""
        return self.get("/v1/jobs", JobPage, {"limit": limit, **filters})

    def all_jobs(
        self, *, limit: int | None = None, **filters: str | list[str] | None
    ) -> Iterator[JobView]:
        """As ``jobs``, page after page, at most ``limit`` of them; a filter may be a list."""
        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            size = _LARGEST_PAGE if left is None else min(left, _LARGEST_PAGE)
            asked = {"limit": size, "cursor": cursor, **filters}
            page = self.get("/v1/jobs", JobPage, asked)
            for job in page.items:
                yield job
            if page.next_cursor is None:
                return
            left = None if left is None else left - len(page.items)
            cursor = page.next_cursor

    def job(self, job_id: str) -> JobView:
        """One job."""
        return self.get(f"/v1/jobs/{job_id}", JobView)

    def ranks(self, job_id: str) -> RankList:
        """The ranks of its newest attempt."""
        return self.get(f"/v1/jobs/{job_id}/ranks", RankList)

    def diagnose(self, job_id: str) -> None:
        """Have its running ranks inspected."""
        self._act(job_id, "diagnose", None)

    def diagnosis(self, job_id: str) -> DiagnosisView:
        """The verdict on its newest attempt that failed or was inspected."""
        return self.get(f"/v1/jobs/{job_id}/diagnosis", DiagnosisView)

    def attempts(self, job_id: str) -> AttemptList:
        """Its tries."""
        return self.get(f"/v1/jobs/{job_id}/attempts", AttemptList)

    def metrics(
        self,
        job_id: str,
        *,
        max_points: int = 1000,
        from_step: int = 0,
        to_step: int | None = None,
    ) -> MetricsView:
        """Its steps, at most ``max_points`` (2 to 10 000) of them, thinned out evenly."""
        asked = {"max_points": max_points, "from_step": from_step, "to_step": to_step}
        return self.get(f"/v1/jobs/{job_id}/metrics", MetricsView, asked)

    def some_metrics(
        self, job_id: str, names: Sequence[str], *, max_points: int = 1000
    ) -> MetricsPart:
        """Those of these names."""
        asked = {"name": list(names), "max_points": max_points}
        return self.get(f"/v1/jobs/{job_id}/metrics", MetricsPart, asked)

    def record_trace(self, job_id: str, wanted: TraceRequest) -> TraceView:
        """Have ranks record their next steps."""
        response = self.request(
            "POST", f"/v1/jobs/{job_id}/traces", json=wanted.model_dump(mode="json")
        )
        return parsed(response, TraceView)

    def trace(self, job_id: str, trace_id: str) -> TraceView:
        """One trace."""
        return self.get(f"/v1/jobs/{job_id}/traces/{trace_id}", TraceView)

    def traces(self, job_id: str) -> TraceList:
        """Its newest traces, newest first."""
        return self.get(f"/v1/jobs/{job_id}/traces", TraceList)

    def checkpoints(self, job_id: str) -> CheckpointList:
        """Its checkpoints, newest first."""
        return self.get(f"/v1/jobs/{job_id}/checkpoints", CheckpointList)

    def checkpoint(self, checkpoint_id: str) -> CheckpointView:
        """One checkpoint."""
        return self.get(f"/v1/checkpoints/{checkpoint_id}", CheckpointView)

    def verify(self, checkpoint_id: str) -> CheckpointView:
        """Have a node read every file of it."""
        return self._keep("POST", checkpoint_id, "/verify")

    def export(self, checkpoint_id: str) -> CheckpointView:
        """Have a node put its model together as safetensors files."""
        return self._keep("POST", checkpoint_id, "/export")

    def export_files(self, checkpoint_id: str) -> ExportManifest:
        """The files of its export, with sizes and digests."""
        return self.get(f"/v1/checkpoints/{checkpoint_id}/files", ExportManifest)

    def download(self, checkpoint_id: str, name: str, file: PartialFile) -> None:
        """Download a file of its export, or what is missing of it."""
        self.fetch(f"/v1/checkpoints/{checkpoint_id}/files/{name}", file)

    def pin(self, checkpoint_id: str, *, keep: bool = True) -> CheckpointView:
        """Keep it whatever retention says, or no longer."""
        return self._keep("POST", checkpoint_id, "/pin" if keep else "/unpin")

    def remove_checkpoint(self, checkpoint_id: str) -> CheckpointView:
        """Delete it, if nothing needs it."""
        return self._keep("DELETE", checkpoint_id, "")

    def events(self, job_id: str, *, limit: int = 200, cursor: str | None = None) -> EventPage:
        """What happened to it."""
        asked = {"limit": limit, "cursor": cursor}
        return self.get(f"/v1/jobs/{job_id}/events", EventPage, asked)

    def nodes(self) -> NodeList:
        """All nodes, by name."""
        page = self.get("/v1/nodes", NodeList, {"limit": _LARGEST_PAGE_OF_NODES})
        found = page.items
        while page.next_cursor is not None:
            asked = {"limit": _LARGEST_PAGE_OF_NODES, "cursor": page.next_cursor}
            page = self.get("/v1/nodes", NodeList, asked)
            found += page.items
        return NodeList(items=found)

    def node(self, node_id: str) -> NodeView:
        """One node."""
        return self.get(f"/v1/nodes/{node_id}", NodeView)

    def queue(self) -> QueueView:
        """Who waits for slots, and why."""
        return self.get("/v1/queue", QueueView)

    def pools(self) -> PoolList:
        """See ``GET /v1/pools``."""
        return self.get("/v1/pools", PoolList)

    def capacity(self) -> CapacityView:
        """Which slots are free."""
        return self.get("/v1/capacity", CapacityView)

    def drain(self, node_id: str, how: DrainRequest) -> NodeView:
        """Have a node's gangs checkpoint and move, and place no more there."""
        body = how.model_dump(mode="json")
        response = self.request("POST", f"/v1/nodes/{node_id}/drain", json=body)
        return parsed(response, NodeView)

    def forget(self, node_id: str) -> None:
        """Delete the record of a lost node."""
        self.request("DELETE", f"/v1/nodes/{node_id}")

    def undrain(self, node_id: str) -> NodeView:
        """Have gangs placed on the node again."""
        response = self.request("POST", f"/v1/nodes/{node_id}/undrain")
        return parsed(response, NodeView)

    def version(self) -> Version:
        """Which build answers."""
        return self.get("/version", Version)

    def unreadable(self, *, limit: int = 100) -> UnreadableList:
        """Records that the controller cannot read; only who operates it may ask."""
        return self.get("/v1/unreadable", UnreadableList, {"limit": limit})

    def readiness(self) -> Health:
        """Whether the controller and its Redis can serve, and if not, what is wrong."""
        response = self.send("GET", "/readyz", patience_s=0)
        return parsed(response, Health)

    def cancel(self, job_id: str, stop: StopRequest) -> JobView:
        """Stop the job for good, after a checkpoint as asked."""
        return self._act(job_id, "cancel", stop)

    def pause(self, job_id: str, stop: StopRequest) -> JobView:
        """Stop the job so that ``resume`` continues it."""
        return self._act(job_id, "pause", stop)

    def resume(self, job_id: str, resume: ResumeRequest) -> JobView:
        """Go on from a checkpoint."""
        return self._act(job_id, "resume", resume)

    def kill(self, job_id: str) -> JobView:
        """Stop the job at once, without a checkpoint."""
        return self._act(job_id, "kill", None)

    def take_checkpoint(self, job_id: str) -> None:
        """Ask for a checkpoint at the next agreed step."""
        self.request("POST", f"/v1/jobs/{job_id}/checkpoints")

    def create_token(self, wanted: TokenRequest) -> TokenCreated:
        """Make a token; the answer is the only place where its secret stands."""
        response = self.request("POST", "/v1/tokens", json=wanted.model_dump(mode="json"))
        return parsed(response, TokenCreated)

    def tokens(self) -> TokenList:
        """All tokens."""
        return self.get("/v1/tokens", TokenList)

    def revoke_token(self, token_id: str) -> None:
        """Revoke a token."""
        self.request("DELETE", f"/v1/tokens/{token_id}")

    def create_webhook(self, wanted: WebhookRequest) -> WebhookCreated:
        """Have events sent to a URL; the answer is the only place where its secret stands."""
        response = self.request("POST", "/v1/webhooks", json=wanted.model_dump(mode="json"))
        return parsed(response, WebhookCreated)

    def webhooks(self) -> WebhookList:
        """One's own webhooks; for an operator all."""
        return self.get("/v1/webhooks", WebhookList)

    def remove_webhook(self, webhook_id: str) -> None:
        """Remove a webhook."""
        self.request("DELETE", f"/v1/webhooks/{webhook_id}")

    def audit(self, *, limit: int = 100) -> AuditPage:
        """The newest requests that changed something or were refused."""
        return self.get("/v1/audit", AuditPage, {"limit": limit})

    def logs(self, job_id: str, **filters: str | int) -> Iterator[LogView]:
        """Its output so far; filters as in the API, such as ``rank``, ``text`` or ``since``."""
        cursor: dict[str, str] = {}
        while True:
            response = self.request("GET", f"/v1/jobs/{job_id}/logs", params={**filters, **cursor})
            page = parsed(response, LogPage)
            for line in page.items:
                yield line
            if page.next_cursor is None or not page.items:
                return
            cursor = {"cursor": page.next_cursor}

    def follow_logs(self, job_id: str, **filters: str | int) -> Iterator[LogView]:
        """Its output as it comes, from the beginning; ends when the job has ended."""
        params = {"follow": "true", **filters}
        for line in self.follow(f"/v1/jobs/{job_id}/logs", LogView, params):
            yield line

    def follow_events(self, job_id: str, *, last_id: str | None = None) -> Iterator[EventView]:
        """What happens to a job, behind ``last_id``; ends when the job has ended."""
        for event in self.follow(f"/v1/jobs/{job_id}/events", EventView, {}, last_id):
            yield event

    def all_events(
        self, *, limit: int = 200, cursor: str | None = None, **filters: str | list[str] | None
    ) -> EventPage:
        """Events of all jobs, oldest first; ``kind``, ``job_id``, ``owner``, ``label`` as in the API."""
        asked = {"limit": limit, "cursor": cursor, **filters}
        return self.get("/v1/events", EventPage, asked)

    def follow_all_events(
        self, *, last_id: str | None = None, **filters: str | list[str]
    ) -> Iterator[EventView]:
        """Events of all jobs as they come, behind ``last_id`` or from now on; it does not end.

        With ``replay="true"`` it begins with the oldest that is kept.
        """
        for event in self.follow("/v1/events", EventView, filters, last_id):
            yield event

    def _act(self, job_id: str, verb: str, body: BaseModel | None) -> JobView:
        content = None if body is None else body.model_dump(mode="json", exclude_none=True)
        response = self.request("POST", f"/v1/jobs/{job_id}/{verb}", json=content)
        return parsed(response, JobView)

    def _keep(self, method: str, checkpoint_id: str, verb: str) -> CheckpointView:
        response = self.request(method, f"/v1/checkpoints/{checkpoint_id}{verb}")
        return parsed(response, CheckpointView)
