"""The loop that forgets uploaded code which nothing names."""

import asyncio
from typing import Final

from services.controller.loops.store_retry import StoreRetry, Troubles
from services.controller.ports.coordination import Ports
from services.controller.use_cases.code import forget_unused

_EVERY_S: Final = 600.0


async def forget_code(
    ports: Ports, epoch: int, troubles: Troubles | None = None, every_s: float = _EVERY_S
) -> None:
    """Look now and every ten minutes, until cancelled.

    Raises:
        DeposedError: The term is over.
    """
    retry = StoreRetry("code", troubles=troubles)

    async def look() -> None:
        while True:
            await forget_unused(ports, epoch)
            retry.succeeded()
            await asyncio.sleep(every_s)

    while True:
        await retry.round(look)
