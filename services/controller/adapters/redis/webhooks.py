"""Webhooks in Redis."""

from collections.abc import Mapping
from typing import Any, Final

from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis.connection import RedisClients, answering
from services.controller.adapters.redis.script_parts import PLAIN_JSON
from services.controller.domain.access.webhook import Deliveries, Webhook
from services.controller.domain.errors import DeposedError
from services.controller.ports.webhooks import Most

_PUT: Final = (
    PLAIN_JSON
    + """
-- KEYS: webhooks, their deliveries; ARGV: id, webhook, deliveries, by whom, how many in all, and of one
local known = redis.call('HVALS', KEYS[1])
local own = 0
for _, text in ipairs(known) do
  local could, webhook = pcall(cjson.decode, text)
  if could and type(webhook) == 'table' and webhook.created_by == ARGV[4] then own = own + 1 end
end
if #known >= tonumber(ARGV[5]) or own >= tonumber(ARGV[6]) then return 'full' end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 'ok'
"""
)
_SAVE: Final = """
-- KEYS: epoch, webhooks, their deliveries; ARGV: epoch, id, deliveries
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'deposed' end
if redis.call('HEXISTS', KEYS[2], ARGV[2]) == 0 then return 'gone' end
redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
return 'ok'
"""


class RedisWebhooks:
    """The port ``WebhookStore``."""

    def __init__(self, clients: RedisClients) -> None:
        self._clients = clients
        self._put = clients.writes.register_script(_PUT)
        self._save = clients.writes.register_script(_SAVE)

    async def put(self, webhook: Webhook, deliveries: Deliveries, most: Most) -> bool:
        """See ``WebhookStore.put``."""
        with answering():
            status = await self._put(
                keys=[keys.WEBHOOKS, keys.WEBHOOK_DELIVERIES],
                args=[
                    webhook.id,
                    webhook.model_dump_json(),
                    deliveries.model_dump_json(),
                    webhook.created_by,
                    *most,
                ],
            )
        return bool(status == "ok")

    async def every(self) -> list[Webhook]:
        """See ``WebhookStore.every``."""
        records = await self._all(keys.WEBHOOKS)
        read = self._clients.unreadable.read
        found = (
            read(f"{keys.WEBHOOKS} {name}", Webhook.model_validate_json, records[name])
            for name in sorted(records)
        )
        return [webhook for webhook in found if webhook is not None]

    async def deliveries(self) -> Mapping[str, Deliveries]:
        """See ``WebhookStore.deliveries``."""
        records = await self._all(keys.WEBHOOK_DELIVERIES)
        read = self._clients.unreadable.read
        found = {
            name: read(f"{keys.WEBHOOK_DELIVERIES} {name}", Deliveries.model_validate_json, text)
            for name, text in records.items()
        }
        return {name: told for name, told in found.items() if told is not None}

    async def save(self, webhook_id: str, deliveries: Deliveries, epoch: int) -> bool:
        """See ``WebhookStore.save``."""
        with answering():
            status = await self._save(
                keys=[keys.EPOCH, keys.WEBHOOKS, keys.WEBHOOK_DELIVERIES],
                args=[epoch, webhook_id, deliveries.model_dump_json()],
            )
        if status == "deposed":
            raise DeposedError("another controller leads now")
        return bool(status == "ok")

    async def remove(self, webhook_id: str) -> bool:
        """See ``WebhookStore.remove``."""
        with answering():
            async with self._clients.writes.pipeline(transaction=True) as pipe:
                pipe.hdel(keys.WEBHOOKS, webhook_id)
                pipe.hdel(keys.WEBHOOK_DELIVERIES, webhook_id)
                removed, _ = await pipe.execute()
        return bool(removed)

    async def _all(self, key: str) -> dict[str, str]:
        with self._clients.answering(key):
            records: Any = await self._clients.reads.hgetall(key)
        return dict(records)
