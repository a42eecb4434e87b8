"""``/v1/webhooks``: where events of jobs are sent."""

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from services.contract.api.webhooks import WebhookCreated, WebhookList, WebhookRequest
from services.controller.api.conditional import answer
from services.controller.api.context import Context, WithContext, WithPrincipal
from services.controller.api.scopes import SUBMITS
from services.controller.domain.errors import StateConflictError
from services.controller.ports.webhooks import WebhookSender
from services.controller.use_cases import webhooks as use_cases

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])


@router.post(
    "", status_code=HTTPStatus.CREATED, response_model=WebhookCreated, dependencies=[SUBMITS]
)
async def create_webhook(
    wanted: WebhookRequest, request: Request, context: WithContext, asks: WithPrincipal
) -> Response:
    """Send events of jobs to a URL, from now on. The answer shows the secret; nothing else ever will.

    Events of all jobs for an operator, of one's own for a submitter. Each is signed with HMAC-SHA256 as Standard
    Webhooks describes, sent in order, and again until the receiver answers 2xx: at least once.
    """
    made = await use_cases.create_webhook(context.ports, _sender(context), wanted, asks)
    headers = {"Location": f"/v1/webhooks/{made.id}", "Cache-Control": "no-store"}
    return answer(request, made, status=HTTPStatus.CREATED, headers=headers)


@router.get("", response_model=WebhookList, dependencies=[SUBMITS])
async def list_webhooks(request: Request, context: WithContext, asks: WithPrincipal) -> Response:
    """One's own webhooks, for an operator all, and how their deliveries go."""
    return answer(request, await use_cases.list_webhooks(context.ports, asks))


@router.delete("/{webhook_id}", status_code=HTTPStatus.NO_CONTENT, dependencies=[SUBMITS])
async def remove_webhook(webhook_id: str, context: WithContext, asks: WithPrincipal) -> None:
    """Remove a webhook of one's own; an operator any."""
    await use_cases.remove_webhook(context.ports, webhook_id, asks)


def _sender(context: Context) -> WebhookSender:
    if context.webhooks is None:
        raise StateConflictError("this controller sends no webhooks")
    return context.webhooks
