"""Who asks for what others ask for, too, has their answer."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from services.controller.domain.errors import StoreUnavailableError

T = TypeVar("T")


class SharedReads(Generic[T]):
    """Reads what has one name once at a time; of those who wait meanwhile the next read answers all.

    A job may have eight thousand checkpoints of many ranks, which take fifty megabytes as they are read: thirty requests for
    them at one moment would take all the memory that a controller has.
    """

    def __init__(self) -> None:
        self._reads: WeakValueDictionary[str, _Reads[T]] = WeakValueDictionary()

    async def of(self, name: str, read: Callable[[], Awaitable[T]]) -> T:
        """What ``read`` answers, of whoever called it: it began after this was asked.

        Raises:
            StoreUnavailableError: It does, or did while this waited.
        """
        return await self._reads.setdefault(name, _Reads()).next(read)


class _Reads(Generic[T]):
    """Those of one name; kept as long as somebody waits."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._begun = 0
        self._failed = 0
        self._error: StoreUnavailableError | None = None
        self._answer: tuple[int, T] | None = None

    async def next(self, read: Callable[[], Awaitable[T]]) -> T:
        begun, failed = self._begun, self._failed
        async with self._lock:
            if self._answer is not None and self._answer[0] > begun:
                return self._answer[1]
            if self._error is not None and self._failed > failed:
                # Each would wait for seconds for what does not answer, one after another.
                raise StoreUnavailableError(str(self._error), self._error.why) from self._error
            self._begun += 1
            number = self._begun
            try:
                answer = await read()
            except StoreUnavailableError as error:
                self._error = error
                self._failed += 1
                raise
            self._answer = number, answer
            return answer
