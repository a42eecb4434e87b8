"""``/v1/tokens``: make bearer tokens, list them, revoke them."""

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from services.contract.api.access import TokenCreated, TokenList, TokenRequest
from services.controller.api.conditional import answer, answer_page
from services.controller.api.context import WithActor, WithPorts
from services.controller.api.scopes import OPERATES
from services.controller.use_cases import access as use_cases

router = APIRouter(prefix="/v1/tokens", tags=["access"])


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=TokenCreated,
    dependencies=[OPERATES],
)
async def create_token(
    wanted: TokenRequest, request: Request, ports: WithPorts, actor: WithActor
) -> Response:
    """Create a token. Only this answer shows it."""
    made = await use_cases.create_token(ports, wanted, actor)
    headers = {"Location": f"/v1/tokens/{made.id}", "Cache-Control": "no-store"}
    return answer(request, made, status=HTTPStatus.CREATED, headers=headers)


@router.get("", response_model=TokenList, dependencies=[OPERATES])
async def list_tokens(request: Request, ports: WithPorts) -> Response:
    """All tokens, without their secrets."""
    return await answer_page(request, await use_cases.list_tokens(ports))


@router.delete("/{token_id}", status_code=HTTPStatus.NO_CONTENT, dependencies=[OPERATES])
async def revoke_token(token_id: str, ports: WithPorts) -> None:
    """Revoke a token. Requests with it get 401 from now on."""
    await use_cases.revoke_token(ports, token_id)
