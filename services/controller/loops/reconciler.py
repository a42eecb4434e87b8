"""The reconciler's loop: looks once a second, and when it is woken; half of the time at most."""

import asyncio
import time
from typing import Final

from services.contract.system.cancellation import end_if_told
from services.controller.domain.errors import StoreUnavailableError
from services.controller.domain.scheduling.elastic import GrowthDelay
from services.controller.loops.observer import Observer
from services.controller.loops.store_retry import StoreRetry, Troubles
from services.controller.ports.coordination import Ports
from services.controller.use_cases.reconcile import Reconciler

_WATCH_EVERY_S: Final = 1.0
_UNOBSERVED: Final = Observer()
_LONGEST_GAP_S: Final = 0.25


async def reconcile(
    ports: Ports,
    epoch: int,
    growth_delay: GrowthDelay,
    troubles: Troubles | None = None,
    observer: Observer = _UNOBSERVED,
) -> None:
    """Reconcile until cancelled; ``observer`` is told how long each look takes.

    Raises:
        ExceptionGroup: With the DeposedError that says that the term is over.
    """
    reconciler = Reconciler(ports, epoch, growth_delay)
    looked_at = -_WATCH_EVERY_S
    retry = StoreRetry("reconciler", reconciler.forget_health, troubles)

    async def listen_and_look() -> None:
        nonlocal looked_at
        async with ports.listen() as waker:
            while True:
                began = time.monotonic()
                with observer.looking():
                    rest_s = await reconciler.look()
                looked_at = ended = time.monotonic()
                observer.looked(ended - began)
                retry.succeeded()
                await waker.wait(rest_s)
                # While one change follows another, requests have every other moment to themselves.
                gap_s = min(ended - began, _LONGEST_GAP_S) - (time.monotonic() - ended)
                if gap_s > 0:
                    await asyncio.sleep(gap_s)

    async def look() -> None:
        while True:
            await retry.round(listen_and_look)

    async def watch() -> None:
        while True:
            end_if_told()
            try:
                # A look asks for the time, too: this is for those that take long.
                if time.monotonic() - looked_at >= _WATCH_EVERY_S:
                    await reconciler.watch()
            except StoreUnavailableError:  # the loop beside this one says so
                reconciler.forget_health()
            await asyncio.sleep(_WATCH_EVERY_S)

    async with asyncio.TaskGroup() as group:
        group.create_task(look())
        group.create_task(watch())
