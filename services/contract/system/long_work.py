"""Long work in an event loop, cut such that others have their turns in between."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

# The loop that reads and shows jobs also renews the lead; a spec of 64 KiB takes a thirtieth of a second.
_TURN_S: Final = 0.01
T = TypeVar("T")


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items. Where what is done with them takes long, others have their turn before the next one."""
    began = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - began > _TURN_S:
            await asyncio.sleep(0)
            began = time.monotonic()
