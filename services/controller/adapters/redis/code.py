"""Uploaded code in Redis: one hash an archive, in parts, so that no reply is large."""

import secrets
from typing import Any, Final

from pydantic import ValidationError

from services.contract.jobs.code_archives import digest_of_hex, hex_of
from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis.connection import RedisClients, answering
from services.controller.domain.access.code import CodeLimits, Kept, UploadedCode
from services.controller.domain.errors import DeposedError, StoreUnavailableError

_PARTS_AT_ONCE: Final = 4
_RANDOM_BYTES: Final = 8

_NOW: Final = """
local function now_ms()
  local time = redis.call('TIME')
  return string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
end
"""

_KEEP: Final = (
    _NOW
    + """
-- KEYS: archive, its draft, all archives, what they are counted as
-- ARGV: hex digest, subject, counted bytes, room for all, room for one subject
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('DEL', KEYS[2])
  redis.call('ZADD', KEYS[3], now_ms(), ARGV[1])
  return 'known'
end
local counted = tonumber(ARGV[3])
local function is_beyond(field, room)
  return tonumber(redis.call('HGET', KEYS[4], field) or 0) + counted > tonumber(room)
end
local refused = is_beyond('', ARGV[4]) and 'full' or is_beyond(ARGV[2], ARGV[5]) and 'share'
if refused then
  redis.call('DEL', KEYS[2])
  return refused
end
if redis.call('EXISTS', KEYS[2]) == 0 then return 'lost' end
redis.call('RENAME', KEYS[2], KEYS[1])
redis.call('PERSIST', KEYS[1])
redis.call('ZADD', KEYS[3], now_ms(), ARGV[1])
redis.call('HINCRBY', KEYS[4], '', counted)
redis.call('HINCRBY', KEYS[4], ARGV[2], counted)
return 'new'
"""
)

_USE: Final = (
    _NOW
    + """
-- KEYS: archive, all archives; ARGV: hex digest
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('ZADD', KEYS[2], now_ms(), ARGV[1])
return 1
"""
)

_FORGET: Final = """
-- KEYS: archive, all archives, what they are counted as, epoch
-- ARGV: epoch, hex digest, the moment since when it must not have been used
if redis.call('GET', KEYS[4]) ~= ARGV[1] then return 'deposed' end
local used = redis.call('ZSCORE', KEYS[2], ARGV[2])
if not used or tonumber(used) >= tonumber(ARGV[3]) then return 'used' end
local known = redis.call('HMGET', KEYS[1], 'counted', 'subject')
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[2])
if known[1] then
  for _, field in ipairs({'', known[2]}) do
    if redis.call('HINCRBY', KEYS[3], field, -known[1]) <= 0 then
      redis.call('HDEL', KEYS[3], field)
    end
  end
end
return 'ok'
"""


class RedisCode:
    """The port ``CodeStore``."""

    def __init__(self, clients: RedisClients) -> None:
        self._clients = clients
        self._keep = clients.script(_KEEP)
        self._use = clients.script(_USE)
        self._forget = clients.script(_FORGET)

    async def keep(self, code: UploadedCode, body: bytes, limits: CodeLimits) -> Kept:
        """See ``CodeStore.keep``. It is written under another name, and renamed once it is whole."""
        name = hex_of(code.digest)
        draft = keys.code_draft(name, secrets.token_hex(_RANDOM_BYTES))
        starts = range(0, len(body), keys.CODE_PART_BYTES)
        parts = [body[start : start + keys.CODE_PART_BYTES] for start in starts]
        record: dict[Any, Any] = {
            "doc": code.model_dump_json(),
            "counted": code.counted_bytes,
            "subject": code.uploaded_by,
            keys.CODE_PARTS: len(parts),
        }
        with answering():
            async with self._clients.writes.pipeline(transaction=True) as pipe:
                pipe.hset(draft, mapping=record)
                pipe.expire(draft, keys.CODE_DRAFT_TTL_S)
                await pipe.execute()
            for first in range(0, len(parts), _PARTS_AT_ONCE):
                some: dict[Any, Any] = {
                    first + place: part
                    for place, part in enumerate(parts[first : first + _PARTS_AT_ONCE])
                }
                await self._clients.writes.hset(draft, mapping=some)
            status: Any = await self._keep(
                keys=[keys.code(name), draft, keys.CODES, keys.CODES_BYTES],
                args=[
                    name,
                    code.uploaded_by,
                    code.counted_bytes,
                    limits.store_bytes,
                    limits.share_bytes,
                ],
            )
        if status == "lost":
            raise StoreUnavailableError(
                f"Redis took longer than {keys.CODE_DRAFT_TTL_S} s for the archive; send it again"
            )
        kept: Kept = status
        return kept

    async def get(self, digest: str) -> UploadedCode | None:
        """See ``CodeStore.get``."""
        key = keys.code(hex_of(digest))
        with answering():
            text: Any = await self._clients.reads.hget(key, "doc")
        if text is None:
            return None
        try:
            return UploadedCode.model_validate_json(text)
        except ValidationError as error:
            self._clients.unreadable.note(key, text, error)
            return None

    async def use(self, digest: str) -> bool:
        """See ``CodeStore.use``."""
        name = hex_of(digest)
        with self._clients.answering(keys.code(name), keys.CODES):
            return bool(await self._use(keys=[keys.code(name), keys.CODES], args=[name]))

    async def unused(self, before_ms: int) -> list[str]:
        """See ``CodeStore.unused``."""
        with self._clients.answering(keys.CODES):
            names: Any = await self._clients.reads.zrangebyscore(
                keys.CODES, "-inf", f"({before_ms}"
            )
        return [digest_of_hex(name) for name in names]

    async def forget(self, digest: str, before_ms: int, epoch: int) -> bool:
        """See ``CodeStore.forget``."""
        name = hex_of(digest)
        with answering():
            status = await self._forget(
                keys=[keys.code(name), keys.CODES, keys.CODES_BYTES, keys.EPOCH],
                args=[epoch, name, before_ms],
            )
        if status == "deposed":
            raise DeposedError("another controller leads now")
        return bool(status == "ok")
