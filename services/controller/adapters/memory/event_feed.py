"""The events of all jobs in memory."""

from services.controller.adapters.memory.server import MemoryServer
from services.controller.ports.event_feed import FeedEntry


class MemoryEventFeed:
    """The port ``EventFeed``; nothing is trimmed."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def read(self, after: str | None, limit: int) -> list[FeedEntry]:
        """See ``EventFeed.read``."""
        seen = _place(after or "0-0")
        return [entry for entry in self._server.feed if entry.place > seen][:limit]

    async def newest(self) -> str:
        """See ``EventFeed.newest``."""
        return self._server.feed[-1].id if self._server.feed else "0-0"

    async def wait(self, after: str, timeout_s: float) -> None:
        """See ``EventFeed.wait``."""
        seen = _place(after)
        await self._server.wait(
            timeout_s, lambda: bool(self._server.feed) and self._server.feed[-1].place > seen
        )


def _place(entry_id: str) -> tuple[int, int]:
    return FeedEntry(entry_id, "", "").place
