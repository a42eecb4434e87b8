"""What a leader does while it leads."""

import asyncio

from services.controller.domain.errors import DeposedError
from services.controller.loops.facts import FactLoop
from services.controller.loops.reconciler import reconcile
from services.controller.ports.office import Ports


async def reign(ports: Ports, epoch: int) -> None:
    """Heed facts and reconcile, for ever.

    Raises:
        DeposedError: The reign is over.
    """
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(FactLoop(ports, epoch).run())
            group.create_task(reconcile(ports, epoch))
    except* DeposedError as deposed:
        raise DeposedError("another controller leads now") from deposed
