"""How a loop outlives Redis's absence: said once, tried again ever more slowly, said when over."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Final

import structlog

from services.contract.system.cancellation import end_if_told
from services.controller.domain.errors import StaleWriteError, StoreUnavailableError

Troubles = MutableMapping[str, str]

_log = structlog.get_logger()
_FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 2.0


class Endurance:
    """Runs one round of a loop after the other.

    Args:
        name: The loop's name in the log.
        on_absence: Called when Redis did not answer.
        troubles: Holds, by the loop's name, why Redis does not do what it asks for, while that is so.
    """

    def __init__(
        self,
        name: str,
        on_absence: Callable[[], None] | None = None,
        troubles: Troubles | None = None,
    ) -> None:
        self._name = name
        self._troubles = {} if troubles is None else troubles
        self._on_absence = on_absence
        self._wait_s = 0.0

    async def round(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work``; if Redis does not answer, wait instead of failing.

        Raises:
            CancelledError: The task was told to end, be it that ``work`` passed over that.
        """
        end_if_told()
        try:
            await work()
        except StoreUnavailableError as error:
            if not self._wait_s:
                _log.warning("store_unavailable", loop=self._name, error=str(error))
            self._troubles[self._name] = str(error)
            if self._on_absence is not None:
                self._on_absence()
            self._wait_s = min(max(self._wait_s * 2, _FIRST_WAIT_S), _LONGEST_WAIT_S)
            await asyncio.sleep(self._wait_s)
        except StaleWriteError as error:
            # Somebody else writes the same record very fast; what they wrote is looked at next.
            _log.info("stale_write", loop=self._name, error=str(error))
            await asyncio.sleep(_FIRST_WAIT_S)
        else:
            self.succeeded()

    def succeeded(self) -> None:
        """Redis answered: for work that does not return in between.

        Raises:
            CancelledError: The task was told to end and something below it passed over that.
        """
        end_if_told()
        self._troubles.pop(self._name, None)
        if self._wait_s:
            _log.info("store_is_back", loop=self._name)
            self._wait_s = 0.0
