"""Answers with an ETag: who polls and has the present state gets 304 and no body."""

import hashlib
from http import HTTPStatus
from typing import Final

from fastapi import Request, Response
from pydantic import BaseModel

_DIGEST_BYTES: Final = 12


def answer(
    request: Request,
    view: BaseModel,
    *,
    status: int = HTTPStatus.OK,
    headers: dict[str, str] | None = None,
) -> Response:
    """``view`` as JSON with its ETag; 304 if a GET shows that the client has it."""
    body = view.model_dump_json().encode()
    tag = f'"{hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()}"'
    sent = {"ETag": tag, "Cache-Control": "no-cache", **(headers or {})}
    if request.method in {"GET", "HEAD"} and _has(request, tag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=sent)
    return Response(body, status_code=status, media_type="application/json", headers=sent)


def _has(request: Request, tag: str) -> bool:
    shown = request.headers.get("if-none-match", "")
    tags = {part.strip().removeprefix("W/") for part in shown.split(",")}
    return tag in tags or "*" in tags
