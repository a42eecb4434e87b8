"""How a loop outlives Redis's absence: said once, tried again ever more slowly, said when over."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Final

import structlog
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    wait_random,
    wait_random_exponential,
)

from services.contract.system.cancellation import end_if_told
from services.controller.domain.errors import StaleWriteError, StoreUnavailableError

Troubles = MutableMapping[str, str]

_log = structlog.get_logger()
# Random, so that the loops of all controllers do not come back at one moment.
_WAIT: Final = wait_random_exponential(multiplier=0.1, min=0.05, max=2.0)
_STALE_WAIT: Final = wait_random(0.05, 0.15)


class StoreRetry:
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
        self._is_absent = False
        self._round: RetryCallState | None = None

    async def round(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work``; while Redis does not answer, wait and do it again.

        Raises:
            CancelledError: The task was told to end, be it that ``work`` passed over that.
        """
        absent = retry_if_exception_type(StoreUnavailableError)
        async for attempt in AsyncRetrying(retry=absent, wait=_WAIT, before_sleep=self._missed):
            self._round = attempt.retry_state
            with attempt:
                end_if_told()
                await self._once(work)

    def succeeded(self) -> None:
        """Redis answered: for work that does not return in between.

        Raises:
            CancelledError: The task was told to end and something below it passed over that.
        """
        end_if_told()
        self._troubles.pop(self._name, None)
        if self._round is not None:
            self._round.attempt_number = 1
        if self._is_absent:
            _log.info("store_is_back", loop=self._name)
            self._is_absent = False

    async def _once(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except StaleWriteError as error:
            # Somebody else writes the same record very fast; what they wrote is looked at next.
            _log.info("stale_write", loop=self._name, error=str(error))
            if self._round is not None:
                await asyncio.sleep(_STALE_WAIT(self._round))
        else:
            self.succeeded()

    def _missed(self, state: RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        if not self._is_absent:
            why = error.why if isinstance(error, StoreUnavailableError) else str(error)
            _log.warning("store_unavailable", loop=self._name, error=why)
        self._is_absent = True
        self._troubles[self._name] = str(error)
        if self._on_absence is not None:
            self._on_absence()
