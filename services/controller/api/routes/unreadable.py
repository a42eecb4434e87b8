"""``/v1/unreadable``: records that cost themselves."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from services.contract.api.views import UnreadableList
from services.controller.api.conditional import answer
from services.controller.api.context import WithPorts
from services.controller.api.scopes import OPERATES

router = APIRouter(prefix="/v1/unreadable", tags=["system"])


@router.get("", response_model=UnreadableList, dependencies=[OPERATES])
async def unreadable(
    request: Request, ports: WithPorts, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> Response:
    """Records that this controller found and cannot read. Each is left out of answers."""
    names = ports.unreadable()
    told = UnreadableList(items=tuple(names[:limit]), left_out=max(len(names) - limit, 0))
    return answer(request, told)
