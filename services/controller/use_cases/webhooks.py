"""Webhooks: register them, list them, remove them, and deliver what they are owed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from services.contract.api.access import Scope
from services.contract.api.views import EventView
from services.contract.api.webhooks import (
    WebhookCreated,
    WebhookList,
    WebhookRequest,
    WebhookView,
)
from services.contract.words.ids import new_webhook_id
from services.contract.words.problems import Fault
from services.controller.domain.access.token import Principal
from services.controller.domain.access.webhook import (
    SECRET_BYTES,
    Deliveries,
    Webhook,
    body_of,
    headers_of,
    message_id,
    secret_text,
)
from services.controller.domain.errors import (
    CursorExpiredError,
    InvalidRequestError,
    NotFoundError,
    StateConflictError,
)
from services.controller.ports.coordination import Ports
from services.controller.ports.event_feed import FeedEntry
from services.controller.ports.webhooks import (
    AddressRefusedError,
    DeliveryError,
    Most,
    WebhookSender,
)
from services.controller.use_cases.event_feed import EventFilter, chosen
from services.controller.use_cases.present import maybe_moment, moment

MOST_WEBHOOKS: Final = 100
MOST_OF_ONE: Final = 10
_RANDOM_BYTES: Final = 10
_BATCH: Final = 100
_BEGINNING: Final = "0-0"
_log = structlog.get_logger()


async def create_webhook(
    ports: Ports, sender: WebhookSender, wanted: WebhookRequest, asks: Principal
) -> WebhookCreated:
    """Register a webhook: it gets events from now on.

    Raises:
        InvalidRequestError: Its URL leads where no webhook may lead.
        StateConflictError: There are as many as there may be.
    """
    url = str(wanted.url)
    try:
        sender.check(url)
    except AddressRefusedError as error:
        fault = Fault(pointer="/url", detail=str(error), code="address_refused")
        raise InvalidRequestError([fault]) from error
    now_ms = await ports.clock.now_ms()
    webhook = Webhook(
        id=new_webhook_id(now_ms, ports.entropy(_RANDOM_BYTES)),
        url=url,
        kinds=wanted.kinds,
        labels=wanted.labels,
        format=wanted.format,
        owner=None if asks.scope.includes(Scope.OPERATOR) else asks.subject,
        created_by=asks.subject,
        created_ms=now_ms,
        secret=secret_text(ports.entropy(SECRET_BYTES)),
    )
    deliveries = Deliveries(cursor=await ports.events.newest())
    if not await ports.webhooks.put(webhook, deliveries, Most(MOST_WEBHOOKS, MOST_OF_ONE)):
        raise StateConflictError(
            f"there may be {MOST_WEBHOOKS} webhooks, {MOST_OF_ONE} of them by one subject, and there "
            f"are as many, in all or by {asks.subject}: delete one first"
        )
    return WebhookCreated(**_view(webhook, deliveries).model_dump(), secret=webhook.secret)


async def list_webhooks(ports: Ports, asks: Principal) -> WebhookList:
    """All webhooks for an operator, else one's own; without their secrets."""
    known = await ports.webhooks.deliveries()
    nothing = Deliveries(cursor=_BEGINNING)
    return WebhookList(
        items=tuple(
            _view(webhook, known.get(webhook.id, nothing))
            for webhook in await ports.webhooks.every()
            if _is_theirs(webhook, asks)
        )
    )


async def remove_webhook(ports: Ports, webhook_id: str, asks: Principal) -> None:
    """Remove a webhook; what is being sent at this moment may still arrive.

    Raises:
        NotFoundError: There is none of this id that is theirs.
    """
    theirs = [w.id for w in await ports.webhooks.every() if _is_theirs(w, asks)]
    if webhook_id not in theirs or not await ports.webhooks.remove(webhook_id):
        raise NotFoundError(f"there is no webhook {webhook_id} of {asks.subject}")


