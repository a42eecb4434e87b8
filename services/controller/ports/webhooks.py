"""Where webhooks are kept, and who sends what they are owed."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from services.controller.domain.access.webhook import Deliveries, Webhook


class Most(NamedTuple):
    """How many webhooks there may be: in all, and by one subject."""

    of_all: int
    of_one: int


class WebhookStore(Protocol):
    """All webhooks, and how far each is."""

    async def put(self, webhook: Webhook, deliveries: Deliveries, most: Most) -> bool:
        """Keep a new webhook, unless there are as many as there may be; whether it was kept."""
        ...

    async def every(self) -> list[Webhook]:
        """All of them, oldest first."""
        ...

    async def deliveries(self) -> Mapping[str, Deliveries]:
        """How far each is, by id."""
        ...

    async def save(self, webhook_id: str, deliveries: Deliveries, epoch: int) -> bool:
        """Keep how far one is; False if it was removed meanwhile.

        Raises:
            DeposedError: ``epoch`` is not the present one.
        """
        ...

    async def remove(self, webhook_id: str) -> bool:
        """Forget a webhook; whether there was one."""
        ...


class DeliveryError(Exception):
    """The receiver did not take it. ``is_gone``: it answered that it never will (410)."""

    def __init__(self, reason: str, *, is_gone: bool = False) -> None:
        super().__init__(reason)
        self.is_gone = is_gone


class AddressRefusedError(DeliveryError):
    """The URL leads where no webhook may lead."""


class WebhookSender(Protocol):
    """Sends to receivers outside."""

    def check(self, url: str) -> None:
        """Refuse a URL that can never be sent to.

        Raises:
            AddressRefusedError: With the reason.
        """
        ...

    async def send(self, url: str, headers: Mapping[str, str], body: bytes) -> None:
        """POST the body; returns once the receiver answered with a 2xx status.

        Raises:
            DeliveryError: It did not.
        """
        ...
