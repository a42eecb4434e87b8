"""Long work in an event loop, cut or queued such that others have their turns in between."""

import asyncio
import contextlib
import gc
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

# The loop that reads and shows jobs also renews the lead; a spec of 64 KiB takes a thirtieth of a second.
_TURN_S: Final = 0.01
# Of all who work long, the looks of the leader included. A request takes a dozen rounds.
_GO_ON_A_ROUND: Final = 4
_LONGEST_PAUSE_S: Final = 1.0
# Longer ones make others wait; after shorter ones who looks through much waits more often for those who work long.
_PART_S: Final = 1.0
T = TypeVar("T")


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items. Where what is done with them takes long, others have their turn before the next one.

    Of thirty who do so at once all would go on in each round of the loop, which would take a third of a second: few of them do.
    """
    began = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - began > _TURN_S:
            await _rounds.setdefault(asyncio.get_running_loop(), _Rounds()).later()
            began = time.monotonic()


class _Rounds:
    """Lets few of those who wait go on in each round of a loop, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_planned = False

    async def later(self) -> None:
        """Waits for a later round in which there is room."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._plan()
        await turn

    def _plan(self) -> None:
        if self._waiting and not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_planned = False
        left = _GO_ON_A_ROUND
        while left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # as that of one who was cancelled is
                turn.set_result(None)
                left -= 1
        self._plan()


# Not one for all: a process may have several loops, each in a thread of its own.
_rounds: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _Rounds]] = WeakKeyDictionary()


async def rest_since(began: float) -> None:
    """Leave the loop to others for as long as was worked since ``began``, by the loop's clock.

    Where one item takes a twentieth of a second, so does each round of the loop, of which a request takes dozens.
    """
    worked_s = asyncio.get_running_loop().time() - began
    await asyncio.sleep(min(worked_s, _LONGEST_PAUSE_S))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Within, no garbage is looked for: among half a million new objects that takes three times as long as to make them.

    One thread of a process at a time: the first that ends it, ends it for all.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


GiveWay = Callable[[], Awaitable[None]]


async def at_once() -> None:
    """Of whoever has no turn to give way from."""


class _Turn:
    """Somebody's hold on what one has at a time."""

    def __init__(self, of_all: asyncio.Lock) -> None:
        self._all = of_all
        self._is_held = False
        self._began = 0.0

    async def begin(self) -> None:
        """Waits for it."""
        await self._all.acquire()
        self._is_held, self._began = True, time.monotonic()

    def end(self) -> None:
        """Not without hold: whoever was cancelled as it waited for the next part has none."""
        if self._is_held:
            self._is_held = False
            self._all.release()

    async def give_way(self) -> None:
        """Ends it and waits for another one, if it has become long."""
        if time.monotonic() - self._began >= _PART_S:
            self.end()
            await self.begin()


class Turns:
    """Whoever asks a hundred times at once waits for each; others wait for one of these at most."""

    def __init__(self) -> None:
        self._all = asyncio.Lock()
        self._own: dict[str, asyncio.Lock] = {}
        self._asking: Counter[str] = Counter()

    @property
    def is_taken(self) -> bool:
        """Whether somebody works."""
        return self._all.locked()

    @contextlib.asynccontextmanager
    async def of(self, subject: str) -> AsyncIterator[None]:
        """Within, nobody else works. Turns come as they were asked for, one of each subject."""
        async with self.in_parts(subject):
            yield

    @contextlib.asynccontextmanager
    async def in_parts(self, subject: str) -> AsyncIterator[GiveWay]:
        """As `of`, but where what it gives is called, all who wait have a turn first if this one has become long."""
        own = self._own.setdefault(subject, asyncio.Lock())
        self._asking[subject] += 1
        try:
            # Locks are given in the order in which they were asked for.
            async with own:
                turn = _Turn(self._all)
                await turn.begin()
                try:
                    yield turn.give_way
                finally:
                    turn.end()
        finally:
            self._asking[subject] -= 1
            if not self._asking[subject]:
                del self._asking[subject], self._own[subject]
