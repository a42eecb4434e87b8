"""What a leader does while it leads."""

import asyncio
from typing import Final

from services.controller.domain.errors import DeposedError
from services.controller.domain.resizing import Patience
from services.controller.loops.facts import FactLoop
from services.controller.loops.reconciler import reconcile
from services.controller.ports.office import Ports

_PATIENCE: Final = Patience()


async def reign(ports: Ports, epoch: int, *, patience: Patience = _PATIENCE) -> None:
    """Heed facts and reconcile, for ever. ``patience`` is that of elastic jobs that could grow.

    Raises:
        DeposedError: The reign is over.
    """
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(FactLoop(ports, epoch).run())
            group.create_task(reconcile(ports, epoch, patience))
    except* DeposedError as deposed:
        raise DeposedError("another controller leads now") from deposed
