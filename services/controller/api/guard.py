"""Who may ask: bearer tokens and their rates."""

import asyncio
import hmac
import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from fastapi import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.controller.api.problems import problem_response, refusal
from services.controller.api.provenance import refuse_stranger
from services.controller.api.rates import Buckets
from services.controller.domain.access.rate import Rate
from services.controller.domain.access.token import BOOTSTRAP, LOCAL, Principal
from services.controller.domain.errors import MeshloomError
from services.controller.ports.coordination import Ports
from services.controller.use_cases.access import Refusal, identify

_PROTECTED: Final = "/v1"
_SCHEME: Final = "bearer"
# Hundreds of connections with requests that follow each other at once have one begin on each in every round of the
# loop, which then takes a second; an operator's request takes ten rounds.
_STRANGERS_A_ROUND: Final = 8
_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="meshloom"'}
DEFAULT_RATE: Final = Rate(per_s=100, burst=1000)


@dataclass(frozen=True)
class AccessPolicy:
    """Who may ask.

    ``token``: the operator's from the settings; None: on loopback, no token is wanted and everybody
    there is the operator ``local``. ``names``: under which the controller is served, beside those
    of loopback; without any, a controller that wants tokens is served under every name. ``rate``:
    of each token at this controller.
    """

    token: str | None = None
    names: frozenset[str] = frozenset()
    rate: Rate = DEFAULT_RATE


class Guard:
    """ASGI middleware that lets through who may ask, and says who it is.

    ``scope["state"]["principal"]`` is set for everything under ``/v1`` that goes on.
    """

    def __init__(self, app: ASGIApp, policy: AccessPolicy, ports: Ports) -> None:
        self._app = app
        self._policy = policy
        self._ports = ports
        self._buckets = Buckets(policy.rate)
        self._strangers = asyncio.Semaphore(_STRANGERS_A_ROUND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer why not."""
        if scope["type"] == "http":
            wants_token = self._policy.token is not None
            answer = refuse_stranger(
                scope, self._policy.names, any_name=wants_token and not self._policy.names
            )
            if answer is None and _is_protected(scope["path"]):
                try:
                    answer = await self._admit(scope)
                except MeshloomError as error:
                    answer = refusal(error, scope)
            if answer is not None or not _is_protected(scope["path"]):
                async with self._strangers:
                    await asyncio.sleep(0)
            if answer is not None:
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope) -> Response | None:
        """Note who asks; answer if they may not."""
        asks = await self._identify(Headers(scope=scope))
        if isinstance(asks, Refusal):
            return problem_response(
                HTTPStatus.UNAUTHORIZED, asks.reason, headers=_CHALLENGE, scope=scope
            )
        scope.setdefault("state", {})["principal"] = asks
        if asks.token_id is None:
            return None
        wait_ms = self._buckets.take(asks.token_id)
        if not wait_ms:
            return None
        return problem_response(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"a token may ask {self._policy.rate.per_s:g} times a second; wait {wait_ms} ms",
            headers={"Retry-After": str(math.ceil(wait_ms / 1000))},
            scope=scope,
        )

    async def _identify(self, headers: Headers) -> Principal | Refusal:
        bootstrap = self._policy.token
        if bootstrap is None:
            return LOCAL
        given = headers.getlist("authorization")
        if len(given) > 1:  # a proxy may have looked at another one of them
            return Refusal("send one Authorization header")
        scheme, _, shown = "".join(given).partition(" ")
        if scheme.lower() != _SCHEME or not shown:
            return Refusal("send a token as `Authorization: Bearer …` (MESHLOOM_TOKEN)")
        if hmac.compare_digest(shown.encode(), bootstrap.encode()):
            return BOOTSTRAP
        return await identify(self._ports, shown)


def _is_protected(path: str) -> bool:
    return path == _PROTECTED or path.startswith(f"{_PROTECTED}/")
