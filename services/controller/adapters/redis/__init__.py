"""The ports on Redis."""

import contextlib
import functools
import os
from collections.abc import AsyncIterator

from services.contract.redis.lease_keeper import LeaseKeeper
from services.contract.redis.redis_keys import LEADER, LEADER_LEASE_MS, TELEMETRY_KEPT_S
from services.controller.adapters.redis.access import RedisAudit, RedisTokens
from services.controller.adapters.redis.code import RedisCode
from services.controller.adapters.redis.connection import MAX_STREAMS, TELEMETRY_ANSWER_S, connected
from services.controller.adapters.redis.coordination import (
    RedisClock,
    RedisLeadership,
    listening,
    note_late_loop,
)
from services.controller.adapters.redis.event_feed import RedisEventFeed
from services.controller.adapters.redis.jobs import RedisJobs
from services.controller.adapters.redis.machines import RedisFacts, RedisNodes
from services.controller.adapters.redis.plans import RedisPlans
from services.controller.adapters.redis.reservations import RedisReservations
from services.controller.adapters.redis.telemetry import RedisTelemetry
from services.controller.adapters.redis.telemetry_names import TelemetryNames
from services.controller.adapters.redis.webhooks import RedisWebhooks
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import DEFAULT_QUOTA, Quota


@contextlib.asynccontextmanager
async def redis_ports(
    url: str,
    max_streams: int = MAX_STREAMS,
    *,
    telemetry_url: str | None = None,
    telemetry_kept_s: int = TELEMETRY_KEPT_S,
    telemetry_secret: str = "",
    quota: Quota = DEFAULT_QUOTA,
) -> AsyncIterator[Ports]:
    """All ports on the Redis at ``url``, until the block ends. Nothing is contacted yet.

    Telemetry is at ``telemetry_url``; None: there, too. Its keys have a part that is derived from ``telemetry_secret``.
    """
    names = TelemetryNames(telemetry_secret)
    async with contextlib.AsyncExitStack() as stack:
        clients = await stack.enter_async_context(connected(url, max_streams))
        telemetry = clients
        if telemetry_url is not None:
            apart = connected(
                telemetry_url,
                max_streams,
                answer_s=TELEMETRY_ANSWER_S,
                unreadable=clients.unreadable,
            )
            telemetry = await stack.enter_async_context(apart)
        lease = LeaseKeeper(url, LEADER, LEADER_LEASE_MS, note_late_loop)
        await stack.enter_async_context(lease.keeping())
        yield Ports(
            jobs=RedisJobs(clients, telemetry, telemetry_kept_s, quota=quota, names=names),
            nodes=RedisNodes(clients),
            reservations=RedisReservations(clients),
            facts=RedisFacts(clients),
            plans=RedisPlans(clients),
            codes=RedisCode(clients),
            telemetry=RedisTelemetry(clients, telemetry, names=names),
            events=RedisEventFeed(clients),
            leadership=RedisLeadership(clients, lease),
            clock=RedisClock(clients),
            tokens=RedisTokens(clients),
            audit=RedisAudit(clients),
            webhooks=RedisWebhooks(clients),
            listen=functools.partial(listening, clients),
            entropy=os.urandom,
            unreadable=lambda: clients.unreadable.names,
            note_unreadable=clients.unreadable.note_some_of,
        )
