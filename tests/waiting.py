"""Waiting on a condition, never on the clock; and counting rounds of an event loop, in place of seconds."""

import asyncio
from collections.abc import Callable
from typing import Self, TypeVar

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_exponential

T = TypeVar("T")


def until(look: Callable[[], T | None], *, timeout_s: float = 120.0, every_s: float = 0.05) -> T:
    """The first truthy result of ``look``.

    Args:
        look: Called now, and again and again.
        timeout_s: For how long.
        every_s: The pause after the first look. Pauses grow to four of it: whoever waits for long
            would else take as much of a processor, with the controller that it asks, as a rank.

    Raises:
        tenacity.RetryError: There was none in ``timeout_s`` seconds.
    """
    found = Retrying(
        retry=retry_if_result(lambda result: not result),
        wait=wait_exponential(multiplier=every_s, exp_base=1.25, max=4 * every_s),
        stop=stop_after_delay(timeout_s),
    )(look)
    assert found is not None
    return found


class Rounds:
    """How many rounds an event loop has made while a block waits for something: ``async with``."""

    def __init__(self) -> None:
        self.made = 0

    async def __aenter__(self) -> Self:
        self._counting = asyncio.create_task(self._count())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._counting.cancel()

    async def _count(self) -> None:
        while True:
            self.made += 1
            await asyncio.sleep(0)
