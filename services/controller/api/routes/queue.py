"""The queue, the room there is, pools, and nodes that are to be emptied."""

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from services.contract.api.queue import CapacityView, DrainRequest, PoolList, QueueView
from services.contract.api.views import NodeView
from services.controller.api.conditional import answer, answer_page
from services.controller.api.context import WithContext, WithPorts, WithPrincipal
from services.controller.api.scopes import OPERATES_NODE, READS
from services.controller.use_cases import queue as use_cases

router = APIRouter(prefix="/v1", tags=["queue"])


@router.get("/queue", response_model=QueueView, dependencies=[READS])
async def get_queue(request: Request, context: WithContext, asks: WithPrincipal) -> Response:
    """The jobs that wait for slots, in order, and why each waits."""
    async with context.turns.of(asks.subject):
        return await answer_page(request, await use_cases.get_queue(context.ports))


@router.get("/capacity", response_model=CapacityView, dependencies=[READS])
async def get_capacity(request: Request, ports: WithPorts) -> Response:
    """Used and free slots, node by node."""
    return answer(request, await use_cases.get_capacity(ports))


@router.get("/pools", response_model=PoolList, dependencies=[READS])
async def get_pools(request: Request, context: WithContext) -> Response:
    """The pools that bring nodes, and what is reserved of them."""
    return answer(request, await use_cases.list_pools(context.ports, context.silent_pools))


@router.post(
    "/nodes/{node_id}/drain",
    status_code=HTTPStatus.ACCEPTED,
    response_model=NodeView,
    dependencies=[OPERATES_NODE],
)
async def drain_node(
    node_id: str, request: Request, ports: WithPorts, how: DrainRequest | None = None
) -> Response:
    """Place no more gangs on this node; its running gangs take a checkpoint and migrate."""
    view = await use_cases.drain_node(ports, node_id, (how or DrainRequest()).grace_s)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


@router.delete(
    "/nodes/{node_id}",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    dependencies=[OPERATES_NODE],
)
async def forget_node(node_id: str, ports: WithPorts) -> Response:
    """Delete the record of a lost node that runs no rank; its agent may join again."""
    await use_cases.forget_node(ports, node_id)
    return Response(status_code=HTTPStatus.NO_CONTENT)


@router.post(
    "/nodes/{node_id}/undrain",
    status_code=HTTPStatus.ACCEPTED,
    response_model=NodeView,
    dependencies=[OPERATES_NODE],
)
async def undrain_node(node_id: str, request: Request, ports: WithPorts) -> Response:
    """Place gangs on this node again."""
    view = await use_cases.undrain_node(ports, node_id)
    return answer(request, view, status=HTTPStatus.ACCEPTED)
