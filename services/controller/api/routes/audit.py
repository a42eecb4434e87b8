"""``/v1/audit``: who changed what, and who was refused."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from services.contract.api.access import AuditPage
from services.controller.api.conditional import answer, next_link
from services.controller.api.context import WithPorts
from services.controller.api.scopes import OPERATES
from services.controller.use_cases.access import page_of_audit
from services.controller.use_cases.cursors import to_entry_id

router = APIRouter(prefix="/v1/audit", tags=["access"])


@router.get("", response_model=AuditPage, dependencies=[OPERATES])
async def audit(
    request: Request,
    ports: WithPorts,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before")] = None,
) -> Response:
    """Requests that changed something or were refused, newest first."""
    page = await page_of_audit(ports, to_entry_id(cursor), limit)
    return answer(request, page, headers=next_link(request, page.next_cursor))
