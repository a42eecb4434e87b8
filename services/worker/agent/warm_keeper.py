"""Keeps one warm process alive, whatever kills it, without starting it in a hot loop."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import structlog

from services.contract.warm_channel import RankForked, RankReaped
from services.worker.agent.folders import NodeFolder
from services.worker.agent.warm_link import WarmGoneError, WarmLink

READY_WITHIN_S: Final = 120.0
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_log = structlog.get_logger()


class WarmKeeper:
    """The node's warm process, through all of its lives.

    Args:
        environment: What it and all ranks may know.
        trainer: What ranks run, as ``package.module:callable``.
        folder: Where its output goes.
    """

    def __init__(self, environment: dict[str, str], trainer: str, folder: NodeFolder) -> None:
        self._environment = environment
        self._trainer = trainer
        self._folder = folder
        self._link: WarmLink | None = None
        self._failure: str | None = None
        self._changed = asyncio.Condition()

    @property
    def pid(self) -> int | None:
        """The process of the present life."""
        return self._link.pid if self._link is not None else None

    async def run(
        self,
        on_rank: Callable[[RankForked | RankReaped], None],
        on_gone: Callable[[str], None],
    ) -> None:
        """Start it, wait for its end, start it again; until cancelled, which ends it.

        ``on_rank`` is called with every rank that lives or is dead, in order, ``on_gone`` with the
        reason when the warm process died, and all of its ranks with it.
        """
        pause = _FIRST_PAUSE_S
        while True:
            link = WarmLink.start(self._environment, self._trainer, self._folder.warm_log, on_rank)
            try:
                pause = await self._live(link, pause, on_gone)
            finally:
                link.kill()
                await link.gone.wait()
            await asyncio.sleep(pause)

    async def ready(self) -> WarmLink:
        """The live process, once it has imported everything.

        Raises:
            WarmGoneError: It failed to start, or takes too long.
        """
        try:
            async with asyncio.timeout(READY_WITHIN_S), self._changed:
                await self._changed.wait_for(lambda: self._link or self._failure)
        except TimeoutError:
            raise WarmGoneError(
                f"the warm process was not ready within {READY_WITHIN_S:.0f} s"
            ) from None
        if self._link is None:
            raise WarmGoneError(self._failure)
        return self._link

    async def settled(self) -> None:
        """Return once it has imported everything, or does not begin to."""
        with contextlib.suppress(WarmGoneError):
            await self.ready()

    async def _live(self, link: WarmLink, pause: float, on_gone: Callable[[str], None]) -> float:
        """One life of it; answers how long to wait before the next."""
        try:
            ready = await link.ready
        except WarmGoneError as error:
            _log.error("warm_process_failed", reason=str(error))
            await self._change(None, str(error))
            return min(2 * pause, _LONGEST_PAUSE_S)
        _log.info("warm_process_ready", pid=link.pid, import_s=round(ready.import_s, 3))
        await self._change(link, None)
        await link.gone.wait()
        reason = f"the warm process (pid {link.pid}) of the node died"
        _log.error("warm_process_gone", reason=link.last_words())
        await self._change(None, None)
        on_gone(reason)
        return _FIRST_PAUSE_S

    async def _change(self, link: WarmLink | None, failure: str | None) -> None:
        async with self._changed:
            self._link, self._failure = link, failure
            self._changed.notify_all()
