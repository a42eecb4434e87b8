"""The loop of one pool: rounds every two seconds, fewer while it does not answer."""

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Final

import structlog
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    wait_random_exponential,
)

from services.controller.domain.errors import MeshloomError
from services.controller.loops.store_retry import StoreRetry, Troubles
from services.controller.ports.coordination import Ports
from services.controller.ports.pools import PoolError, RunnablePool
from services.controller.use_cases.provision import PoolRounds

_EVERY_S: Final = 2.0
_log = structlog.get_logger()


async def keep_pool(
    ports: Ports,
    epoch: int,
    pool: RunnablePool,
    silent: MutableMapping[str, str],
    troubles: Troubles | None = None,
) -> None:
    """Do what the records of a pool's reservations say, until cancelled.

    A pool that does not answer stops nothing else: jobs on its nodes run on.

    Args:
        ports: The world.
        epoch: The term.
        pool: The pool, and how agents are started on its nodes.
        silent: Is told, by the pool's name, why it does not answer, while that is so.
        troubles: As of ``StoreRetry``.

    Raises:
        DeposedError: The term is over.
    """
    name = pool.pool.limits.name
    retry = StoreRetry(f"pool {name}", troubles=troubles)
    rounds = PoolRounds(ports, epoch, pool.pool, pool.agents)

    async def once() -> None:
        try:
            await rounds.once()
        except (PoolError, MeshloomError):
            raise
        except Exception as error:
            # Nothing that one scheduler says may end the term, and with it that of each next leader.
            _log.exception("pool_round_failed", pool=name)
            raise PoolError(f"{type(error).__name__}: {error}") from error

    tries = AsyncRetrying(
        retry=retry_if_exception_type(PoolError),
        wait=wait_random_exponential(multiplier=0.5, min=1.0, max=30.0),
        before_sleep=_note(name, silent),
    )
    try:
        while True:
            async for attempt in tries:
                with attempt:
                    await retry.round(once)
            silent.pop(name, None)
            await asyncio.sleep(_EVERY_S)
    finally:
        silent.pop(name, None)


def _note(name: str, silent: MutableMapping[str, str]) -> Callable[[RetryCallState], None]:
    def note(state: RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        if name not in silent:
            _log.warning("pool_does_not_answer", pool=name, error=str(error))
        silent[name] = str(error)

    return note
