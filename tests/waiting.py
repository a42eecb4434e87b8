"""Waiting on a condition, never on the clock."""

from collections.abc import Callable
from typing import TypeVar

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

T = TypeVar("T")


def until(look: Callable[[], T | None], *, timeout_s: float = 120.0, every_s: float = 0.05) -> T:
    """The first truthy result of ``look``.

    Raises:
        tenacity.RetryError: There was none in ``timeout_s`` seconds.
    """
    found = Retrying(
        retry=retry_if_result(lambda result: not result),
        wait=wait_fixed(every_s),
        stop=stop_after_delay(timeout_s),
    )(look)
    assert found is not None
    return found
