"""The loop that sends webhooks what they are owed."""

import asyncio
import contextlib
from collections import defaultdict
from typing import Final

import structlog
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    RetryError,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from services.contract.api.views import EventView
from services.contract.system.cancellation import end_if_told
from services.controller.domain.access.webhook import Deliveries
from services.controller.loops.store_retry import StoreRetry, Troubles
from services.controller.ports.coordination import Ports
from services.controller.ports.event_feed import FeedEntry
from services.controller.ports.webhooks import DeliveryError, WebhookSender
from services.controller.use_cases.webhooks import Delivery

_AT_ONCE: Final = 16
# A receiver may take its time: those of one subject must not take everybody's turns.
_AT_ONCE_OF_ONE: Final = 4
_LOOK_EVERY_S: Final = 2.0
_LOOK_WITHOUT_ANY_S: Final = 10.0
# Redis counts as away until a round is over: the first one after that has no long wait at its end.
_LOOK_AGAIN_S: Final = 0.1
_LONGEST_WAIT_S: Final = 300.0
# One event that a receiver never takes must not hold up all that follow it for ever.
_GIVEN_UP_AFTER_S: Final = 86_400.0
_log = structlog.get_logger()


async def deliver_webhooks(
    ports: Ports, epoch: int, sender: WebhookSender, troubles: Troubles | None = None
) -> None:
    """Deliver until cancelled: each webhook in the order of the events, several at a time.

    Raises:
        DeposedError: The term is over.
    """
    retry = StoreRetry("webhooks", troubles=troubles)
    rounds = _Rounds(ports, epoch, sender)
    try:
        while True:
            await retry.round(rounds.once)
    finally:
        await rounds.stop()


class _Rounds:
    """Starts a task for each webhook that is owed something."""

    def __init__(self, ports: Ports, epoch: int, sender: WebhookSender) -> None:
        self._ports = ports
        self._epoch = epoch
        self._sender = sender
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._slots_of_one: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_AT_ONCE_OF_ONE)
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._was_whole = True

    async def once(self) -> None:
        """Look who is owed something, then wait for the next event.

        Raises:
            DeposedError: A task found that the term is over.
            StoreUnavailableError: Redis does not answer.
        """
        was_whole, self._was_whole = self._was_whole, False
        newest = await self._ports.events.newest()
        webhooks = {webhook.id: webhook for webhook in await self._ports.webhooks.every()}
        known = await self._ports.webhooks.deliveries()
        for name, task in list(self._tasks.items()):
            if task.done():
                del self._tasks[name]
                if not task.cancelled():  # as one is whose webhook was removed while it was sent
                    task.result()
            elif name not in webhooks:
                task.cancel()
        for name, webhook in webhooks.items():
            deliveries = known.get(name, Deliveries(cursor=newest))
            if name in self._tasks or deliveries.disabled or deliveries.cursor == newest:
                continue
            delivery = Delivery(self._ports, self._sender, self._epoch, webhook, deliveries)
            self._tasks[name] = asyncio.create_task(self._catch_up(delivery))
        # A new one has nothing to be sent before the next event.
        rest_s = _LOOK_EVERY_S if webhooks or self._tasks else _LOOK_WITHOUT_ANY_S
        await self._ports.events.wait(newest, rest_s if was_whole else _LOOK_AGAIN_S)
        self._was_whole = True

    async def stop(self) -> None:
        """End all tasks."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _catch_up(self, delivery: Delivery) -> None:
        """Send all that the webhook is owed by now."""
        with contextlib.suppress(_RemovedError):
            while entries := await delivery.batch():
                end_if_told()
                for entry, event in entries:
                    if event is not None:
                        await self._deliver(delivery, entry, event)
                        if delivery.known.disabled:
                            return
                _go_on(await delivery.passed(entries[-1][0]))

    async def _deliver(self, delivery: Delivery, entry: FeedEntry, event: EventView) -> None:
        """Send one event until it is taken, ever more slowly, or given up.

        Raises:
            CancelledError: The task was told to end, be it that a library passed over that: the term waits for it.
        """

        async def note(state: RetryCallState) -> None:
            error = None if state.outcome is None else state.outcome.exception()
            if isinstance(error, DeliveryError):
                _go_on(await delivery.failed(error))
            end_if_told()  # not after a rest of minutes

        tries = AsyncRetrying(
            retry=retry_if_exception(_may_succeed_later),
            wait=wait_random_exponential(multiplier=0.5, max=_LONGEST_WAIT_S),
            stop=stop_after_delay(_GIVEN_UP_AFTER_S),
            before_sleep=note,
        )
        try:
            async for attempt in tries:
                end_if_told()
                with attempt:
                    async with self._slots_of_one[delivery.webhook.created_by], self._slots:
                        await delivery.send(event)
        except DeliveryError as error:
            _log.warning("webhook_gone", webhook_id=delivery.webhook.id)
            _go_on(await delivery.failed(error))
        except RetryError:
            _log.warning("webhook_given_up", webhook_id=delivery.webhook.id, event_id=event.id)
            _go_on(await delivery.dropped(entry))
        else:
            _go_on(await delivery.delivered(entry))


class _RemovedError(Exception):
    """The webhook was removed: nothing is sent to it any more."""


def _go_on(is_there: bool) -> None:  # noqa: FBT001 its only argument
    if not is_there:
        raise _RemovedError


def _may_succeed_later(error: BaseException) -> bool:
    return isinstance(error, DeliveryError) and not error.is_gone