def _is_theirs(webhook: Webhook, asks: Principal) -> bool:
    return asks.scope.includes(Scope.OPERATOR) or webhook.created_by == asks.subject


def _view(webhook: Webhook, known: Deliveries) -> WebhookView:
    return WebhookView(
        id=webhook.id,
        url=webhook.shown_url,
        kinds=webhook.kinds,
        labels=webhook.labels,
        format=webhook.format,
        owner=webhook.owner,
        created_by=webhook.created_by,
        created_at=moment(webhook.created_ms),
        delivered=known.delivered,
        dropped=known.dropped,
        delivered_at=maybe_moment(known.delivered_ms),
        last_error=known.last_error,
        disabled=known.disabled,
    )


@dataclass
class Delivery:
    """Sends one webhook what it is owed, in the order of the events. Run by the leader alone.

    The cursor moves when the receiver has taken an event: after a crash in between it is sent again,
    under the same ``webhook-id``.

    Args:
        ports: The world.
        sender: Sends to receivers.
        epoch: The leader's term.
        webhook: The webhook.
        known: How far it is.
    """

    ports: Ports
    sender: WebhookSender
    epoch: int
    webhook: Webhook
    known: Deliveries

    async def batch(self) -> Sequence[tuple[FeedEntry, EventView | None]]:
        """The next entries of the feed, each with its event if the webhook gets it."""
        try:
            entries = await self.ports.events.read(self.known.cursor, _BATCH)
        except CursorExpiredError:
            # The receiver was away for longer than events are kept.
            lost = self.known.dropped + 1
            await self._save(last_error="events were trimmed before they were sent", dropped=lost)
            entries = await self.ports.events.read(None, _BATCH)
        wanted = EventFilter(
            kinds=self.webhook.kinds, owner=self.webhook.owner, labels=self.webhook.labels
        )
        events = {event.id: event for event in await chosen(self.ports, wanted, entries)}
        return [(entry, events.get(entry.id)) for entry in entries]

    async def send(self, event: EventView) -> None:
        """Send one event, once.

        Raises:
            DeliveryError: The receiver did not take it, or it could not be sent.
        """
        now_ms = await self.ports.clock.now_ms()
        known = await self.ports.jobs.summaries_of([event.job_id])
        try:
            body = body_of(self.webhook, event, known[0].name if known else None)
            message = message_id(self.webhook, event)
            headers = headers_of(self.webhook, message, body, now_ms // 1000)
            await self.sender.send(self.webhook.url, headers, body)
        except DeliveryError:
            raise
        except Exception as error:  # whoever may submit chose the URL: it must not end the term
            _log.exception("webhook_fault", webhook_id=self.webhook.id)
            raise DeliveryError(f"{type(error).__name__}: {error}") from error

    async def delivered(self, entry: FeedEntry) -> bool:
        """The receiver took the event; False if the webhook was removed meanwhile."""
        return await self._save(
            cursor=entry.id,
            delivered=self.known.delivered + 1,
            delivered_ms=await self.ports.clock.now_ms(),
            last_error=None,
        )

    async def failed(self, error: DeliveryError) -> bool:
        """A try failed; False if the webhook was removed meanwhile."""
        return await self._save(last_error=str(error)[:500], disabled=error.is_gone)

    async def dropped(self, entry: FeedEntry) -> bool:
        """The event is given up; False if the webhook was removed meanwhile."""
        return await self._save(cursor=entry.id, dropped=self.known.dropped + 1)

    async def passed(self, entry: FeedEntry) -> bool:
        """Up to this entry nothing is owed; False if the webhook was removed meanwhile."""
        return self.known.cursor == entry.id or await self._save(cursor=entry.id)

    async def _save(self, **changes: object) -> bool:
        self.known = self.known.model_copy(update=changes)
        return await self.ports.webhooks.save(self.webhook.id, self.known, self.epoch)
