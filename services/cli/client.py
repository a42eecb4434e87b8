"""The Python client of Meshloom's REST API.

Example:
    >>> with Client("http://127.0.0.1:8400") as meshloom:  # doctest: +SKIP
    ...     job = meshloom.submit({"model": ..., "data": ..., "train": {"steps": 100}})
    ...     meshloom.job(job.id).state
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import httpx
from httpx_sse import ServerSentEvent, connect_sse
from pydantic import BaseModel, ValidationError
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    wait_exponential,
)

from services.cli.errors import RefusedError, UnreachableError
from services.contract.api.access import AuditPage, TokenCreated, TokenList, TokenRequest
from services.contract.api.plan_views import PlanList, PlanView
from services.contract.api.queue import CapacityView, DrainRequest, QueueView
from services.contract.api.requests import CloneRequest, JobPatch
from services.contract.api.views import (
    AttemptList,
    CheckpointList,
    CheckpointView,
    CodeView,
    DiagnosisView,
    EventPage,
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
from services.contract.jobs.code_archives import digest_of
from services.contract.jobs.traces import TraceList, TraceRequest, TraceView
from services.contract.words.problems import Problem

_V = TypeVar("_V", bound=BaseModel)
_NO_CONTENT: Final = 204
_NOT_MODIFIED: Final = 304
_ERRORS_FROM: Final = 400
_PLANNED_WITHIN_S: Final = 90.0
_KEPT_WITHIN_S: Final = 120.0
_UPLOADING_PATIENCE_S: Final = 30.0
_LATER: Final = frozenset({429, 503})


class Client:
    """A connection to one controller. Every request may be repeated without doing it twice.

    Args:
        base_url: The controller's root, such as ``http://127.0.0.1:8400``.
        token: The bearer token, where the controller wants one.
        timeout_s: Seconds that one answer may take.
        patience_s: Seconds for which a controller that does not answer, or that asks to wait
            (429, 503), is asked again.

    Methods raise ``UnreachableError`` if nobody answers, and ``RefusedError`` with the problem if
    the controller refuses.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        timeout_s: float = 15.0,
        patience_s: float = 1.0,
    ) -> None:
        self._patience_s = patience_s
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=timeout_s)
        self._cache: dict[str, tuple[str, BaseModel]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    @property
    def base_url(self) -> str:
        """The controller's root."""
        return str(self._http.base_url).rstrip("/")

    def submit(
        self, spec: Mapping[str, Any], *, idempotency_key: str | None = None, dry_run: bool = False
    ) -> JobView:
        """Submit a job; with the same key and spec again, the same job is answered.

        ``{"plan_id": …}`` in place of a spec runs that very plan.
        """
        response = self._request(
            "POST",
            "/v1/jobs",
            json=dict(spec),
            params={"dry_run": "true"} if dry_run else {},
            headers={"Idempotency-Key": idempotency_key or secrets.token_hex(16)},
        )
        return JobView.model_validate_json(response.content)

    def upload_code(self, body: bytes) -> tuple[CodeView, bool]:
        """Upload an archive unless it is there; answers what is kept, and whether it was sent."""
        path = f"/v1/code/{digest_of(body)}"
        known = self._send("GET", path)
        if known.status_code == httpx.codes.OK:
            return CodeView.model_validate_json(known.content), False
        if known.status_code != httpx.codes.NOT_FOUND:
            raise _refusal(known)
        response = self._request(
            "PUT",
            path,
            content=body,
            headers={"Content-Type": "application/gzip"},
            # Its turn may come late, and it is judged before it is answered.
            timeout=httpx.Timeout(15.0, read=_KEPT_WITHIN_S, write=_KEPT_WITHIN_S),
            patience_s=_UPLOADING_PATIENCE_S,
        )
        return CodeView.model_validate_json(response.content), True

    def plan(self, spec: Mapping[str, Any], *, fresh: bool = False) -> PlanView:
        """Have a plan made for a spec; it may still be PROBING. ``fresh``: profile again."""
        params = {"fresh": "true"} if fresh else {}
        # The controller may wait for the profile, longer than for other answers.
        timeout = httpx.Timeout(15.0, read=_PLANNED_WITHIN_S)
        response = self._request(
            "POST", "/v1/plans", json=dict(spec), params=params, timeout=timeout
        )
        return PlanView.model_validate_json(response.content)

    def plans(self, *, limit: int = 50, **filters: str) -> PlanList:
        """Plans, newest first; ``filters`` are ``state``, ``owner`` and ``cursor``."""
        return self._get("/v1/plans", PlanList, {"limit": limit, **filters})

    def get_plan(self, plan_id: str) -> PlanView:
        """One plan."""
        return self._get(f"/v1/plans/{plan_id}", PlanView)

    def clone(
        self,
        job_id: str,
        wanted: CloneRequest,
        *,
        idempotency_key: str | None = None,
        dry_run: bool = False,
    ) -> JobView:
        """Submit another job of the same spec; with the same key again, the same one is answered."""
        response = self._request(
            "POST",
            f"/v1/jobs/{job_id}/clone",
            json=wanted.model_dump(mode="json", exclude_defaults=True),
            params={"dry_run": "true"} if dry_run else {},
            headers={"Idempotency-Key": idempotency_key or secrets.token_hex(16)},
        )
        return JobView.model_validate_json(response.content)

    def patch(self, job_id: str, patch: JobPatch) -> JobView:
        """Change a job as it is now; refused (412) if somebody else changes it meanwhile."""
        path = f"/v1/jobs/{job_id}"
        seen = self._request("GET", path)
        response = self._request(
            "PATCH",
            path,
            json=patch.model_dump(mode="json", exclude_unset=True),
            headers={"If-Match": seen.headers["ETag"]},
        )
        return JobView.model_validate_json(response.content)

    def delete(self, job_id: str, *, purge_checkpoints: bool = False) -> bool:
        """Delete a finished job; False while its checkpoints are still being removed."""
        params = {"purge_checkpoints": "true"} if purge_checkpoints else {}
        response = self._request("DELETE", f"/v1/jobs/{job_id}", params=params)
        return response.status_code == _NO_CONTENT

    def jobs(self, *, limit: int = 50, **filters: str) -> JobPage:
        """The newest jobs; or as in the API: ``state``, ``label``, ``owner``, ``q``, ``sort``."""
        return self._get("/v1/jobs", JobPage, {"limit": limit, **filters})

    def job(self, job_id: str) -> JobView:
        """One job."""
        return self._get(f"/v1/jobs/{job_id}", JobView)

    def ranks(self, job_id: str) -> RankList:
        """The ranks of its newest attempt."""
        return self._get(f"/v1/jobs/{job_id}/ranks", RankList)

    def diagnose(self, job_id: str) -> None:
        """Have its running ranks looked into."""
        self._act(job_id, "diagnose", None)

    def diagnosis(self, job_id: str) -> DiagnosisView:
        """The verdict on its newest attempt that failed or was looked into."""
        return self._get(f"/v1/jobs/{job_id}/diagnosis", DiagnosisView)

    def attempts(self, job_id: str) -> AttemptList:
        """Its tries."""
        return self._get(f"/v1/jobs/{job_id}/attempts", AttemptList)

    def metrics(self, job_id: str, *, max_points: int = 1000) -> MetricsView:
        """Its steps."""
        return self._get(f"/v1/jobs/{job_id}/metrics", MetricsView, {"max_points": max_points})

    def some_metrics(
        self, job_id: str, names: Sequence[str], *, max_points: int = 1000
    ) -> MetricsPart:
        """Those of these names."""
        asked = {"name": list(names), "max_points": max_points}
        return self._get(f"/v1/jobs/{job_id}/metrics", MetricsPart, asked)

    def record_trace(self, job_id: str, wanted: TraceRequest) -> TraceView:
        """Have ranks record their next steps."""
        response = self._request(
            "POST", f"/v1/jobs/{job_id}/traces", json=wanted.model_dump(mode="json")
        )
        return TraceView.model_validate_json(response.content)

    def trace(self, job_id: str, trace_id: str) -> TraceView:
        """One trace."""
        return self._get(f"/v1/jobs/{job_id}/traces/{trace_id}", TraceView)

    def traces(self, job_id: str) -> TraceList:
        """Its newest traces, newest first."""
        return self._get(f"/v1/jobs/{job_id}/traces", TraceList)

    def checkpoints(self, job_id: str) -> CheckpointList:
        """Its checkpoints, newest first."""
        return self._get(f"/v1/jobs/{job_id}/checkpoints", CheckpointList)

    def checkpoint(self, checkpoint_id: str) -> CheckpointView:
        """One checkpoint."""
        return self._get(f"/v1/checkpoints/{checkpoint_id}", CheckpointView)

    def verify(self, checkpoint_id: str) -> CheckpointView:
        """Have a node read every file of it."""
        return self._keep("POST", checkpoint_id, "/verify")

    def export(self, checkpoint_id: str) -> CheckpointView:
        """Have a node put its model together as safetensors files."""
        return self._keep("POST", checkpoint_id, "/export")

    def pin(self, checkpoint_id: str, *, keep: bool = True) -> CheckpointView:
        """Keep it whatever retention says, or no longer."""
        return self._keep("POST", checkpoint_id, "/pin" if keep else "/unpin")

    def remove_checkpoint(self, checkpoint_id: str) -> CheckpointView:
        """Delete it, if nothing needs it."""
        return self._keep("DELETE", checkpoint_id, "")

    def events(self, job_id: str, *, limit: int = 200) -> EventPage:
        """What happened to it."""
        return self._get(f"/v1/jobs/{job_id}/events", EventPage, {"limit": limit})

    def nodes(self) -> NodeList:
        """All nodes."""
        return self._get("/v1/nodes", NodeList)

    def node(self, node_id: str) -> NodeView:
        """One node."""
        return self._get(f"/v1/nodes/{node_id}", NodeView)

    def queue(self) -> QueueView:
        """Who waits for seats, and why."""
        return self._get("/v1/queue", QueueView)

    def capacity(self) -> CapacityView:
        """What room there is."""
        return self._get("/v1/capacity", CapacityView)

    def drain(self, node_id: str, how: DrainRequest) -> NodeView:
        """Have a node's gangs checkpoint and move, and place no more there."""
        body = how.model_dump(mode="json")
        response = self._request("POST", f"/v1/nodes/{node_id}/drain", json=body)
        return NodeView.model_validate_json(response.content)

    def forget(self, node_id: str) -> None:
        """Delete the record of a lost node."""
        self._request("DELETE", f"/v1/nodes/{node_id}")

    def undrain(self, node_id: str) -> NodeView:
        """Have gangs placed on the node again."""
        response = self._request("POST", f"/v1/nodes/{node_id}/undrain")
        return NodeView.model_validate_json(response.content)

    def version(self) -> Version:
        """Which build answers."""
        return self._get("/version", Version)

    def unreadable(self, *, limit: int = 100) -> UnreadableList:
        """Records that the controller cannot read; only who operates it may ask."""
        return self._get("/v1/unreadable", UnreadableList, {"limit": limit})

    def readiness(self) -> Health:
        """Whether the controller and its Redis can serve, and if not, what is wrong."""
        response = self._send("GET", "/readyz", patient=False)
        return Health.model_validate_json(response.content)

    def cancel(self, job_id: str, stop: StopRequest) -> JobView:
        """Stop the job for good, after a checkpoint as asked."""
        return self._act(job_id, "cancel", stop)

    def pause(self, job_id: str, stop: StopRequest) -> JobView:
        """Stop the job so that ``resume`` goes on with it."""
        return self._act(job_id, "pause", stop)

    def resume(self, job_id: str, resume: ResumeRequest) -> JobView:
        """Go on from a checkpoint."""
        return self._act(job_id, "resume", resume)

    def kill(self, job_id: str) -> JobView:
        """Stop the job at once, without a checkpoint."""
        return self._act(job_id, "kill", None)

    def take_checkpoint(self, job_id: str) -> None:
        """Ask for a checkpoint at the next agreed step."""
        self._request("POST", f"/v1/jobs/{job_id}/checkpoints")

    def create_token(self, wanted: TokenRequest) -> TokenCreated:
        """Make a token; the answer is the only place where its secret stands."""
        response = self._request("POST", "/v1/tokens", json=wanted.model_dump(mode="json"))
        return TokenCreated.model_validate_json(response.content)

    def tokens(self) -> TokenList:
        """All tokens."""
        return self._get("/v1/tokens", TokenList)

    def revoke_token(self, token_id: str) -> None:
        """Revoke a token."""
        self._request("DELETE", f"/v1/tokens/{token_id}")

    def audit(self, *, limit: int = 100) -> AuditPage:
        """The newest requests that changed something or were refused."""
        return self._get("/v1/audit", AuditPage, {"limit": limit})

    def logs(self, job_id: str, **filters: str | int) -> Iterator[LogView]:
        """Its output so far; filters as in the API, such as ``rank``, ``text`` or ``since``."""
        cursor: dict[str, str] = {}
        while True:
            response = self._request("GET", f"/v1/jobs/{job_id}/logs", params={**filters, **cursor})
            page = LogPage.model_validate_json(response.content)
            yield from page.items
            if page.next_cursor is None or not page.items:
                return
            cursor = {"cursor": page.next_cursor}

    def follow_logs(self, job_id: str, **filters: str | int) -> Iterator[LogView]:
        """Its output as it comes, from the beginning; ends when the job has ended."""
        last_id: str | None = None
        while True:
            try:
                for event in self._events(f"/v1/jobs/{job_id}/logs", last_id, filters):
                    last_id = event.id or last_id
                    if event.event == "end":
                        return
                    if event.event == "refused":
                        raise RefusedError(Problem.model_validate_json(event.data))
                    if event.data:
                        yield LogView.model_validate_json(event.data)
            except httpx.TransportError:
                # Waits, with back-off, until the controller is back; then the stream goes on
                # behind the last line that was seen.
                self.version()

    def _events(
        self, path: str, last_id: str | None, filters: Mapping[str, str | int]
    ) -> Iterator[ServerSentEvent]:
        with connect_sse(
            self._http,
            "GET",
            path,
            params={"follow": "true", **filters},
            headers={"Last-Event-ID": last_id} if last_id else {},
            timeout=httpx.Timeout(15.0, read=60.0),
        ) as source:
            if source.response.status_code >= _ERRORS_FROM:
                source.response.read()
                raise _refusal(source.response)
            yield from source.iter_sse()

    def _act(self, job_id: str, verb: str, body: BaseModel | None) -> JobView:
        content = None if body is None else body.model_dump(mode="json", exclude_none=True)
        response = self._request("POST", f"/v1/jobs/{job_id}/{verb}", json=content)
        return JobView.model_validate_json(response.content)

    def _keep(self, method: str, checkpoint_id: str, verb: str) -> CheckpointView:
        response = self._request(method, f"/v1/checkpoints/{checkpoint_id}{verb}")
        return CheckpointView.model_validate_json(response.content)

    def _get(self, path: str, view: type[_V], params: Mapping[str, Any] | None = None) -> _V:
        key = f"{path}?{sorted((params or {}).items())}"
        known = self._cache.get(key)
        headers = {"If-None-Match": known[0]} if known else {}
        response = self._request("GET", path, params=params or {}, headers=headers)
        if known and response.status_code == _NOT_MODIFIED and isinstance(known[1], view):
            return known[1]
        answer = view.model_validate_json(response.content)
        if "ETag" in response.headers:
            self._cache[key] = (response.headers["ETag"], answer)
        return answer

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:  # noqa: ANN401 passed through to httpx
        response = self._send(method, path, **options)
        if response.status_code >= _ERRORS_FROM:
            raise _refusal(response)
        return response

    def _send(
        self,
        method: str,
        path: str,
        *,
        patient: bool = True,
        patience_s: float | None = None,
        **options: Any,  # noqa: ANN401 passed through to httpx
    ) -> httpx.Response:
        ask = Retrying(
            retry=retry_if_exception_type(httpx.TransportError) | retry_if_result(_asks_to_wait),
            wait=wait_exponential(multiplier=0.1, max=2),
            stop=stop_after_delay((patience_s or self._patience_s) if patient else 0),
            retry_error_callback=_last_outcome,
        )
        try:
            return ask(self._http.request, method, path, **options)
        except httpx.TransportError as error:
            raise UnreachableError(
                f"no controller answers at {self.base_url} ({error}); start one with `make up`, "
                "or set MESHLOOM_URL"
            ) from error


def _asks_to_wait(response: httpx.Response) -> bool:
    return response.status_code in _LATER


def _last_outcome(state: RetryCallState) -> httpx.Response:
    if state.outcome is None:
        raise RuntimeError("a request was given up before it was made")
    response: httpx.Response = state.outcome.result()
    return response


def _refusal(response: httpx.Response) -> RefusedError:
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        problem = Problem(
            type="about:blank",
            title=response.reason_phrase,
            status=response.status_code,
            code="unknown",
            detail=f"{response.url} answered {response.status_code} {response.reason_phrase}",
        )
    return RefusedError(problem)
