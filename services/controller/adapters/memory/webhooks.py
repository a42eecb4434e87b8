"""Webhooks in memory."""

from collections.abc import Mapping

from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.access.webhook import Deliveries, Webhook
from services.controller.ports.webhooks import Most


class MemoryWebhooks:
    """The port ``WebhookStore``."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def put(self, webhook: Webhook, deliveries: Deliveries, most: Most) -> bool:
        """See ``WebhookStore.put``."""
        known = self._server.webhooks.values()
        own = sum(one.created_by == webhook.created_by for one in known)
        if len(known) >= most.of_all or own >= most.of_one:
            return False
        self._server.webhooks[webhook.id] = webhook
        self._server.deliveries[webhook.id] = deliveries
        return True

    async def every(self) -> list[Webhook]:
        """See ``WebhookStore.every``."""
        return [self._server.webhooks[name] for name in sorted(self._server.webhooks)]

    async def deliveries(self) -> Mapping[str, Deliveries]:
        """See ``WebhookStore.deliveries``."""
        return dict(self._server.deliveries)

    async def save(self, webhook_id: str, deliveries: Deliveries, epoch: int) -> bool:
        """See ``WebhookStore.save``."""
        self._server.refuse_deposed(epoch)
        if webhook_id not in self._server.webhooks:
            return False
        self._server.deliveries[webhook_id] = deliveries
        return True

    async def remove(self, webhook_id: str) -> bool:
        """See ``WebhookStore.remove``."""
        self._server.deliveries.pop(webhook_id, None)
        return self._server.webhooks.pop(webhook_id, None) is not None
