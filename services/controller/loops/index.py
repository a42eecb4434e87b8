"""The loop that has lists hold all jobs, those of older versions, too."""

import asyncio
from typing import Final

import structlog

from services.controller.loops.store_retry import StoreRetry, Troubles
from services.controller.ports.coordination import Ports

_log = structlog.get_logger()
# A Redis that was restored from a copy of an older version's is found within that time.
_EVERY_S: Final = 60.0


async def index_jobs(
    ports: Ports, troubles: Troubles | None = None, every_s: float = _EVERY_S
) -> None:
    """Look now and every minute, until cancelled. Nothing waits for it: lists are slower until it is done."""
    retry = StoreRetry("index", troubles=troubles)

    async def look() -> None:
        while True:
            count = await ports.jobs.index()
            retry.succeeded()
            if count:
                _log.info("jobs_indexed", count=count)
            await asyncio.sleep(every_s)

    while True:
        await retry.round(look)
