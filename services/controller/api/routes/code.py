"""``/v1/code``: archives of users' code, by their digest."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from starlette.requests import ClientDisconnect

from services.contract.api.views import CodeView
from services.contract.jobs.code_archives import CodeDigest
from services.controller.api.conditional import answer
from services.controller.api.context import WithContext, WithPorts, WithPrincipal
from services.controller.api.scopes import SUBMITS
from services.controller.api.uploads import CODE_PATH, MEDIA_TYPE
from services.controller.domain.errors import ForbiddenError
from services.controller.use_cases import code as use_cases

router = APIRouter(prefix=CODE_PATH, tags=["code"])

Digest = Annotated[CodeDigest, Path(description="`sha256:` and the digest of the archive's bytes")]


@router.put(
    "/{digest}",
    status_code=HTTPStatus.CREATED,
    response_model=CodeView,
    responses={200: {"model": CodeView, "description": "It was already uploaded"}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
    dependencies=[SUBMITS],
)
async def put_code(
    digest: Digest, request: Request, context: WithContext, asks: WithPrincipal
) -> Response:
    """Upload a gzipped tar of plain files, to be named by specs as `code`.

    It is checked before it is stored, and kept while a job names it and for a day after its last
    use.
    """
    if not context.entry_points.take_uploads:
        raise ForbiddenError(
            "uploaded code is disabled (MESHLOOM_UPLOADED_CODE of the controller and the "
            "agents): name what the nodes have",
            code="code_not_allowed",
        )
    uploads = context.uploads
    try:
        with uploads.slot(asks.subject):
            came = use_cases.Archive(digest, await uploads.body_of(request), asks.subject)
            view, is_new = await use_cases.keep_code(
                context.ports, came, uploads.limits, uploads.hands
            )
    except ClientDisconnect:
        return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody is there to read it
    headers = {"Location": f"{CODE_PATH}/{digest}"}
    status = HTTPStatus.CREATED if is_new else HTTPStatus.OK
    return answer(request, view, status=status, headers=headers)


@router.get("/{digest}", response_model=CodeView, dependencies=[SUBMITS])
async def get_code(digest: Digest, request: Request, ports: WithPorts) -> Response:
    """The facts about an archive. Only nodes read its content."""
    return answer(request, await use_cases.get_code(ports, digest))
