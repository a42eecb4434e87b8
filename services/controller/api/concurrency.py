"""Who waits for whom: a subject's requests are worked on a few at a time, long ones by turns.

All run in one event loop, which goes round once for all that is ready: a hundred requests that came at one
moment and take a twentieth of a second each would keep it from renewing the lead.
"""

import asyncio
from collections import Counter
from http import HTTPStatus
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.contract.system.long_work import Turns
from services.controller.api.problems import problem_response
from services.controller.api.uploads import is_code

_AT_ONCE: Final = 8
# Each that waits has one of the connections, of which there are 512 unless the settings say otherwise.
_WAITING_AT_MOST: Final = 128
# Hundreds of connections, each opened again once it has its answer, are refused as often as they ask; an operator's
# request takes ten rounds of the loop.
_REFUSED_A_ROUND: Final = 2
# Parsing takes a third of it: other work of that round of the loop, or a process that was stopped meanwhile, is
# nothing that others have to be given time for.
_LONGEST_PAUSE_S_A_BYTE: Final = 4e-6
# It waits for a node, and works little.
_MAKES_A_PLAN: Final = ("POST", "/v1/plans")


class Shares:
    """ASGI middleware: lets eight requests of a subject work at a time, until their answers begin.

    Of all subjects one begins in each round of the loop, the subjects in turn.
    Of those that wait, and of streams, a subject has 128 at most: a further request gets 429. Those without a subject are short. Uploads have bounds of their own beside that.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._asking: Counter[str] = Counter()
        self._begun = Turns()
        self._refused = asyncio.Semaphore(_REFUSED_A_ROUND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on once there is a slot."""
        asks = scope.get("state", {}).get("principal")
        if asks is None:
            await self._app(scope, receive, send)
            return
        if is_code(scope):
            await self._begin(asks.subject)
            await self._app(scope, receive, send)
            return
        if self._asking[asks.subject] >= _WAITING_AT_MOST:
            refusal = problem_response(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{asks.subject} waits for the answers to {_WAITING_AT_MOST} requests, the most at a time",
                headers={"Retry-After": "1"},
                scope=scope,
            )
            async with self._refused:
                await asyncio.sleep(0)
            await refusal(scope, receive, send)
            return
        slots = self._slots.setdefault(asks.subject, asyncio.Semaphore(_AT_ONCE))
        self._asking[asks.subject] += 1
        holds = False

        def give_back() -> None:
            nonlocal holds
            if holds:
                holds = False
                slots.release()

        async def send_noted(message: Message) -> None:
            give_back()  # a stream goes on for hours
            await send(message)

        try:
            if (scope["method"], scope["path"]) != _MAKES_A_PLAN:
                await slots.acquire()
                holds = True
            await self._begin(asks.subject)
            await self._app(scope, receive, send_noted)
        finally:
            give_back()
            self._asking[asks.subject] -= 1
            if not self._asking[asks.subject]:
                del self._asking[asks.subject], self._slots[asks.subject]

    async def _begin(self, subject: str) -> None:
        """Wait for the turn of this subject's request: no other begins in the same round."""
        async with self._begun.of(subject):
            await asyncio.sleep(0)


class ParsingRounds:
    """Bodies are parsed one at a time, and after each one the loop is others' for about as long as it took.

    To parse and judge a body is one step of the loop, of up to a third of a second for the largest ones.
    """

    def __init__(self) -> None:
        self._turns = Turns()
        self._free_from = 0.0

    async def begin(self, subject: str, size: int) -> None:
        """Wait for the turn of this subject's body: who asked parses it before it awaits anything else."""
        loop = asyncio.get_running_loop()
        async with self._turns.of(subject):
            await asyncio.sleep(0)  # another may be parsed in this round
            await asyncio.sleep(max(0.0, self._free_from - loop.time()))
            # In the queue of the loop this is before the next one whose turn it is.
            loop.call_soon(self._parsed, loop.time(), size * _LONGEST_PAUSE_S_A_BYTE)

    def _parsed(self, began: float, longest_s: float) -> None:
        now = asyncio.get_running_loop().time()
        self._free_from = now + min(now - began, longest_s)
