"""What routes need, handed to them by FastAPI."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from services.contract.api.access import Scope
from services.contract.jobs.entry_points import EntryPoints
from services.contract.jobs.specs import HIGHEST_PRIORITY
from services.contract.system.long_work import Turns
from services.controller.api.monitoring import Monitor
from services.controller.api.sse import StreamSlots
from services.controller.api.uploads import Uploads
from services.controller.domain.access.token import Principal
from services.controller.ports.coordination import Ports
from services.controller.ports.exports import ExportStore
from services.controller.ports.jobs import Actor
from services.controller.ports.tracing import Tracing
from services.controller.ports.webhooks import WebhookSender
from services.controller.use_cases.plans import Drawing


@dataclass(frozen=True)
class Context:
    """The world, and how this process is doing.

    ``stopping`` is set when the process is about to end: streams end then. ``epoch`` tells the
    epoch of this controller's term, None while it does not lead. ``streams`` are those that may be
    open at a time. ``entry_points`` are those that jobs may name. ``drawing``: how plans are made.
    ``trouble``: why Redis does not do what leading takes, None while it does.
    ``turns``: one request at a time reads all steps of a job, and one (``plan_turns``) lists plans. ``uploads``: how code is taken. ``most_priority``: the highest that submitters may give a job. ``exports``: where exports are read; None: nowhere. ``webhooks``: checks where they lead; None: there are none. ``tracing``: None: no traces. ``silent_pools``: why pools do not answer, as far as this process asks them.
    """

    ports: Ports
    monitor: Monitor
    stopping: asyncio.Event
    epoch: Callable[[], int | None]
    entry_points: EntryPoints = field(default_factory=EntryPoints)
    streams: StreamSlots = field(default_factory=StreamSlots)
    drawing: Drawing = field(default_factory=Drawing)
    trouble: Callable[[], str | None] = lambda: None
    uploads: Uploads = field(default_factory=Uploads)
    most_priority: int = HIGHEST_PRIORITY
    exports: ExportStore | None = None
    webhooks: WebhookSender | None = None
    tracing: Tracing | None = None
    silent_pools: Mapping[str, str] = field(default_factory=dict)
    # Two hundred thousand steps are as many objects: of several at once the memory would not suffice.
    turns: Turns = field(default_factory=Turns)
    # A thousand plans of each owner may be read whole, and lists of jobs must not wait for that.
    plan_turns: Turns = field(default_factory=Turns)


# Asynchronous although they wait for nothing: else each request would wait for a thread, once for each of them.
async def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


async def _ports(request: Request) -> Ports:
    context: Context = request.app.state.context
    return context.ports


async def _principal(request: Request) -> Principal:
    asks: Principal = request.state.principal
    return asks


async def _actor(request: Request) -> Actor:
    context: Context = request.app.state.context
    asks: Principal = request.state.principal
    is_operator = asks.scope.includes(Scope.OPERATOR)
    most = HIGHEST_PRIORITY if is_operator else context.most_priority
    return Actor(asks.subject, request.state.request_id, most)


WithContext = Annotated[Context, Depends(_context)]
WithPorts = Annotated[Ports, Depends(_ports)]
WithPrincipal = Annotated[Principal, Depends(_principal)]
WithActor = Annotated[Actor, Depends(_actor)]
