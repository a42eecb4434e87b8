"""Leadership, time and wake-ups in memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.controller.adapters.memory.server import MemoryServer


class MemoryLeadership:
    """The port ``Leadership``. A lease ends only by its release: this process cannot lose it."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def take(self, holder: str) -> int | None:
        """See ``Leadership.take``."""
        if self._server.leader is not None:
            return None
        self._server.leader = holder
        self._server.epoch += 1
        return self._server.epoch

    async def renew(self, holder: str) -> bool:
        """See ``Leadership.renew``."""
        return self._server.leader == holder

    async def release(self, holder: str) -> None:
        """See ``Leadership.release``."""
        if self._server.leader == holder:
            self._server.leader = None


class MemoryClock:
    """The port ``Clock``."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def now_ms(self) -> int:
        """See ``Clock.now_ms``."""
        return self._server.now_ms()


class MemoryWaker:
    """The port ``Waker``."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def wait(self, timeout_s: float) -> None:
        """See ``Waker.wait``."""
        async with self._server.changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._server.changed.wait()


@contextlib.asynccontextmanager
async def listening(server: MemoryServer) -> AsyncIterator[MemoryWaker]:
    """A waker, until the block ends."""
    yield MemoryWaker(server)
