"""Leadership: at most one controller acts; a term ends when its lease is not renewed in time."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

import structlog

from services.contract.redis.redis_keys import LEADER_LEASE_MS
from services.contract.system.cancellation import end_if_told
from services.controller.domain.errors import DeposedError, StoreUnavailableError
from services.controller.loops.store_retry import StoreRetry
from services.controller.ports.coordination import Leadership

_log = structlog.get_logger()
_LEASE_S: Final = LEADER_LEASE_MS / 1000
_RENEW_EVERY_S: Final = _LEASE_S / 4
_ASK_EVERY_S: Final = 0.5

Term = Callable[[int], Awaitable[None]]


class Leader:
    """Takes the lead whenever it is free and runs a term until it is lost. Run ``lead`` as a task.

    Args:
        leadership: The lease.
        holder: This controller's name; another in each life.
        run_term: What a leader does, given the epoch; cancelled when the lead is lost.
    """

    def __init__(self, leadership: Leadership, holder: str, run_term: Term) -> None:
        self._leadership = leadership
        self._holder = holder
        self._run_term = run_term
        self._epoch: int | None = None
        self._trouble: str | None = None

    @property
    def epoch(self) -> int | None:
        """The epoch of the current term; None while another controller, or none, leads."""
        return self._epoch

    @property
    def trouble(self) -> str | None:
        """Why Redis did not take the last write of the lease; None if it did.

        Every controller writes once a second or oftener, whether it leads or not.
        """
        return self._trouble

    async def lead(self) -> None:
        """Take the lead, run a term, lose it, ask again; until cancelled."""
        retry = StoreRetry("leader")
        async with self._released_at_the_end():
            while True:
                await retry.round(self._take_and_run_term)

    async def _take_and_run_term(self) -> None:
        asked_at = time.monotonic()
        with self._noting_trouble():
            epoch = await self._leadership.take(self._holder)
        if epoch is None:
            await asyncio.sleep(_ASK_EVERY_S)
            return
        _log.info("leading", epoch=epoch)
        self._epoch = epoch
        term = asyncio.ensure_future(self._run_term(epoch))
        try:
            await self._renew_while(term, asked_at)
        finally:
            self._epoch = None
            term.cancel()
            await asyncio.wait([term])
        _log.warning("no_longer_leading", epoch=epoch)
        if not term.cancelled() and (error := term.exception()):
            if not isinstance(error, DeposedError):
                _log.error("term_failed", epoch=epoch, exc_info=error)
            await self._leadership.release(self._holder)
            await asyncio.sleep(_ASK_EVERY_S)

    async def _renew_while(self, term: "asyncio.Future[None]", renewed_at: float) -> None:
        """Return once the term ended, or its lease did, by this host's monotonic clock."""
        while True:
            end_if_told()
            await asyncio.wait([term], timeout=_RENEW_EVERY_S)
            if term.done():
                return
            asked_at = time.monotonic()
            try:
                with self._noting_trouble():
                    is_ours = await self._leadership.renew(self._holder)
                if not is_ours:
                    return
                renewed_at = asked_at
            except StoreUnavailableError:
                # Since it was asked: a loop that was busy meanwhile saw the answer too late, and asks again.
                if asked_at - renewed_at > _LEASE_S:
                    return

    @contextlib.contextmanager
    def _noting_trouble(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailableError as error:
            self._trouble = str(error)
            raise
        self._trouble = None

    @contextlib.asynccontextmanager
    async def _released_at_the_end(self) -> AsyncIterator[None]:
        """A clean end releases the lease at once, so that the next controller need not wait."""
        try:
            yield
        finally:
            with contextlib.suppress(StoreUnavailableError):
                await self._leadership.release(self._holder)
