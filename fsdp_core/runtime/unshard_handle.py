"""Waiting for an unshard that was started early."""

from __future__ import annotations

from collections.abc import Callable


class UnshardHandle:
    """Returned by ``unshard(async_op=True)``; waiting twice is harmless.

    The module's forward waits by itself; call `wait` to use the parameters before that.

    Args:
        finish: Waits for the unshard; None: there is nothing to wait for.
    """

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Returns when the current stream may use the whole parameters, now registered."""
        if self._finish is not None:
            self._finish()
