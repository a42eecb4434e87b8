"""The OpenAPI document: as FastAPI makes it, with the errors that are really answered."""

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.contract.words.problems import PROBLEM_MEDIA_TYPE, Problem

_FIRST_ERROR: Final = 400
ERROR_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": Problem, "description": words}
    for status, words in {
        400: "The body is not JSON",
        401: "A token is required",
        403: "The token's scope is too small, or the resource has another owner",
        404: "No such resource",
        409: "The job's state does not allow it",
        410: "Entries after the cursor were trimmed",
        413: "The body or a spec is too large",
        415: "A body that is not JSON",
        421: "The controller does not serve this host name",
        422: "Every error of the request, each with its JSON pointer",
        429: "The token's rate limit is reached; wait for `Retry-After` seconds",
        503: "Redis does not answer, another controller leads, or too many streams are open",
    }.items()
}
"""Errors of all routes under ``/v1``."""


def document(app: FastAPI) -> dict[str, Any]:
    """The document; problems have their own media type."""
    made: dict[str, Any] = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes
    )
    for path in made["paths"].values():
        for operation in path.values():
            for status, told in operation["responses"].items():
                content = told.get("content", {})
                schema = content.get("application/json", {}).get("schema", {})
                if int(status) >= _FIRST_ERROR and schema.get("$ref", "").endswith("/Problem"):
                    content[PROBLEM_MEDIA_TYPE] = content.pop("application/json")
    return made
