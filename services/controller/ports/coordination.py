"""Leadership, time and wake-ups, and all ports in one hand."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

from pydantic import ValidationError

from services.contract.system.long_work import Turns
from services.controller.domain.scheduling.reservations import PoolLimits
from services.controller.domain.scheduling.survey import Survey
from services.controller.ports.access import AuditLog, TokenStore
from services.controller.ports.code import CodeStore
from services.controller.ports.event_feed import EventFeed
from services.controller.ports.jobs import JobStore
from services.controller.ports.machines import FactQueue, NodeStore, Telemetry
from services.controller.ports.plans import PlanStore
from services.controller.ports.pools import ReservationStore
from services.controller.ports.webhooks import WebhookStore


class Leadership(Protocol):
    """The lease that at most one controller holds, and the number of its term."""

    async def take(self, holder: str) -> int | None:
        """The epoch of a new term; None while another controller leads."""
        ...

    async def renew(self, holder: str) -> bool:
        """Whether the lease was still the holder's and was renewed."""
        ...

    async def release(self, holder: str) -> None:
        """Give the lease up, if it is the holder's."""
        ...


class Clock(Protocol):
    """The one clock: that of the store."""

    async def now_ms(self) -> int:
        """Milliseconds since 1970."""
        ...


class Waker(Protocol):
    """Hears that something changed. It may miss a call: whoever waits looks by itself, too."""

    async def wait(self, timeout_s: float) -> None:
        """Return at the next call, or after ``timeout_s`` seconds."""
        ...


@dataclass
class Surveyed:
    """The last survey of the queue that was made for a request, and who may make the next one."""

    last: Survey | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Changes:
    """Lets one change of a job be made at a time in this process, those of one actor after another's.

    All compare versions. Of many at once one wins each time, and the leader's, with which other jobs' facts wait,
    could be among those that lose until they give up.
    """

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, Turns] = WeakValueDictionary()

    def of(self, job_id: str, actor: str) -> AbstractAsyncContextManager[None]:
        """Within, nobody else in this process changes that job."""
        return self._turns.setdefault(job_id, Turns()).of(actor)


@dataclass(frozen=True)
class Ports:
    """Everything that the controller needs of the world.

    ``pools``: in the order in which they are asked for nodes.
    ``unreadable`` names the records that were met and cannot be read by this version;
    ``note_unreadable`` adds some that were met above the ports, by the name of what they are of.
    ``surveyed`` is no part of the world: what was worked out of it, for all who ask next. Nor is ``changes``.
    """

    jobs: JobStore
    nodes: NodeStore
    reservations: ReservationStore
    facts: FactQueue
    plans: PlanStore
    codes: CodeStore
    telemetry: Telemetry
    events: EventFeed
    leadership: Leadership
    clock: Clock
    tokens: TokenStore
    audit: AuditLog
    webhooks: WebhookStore
    listen: Callable[[], AbstractAsyncContextManager[Waker]]
    entropy: Callable[[int], bytes]
    pools: Sequence[PoolLimits] = ()
    unreadable: Callable[[], Sequence[str]] = tuple
    note_unreadable: Callable[[str, ValidationError], None] = lambda _name, _error: None
    surveyed: Surveyed = field(default_factory=Surveyed)
    changes: Changes = field(default_factory=Changes)
