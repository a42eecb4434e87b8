"""Every error answer is ``application/problem+json`` (RFC 9457)."""

import re
from collections.abc import Mapping, Sequence, Set
from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from services.contract.api.pointers import faults_of
from services.contract.api.spec_faults import hidden_faults
from services.contract.jobs.specs import TOO_LARGE, JobSpec
from services.contract.words.problems import PROBLEM_MEDIA_TYPE, PROBLEM_TYPE_BASE, Fault, Problem
from services.controller.api.rates import Buckets
from services.controller.domain.access.rate import Rate
from services.controller.domain.errors import MeshloomError, StoreUnavailableError

_CODES: Final[Mapping[int, str]] = {
    HTTPStatus.BAD_REQUEST: "bad_request",
    HTTPStatus.UNAUTHORIZED: "unauthorized",
    HTTPStatus.FORBIDDEN: "forbidden",
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body_too_large",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "unsupported_media_type",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limited",
    HTTPStatus.MISDIRECTED_REQUEST: "misdirected_request",
}
_MALFORMED: Final = "json_invalid"
# Strangers are refused, too: they must not fill the log.
_LINES: Final = Buckets(Rate(per_s=0.1, burst=10))
_log = structlog.get_logger()


def problem_response(
    status: int,
    detail: str,
    *,
    code: str | None = None,
    faults: Sequence[Fault] = (),
    headers: Mapping[str, str] | None = None,
    scope: Mapping[str, Any] | None = None,
) -> Response:
    """An error answer. ``scope`` (ASGI) gives the path and the request's id."""
    code = code or _CODES.get(status, "error")
    problem = Problem(
        type=PROBLEM_TYPE_BASE + code.replace("_", "-"),
        title=_phrase(status),
        status=status,
        code=code,
        detail=_speakable(detail),
        instance=None if scope is None else str(scope.get("path")),
        request_id=None if scope is None else scope.get("state", {}).get("request_id"),
        errors=tuple(
            fault.model_copy(
                update={"pointer": _speakable(fault.pointer), "detail": _speakable(fault.detail)}
            )
            for fault in faults
        ),
    )
    return Response(
        problem.model_dump_json(exclude_none=True),
        status_code=status,
        media_type=PROBLEM_MEDIA_TYPE,
        headers=dict(headers or {}),
    )


def install(app: FastAPI) -> None:
    """Have ``app`` answer all its errors so."""
    app.add_exception_handler(MeshloomError, _on_refusal)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, MeshloomError)  # noqa: S101 registered for this type
    return refusal(error, request.scope)


def refusal(error: MeshloomError, scope: Mapping[str, Any]) -> Response:
    """A typed error as its answer; what it says of the store to the log alone is logged."""
    if isinstance(error, StoreUnavailableError):
        _log_why(error)
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return problem_response(
        error.status,
        str(error) or error.title,
        code=error.code,
        faults=error.faults,
        headers=headers,
        scope=scope,
    )


def _log_why(error: StoreUnavailableError) -> None:
    # The loops, which log it too, may be answered meanwhile: requests have connections of their own.
    if error.why != str(error) and not _LINES.take("request_without_store"):
        _log.warning("request_without_store", error=error.why)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 registered for this type
    errors = error.errors()
    if any(entry["type"] == _MALFORMED for entry in errors):
        why = errors[0].get("ctx", {}).get("error", "")
        where = errors[0]["loc"][-1]
        return problem_response(
            HTTPStatus.BAD_REQUEST,
            f"the body is not JSON: {why} at character {where}",
            code="malformed_json",
            scope=request.scope,
        )
    is_spec = request.url.path.endswith(("/jobs", "/plans")) and request.method == "POST"
    names_plan = isinstance(error.body, dict) and "plan_id" in error.body
    faults = faults_of(errors, error.body, JobSpec if is_spec and not names_plan else None)
    if is_spec and not names_plan:
        faults += hidden_faults(error.body, faults)
    is_large = any(fault.code == TOO_LARGE for fault in faults)
    if request.method == "PATCH":
        faults = [_unchangeable(fault) for fault in faults]
    return problem_response(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE if is_large else HTTPStatus.UNPROCESSABLE_ENTITY,
        "; ".join(f"{fault.pointer or '(request)'}: {fault.detail}" for fault in faults),
        code=TOO_LARGE if is_large else "invalid_request",
        faults=faults,
        scope=request.scope,
    )


def _unchangeable(fault: Fault) -> Fault:
    """A field that no patch may have, and what to do instead."""
    if fault.code != "extra_forbidden":
        return fault
    detail = (
        "this field of a submitted job cannot be changed (only priority, labels, "
        "checkpoint.keep_last, "
        "checkpoint.keep_best, faults.max_restarts and resources.world can): clone the job with overrides"
    )
    return fault.model_copy(update={"detail": detail})


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 registered for this type
    details = {
        HTTPStatus.NOT_FOUND: f"there is no resource at {request.url.path}",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.url.path} does not take {request.method}",
    }
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.BAD_REQUEST:  # FastAPI's, of a body that it cannot parse
        return problem_response(
            error.status_code,
            f"the body cannot be read: {_unparsed(error.__cause__)}",
            code="malformed_json",
            scope=request.scope,
        )
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(sorted(_methods_of(request)))
    return problem_response(
        error.status_code,
        details.get(HTTPStatus(error.status_code), str(error.detail)),
        headers=headers,
        scope=request.scope,
    )


def _unparsed(cause: BaseException | None) -> str:
    """Why Python's parser gave up on a body."""
    if isinstance(cause, RecursionError):
        return "it is nested too deep"
    if isinstance(cause, UnicodeDecodeError):
        return "it is not in UTF-8"
    return "it holds a number with too many digits"


def _methods_of(request: Request) -> set[str]:
    """All methods that the path takes; the router by itself names those of one route only."""
    known: Sequence[tuple[re.Pattern[str], Set[str]]] = request.app.state.methods
    path = request.scope["path"]
    return {name for pattern, names in known if pattern.match(path) for name in names}


def _speakable(text: str) -> str:
    """A text that can be sent: JSON may escape half of a surrogate pair, UTF-8 has none."""
    return text.encode(errors="backslashreplace").decode()


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
