"""What a leader does while it leads."""

import asyncio
from collections.abc import MutableMapping, Sequence
from typing import Final

from services.controller.domain.errors import DeposedError
from services.controller.domain.scheduling.elastic import GrowthDelay
from services.controller.loops.code import forget_code
from services.controller.loops.facts import FactLoop
from services.controller.loops.index import index_jobs
from services.controller.loops.observer import Observer
from services.controller.loops.planner import plan_jobs
from services.controller.loops.pools import keep_pool
from services.controller.loops.reconciler import reconcile
from services.controller.loops.store_retry import Troubles
from services.controller.loops.webhooks import deliver_webhooks
from services.controller.ports.coordination import Ports
from services.controller.ports.pools import RunnablePool
from services.controller.ports.webhooks import WebhookSender
from services.controller.use_cases.plans import Drawing

_GROWTH_DELAY: Final = GrowthDelay()
_UNOBSERVED: Final = Observer()


async def run_term(  # noqa: PLR0913 what a term needs, by name
    ports: Ports,
    epoch: int,
    drawing: Drawing,
    *,
    growth_delay: GrowthDelay = _GROWTH_DELAY,
    troubles: Troubles | None = None,
    observer: Observer = _UNOBSERVED,
    webhooks: WebhookSender | None = None,
    pools: Sequence[RunnablePool] = (),
    silent_pools: MutableMapping[str, str] | None = None,
) -> None:
    """Run what a leader does in one term, until cancelled: all loops.

    Args:
        ports: The world.
        epoch: The term.
        drawing: How plans are made.
        growth_delay: That of elastic jobs that could grow.
        troubles: As of ``StoreRetry``; empty once the term is over.
        observer: Is told how long things take.
        webhooks: Sends them; None: nobody does.
        pools: Bring nodes.
        silent_pools: Is told which of them do not answer, and why.

    Raises:
        DeposedError: The term is over.
    """
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(FactLoop(ports, epoch, troubles, observer).run())
            group.create_task(reconcile(ports, epoch, growth_delay, troubles, observer))
            group.create_task(plan_jobs(ports, epoch, drawing, troubles))
            group.create_task(forget_code(ports, epoch, troubles))
            group.create_task(index_jobs(ports, troubles))
            silent = {} if silent_pools is None else silent_pools
            for pool in pools:
                group.create_task(keep_pool(ports, epoch, pool, silent, troubles))
            if webhooks is not None:
                group.create_task(deliver_webhooks(ports, epoch, webhooks, troubles))
    except* DeposedError as deposed:
        raise DeposedError("another controller leads now") from deposed
    finally:
        if troubles is not None:
            troubles.clear()
