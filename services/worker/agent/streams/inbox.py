"""Commands to this node, read as a consumer group: each is handled, then acknowledged."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, cast

import structlog
from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.contract.api.pointers import pointer_of
from services.contract.messages.commands import COMMAND, Command
from services.contract.redis import redis_keys
from services.contract.system.cancellation import end_if_told
from services.worker.agent.streams.redis_clients import BLOCK_MS, while_away

_AT_ONCE: Final = 64
_FAULTS_NAMED: Final = 3
_log = structlog.get_logger()
Entry = tuple[str, dict[str, str] | None]


class Inbox:
    """Reads ``ml:node:<id>:inbox``.

    Args:
        redis: A client whose socket waits longer than ``BLOCK_MS``.
        node_id: Whose inbox.
        handle: Carries a command out. Commands are begun in order and may overlap.
        refuse: Called with the text of a command that cannot be read, and why.
        acknowledge: Called with the entry of a command that was carried out.
    """

    def __init__(
        self,
        redis: Redis,
        node_id: str,
        handle: Callable[[Command], Awaitable[None]],
        refuse: Callable[[str, str], None],
        acknowledge: Callable[[str], None],
    ) -> None:
        self._redis = redis
        self._key = redis_keys.node_inbox(node_id)
        self._consumer = node_id
        self._handle = handle
        self._refuse = refuse
        self._acknowledge = acknowledge
        self._newest = (0, 0)
        self._has_pending_in_hand = False

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as handling:
            while True:
                async for attempt in while_away(self._say_away):
                    with attempt:
                        end_if_told()
                        await self._read(handling)

    async def _read(self, handling: asyncio.TaskGroup) -> None:
        if not self._has_pending_in_hand:
            await self._read_pending(handling)
        self._has_pending_in_hand = False
        for entry_id, fields in await self._fetch(">", block_ms=BLOCK_MS):
            self._begin(handling, entry_id, fields)
        self._has_pending_in_hand = True

    async def _read_pending(self, handling: asyncio.TaskGroup) -> None:
        """A lost answer leaves its entries pending: they come first."""
        with contextlib.suppress(ResponseError):  # the group is there already
            await self._redis.xgroup_create(
                self._key, redis_keys.INBOX_GROUP, id="0", mkstream=True
            )
        # Those up to the newest that this life has seen are in hand, or their acknowledgement is
        # on its way.
        for entry_id, fields in await self._fetch("0", block_ms=None):
            if _position(entry_id) > self._newest:
                self._begin(handling, entry_id, fields)

    def _say_away(self, why: str) -> None:
        _log.warning("inbox_unreadable", why=why)

    async def _fetch(self, after: str, *, block_ms: int | None) -> list[Entry]:
        # All pending ones at once: what is in hand would else hide what lies behind it.
        count = _AT_ONCE if block_ms is not None else None
        answer = await self._redis.xreadgroup(
            redis_keys.INBOX_GROUP, self._consumer, {self._key: after}, count=count, block=block_ms
        )
        streams = cast("list[tuple[str, list[Entry]]]", answer or [])
        return [entry for _, entries in streams for entry in entries]

    def _begin(
        self, handling: asyncio.TaskGroup, entry_id: str, fields: dict[str, str] | None
    ) -> None:
        self._newest = max(self._newest, _position(entry_id))
        handling.create_task(self._carry_out(entry_id, fields))

    async def _carry_out(self, entry_id: str, fields: dict[str, str] | None) -> None:
        body = (fields or {}).get(redis_keys.MESSAGE_FIELD, "")
        try:
            command = COMMAND.validate_json(body)
        except ValidationError as error:
            _log.error("unreadable_command", entry=entry_id, why=str(error))
            self._refuse(body, _in_a_line(error))
        else:
            try:
                await self._handle(command)
            except Exception:  # noqa: BLE001 the agent outlives any one command
                # A command that breaks its handler would break it again after each start.
                _log.exception("command_failed", entry=entry_id, kind=command.kind)
        self._acknowledge(entry_id)


def _position(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence)


def _in_a_line(error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_input=False)
    return "; ".join(f"{pointer_of(f['loc'])}: {f['msg']}" for f in faults[:_FAULTS_NAMED])
