"""The ports in one process's memory: a twin of Redis for tests and for trying things out."""

import functools
import os

from services.controller.adapters.memory.access import MemoryAudit, MemoryTokens
from services.controller.adapters.memory.code import MemoryCode
from services.controller.adapters.memory.coordination import (
    MemoryClock,
    MemoryLeadership,
    listening,
)
from services.controller.adapters.memory.event_feed import MemoryEventFeed
from services.controller.adapters.memory.jobs import MemoryJobs
from services.controller.adapters.memory.machines import (
    MemoryFacts,
    MemoryNodes,
    MemoryReservations,
    MemoryTelemetry,
)
from services.controller.adapters.memory.plans import MemoryPlans
from services.controller.adapters.memory.server import MemoryServer
from services.controller.adapters.memory.webhooks import MemoryWebhooks
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import DEFAULT_QUOTA, Quota


def memory_ports(server: MemoryServer, quota: Quota = DEFAULT_QUOTA) -> Ports:
    """All ports on ``server``."""
    return Ports(
        jobs=MemoryJobs(server, quota),
        nodes=MemoryNodes(server),
        reservations=MemoryReservations(server),
        facts=MemoryFacts(server),
        plans=MemoryPlans(server),
        codes=MemoryCode(server),
        telemetry=MemoryTelemetry(server),
        events=MemoryEventFeed(server),
        leadership=MemoryLeadership(server),
        clock=MemoryClock(server),
        tokens=MemoryTokens(server),
        audit=MemoryAudit(server),
        webhooks=MemoryWebhooks(server),
        listen=functools.partial(listening, server),
        entropy=os.urandom,
    )
