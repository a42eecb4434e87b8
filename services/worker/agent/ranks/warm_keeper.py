"""Keeps one warm process alive, whatever kills it, without starting it in a hot loop.

It is a fork of a template, which is kept alive, too, and has the import of torch behind it.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from services.contract.messages.warm_channel import ForkProgram, RankForked, RankReaped
from services.worker.agent.host.folders import NodeFolder
from services.worker.agent.host.processes import STOPPED, process_state
from services.worker.agent.host.removal import remove_what_can_be
from services.worker.agent.ranks.template_link import Imported, TemplateLink, WarmGoneError
from services.worker.agent.ranks.warm_link import WarmLink

READY_WITHIN_S: Final = 120.0
_PAUSE_S: Final = 0.5
STOPPED_LOOKS: Final = 5
_LOOK_EVERY_S: Final = 2.0
_log = structlog.get_logger()
_FAILED: Final = retry_if_exception_type((WarmGoneError, OSError))
# What a node lacks it may lack for long, and the nodes of a cluster lack it at one moment.
_WAIT: Final = wait_random_exponential(multiplier=1.0, min=_PAUSE_S, max=30.0)


class WarmKeeper:
    """The node's template and warm process, through all of their lives.

    Args:
        imported: What they and all ranks know.
        mark: Of this life of the agent.
        folder: Where their output goes.
    """

    def __init__(self, imported: Imported, mark: str, folder: NodeFolder) -> None:
        self._imported = imported
        self._mark = mark
        self._folder = folder
        self._template: TemplateLink | None = None
        self._link: WarmLink | None = None
        self._failure: str | None = None
        self._changed = asyncio.Condition()

    async def run(
        self,
        on_rank: Callable[[RankForked | RankReaped], None],
        on_gone: Callable[[str], None],
    ) -> None:
        """Start them, wait for their ends, start them again; until cancelled, which ends them.

        ``on_rank`` is called with every rank that lives or is dead, in order, ``on_gone`` with the
        reason when the warm process died, and all of its ranks with it.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_template())
            group.create_task(self._keep_warm(on_rank, on_gone))

    async def ready(self) -> WarmLink:
        """The live process, once it has imported everything.

        Raises:
            WarmGoneError: It failed to start, or takes too long.
        """
        try:
            async with asyncio.timeout(READY_WITHIN_S), self._changed:
                await self._changed.wait_for(lambda: self._living() or self._failure)
        except TimeoutError:
            raise WarmGoneError(
                f"the warm process was not ready within {READY_WITHIN_S:.0f} s"
            ) from None
        link = self._living()
        if link is None:
            raise WarmGoneError(self._failure)
        return link

    async def fork_program(self, order: ForkProgram, descriptors: tuple[int, int, int, int]) -> int:
        """Fork a program from the template; answer its process id.

        Raises:
            WarmGoneError: The template failed to start, takes too long, or died.
        """
        await self.ready()
        if self._template is None:
            raise WarmGoneError("the template has just ended")
        return await self._template.fork(order, descriptors)

    def _living(self) -> WarmLink | None:
        return self._link if self._link is not None and not self._link.gone.is_set() else None

    async def _keep_template(self) -> None:
        adopted = await TemplateLink.adopt(self._imported, self._folder)
        while True:
            async for attempt in AsyncRetrying(retry=_FAILED, wait=_WAIT):
                with attempt:
                    template, adopted = adopted, None
                    await self._live_template(template)
            await asyncio.sleep(_PAUSE_S)

    async def _live_template(self, adopted: TemplateLink | None) -> None:
        """One life of it, from the start unless it is ``adopted``, to its end.

        Raises:
            WarmGoneError, OSError: It failed to start.
        """
        template = adopted
        try:
            if template is None:
                # It may be a folder by now, with any number of files.
                await asyncio.to_thread(remove_what_can_be, self._folder.template_socket)
                template = TemplateLink.start(self._imported, self._folder)
            async with _ending_if_stopped(template, "template"):
                await self._until_gone(template)
        except WarmGoneError as error:
            await self._fail(str(error))
            raise
        except OSError as error:
            await self._fail(f"the template cannot be started: {error}")
            raise
        finally:
            if template is not None:
                template.kill()
                await template.gone.wait()

    async def _until_gone(self, template: TemplateLink) -> None:
        ready = await template.ready
        _log.info("template_ready", pid=template.pid, import_s=round(ready.import_s, 3))
        async with self._changed:
            self._template, self._failure = template, None
            self._changed.notify_all()
        await template.gone.wait()
        self._template = None
        _log.error("template_gone", reason=template.last_words())

    async def _keep_warm(
        self, on_rank: Callable[[RankForked | RankReaped], None], on_gone: Callable[[str], None]
    ) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._template)
                template = self._template
            if template is None:  # it is gone already
                continue
            began = time.monotonic()
            try:
                link = await WarmLink.fork_from(
                    template, self._mark, self._folder.warm_log, on_rank
                )
            except (WarmGoneError, OSError) as error:
                _log.error("warm_process_failed", reason=str(error))
            else:
                try:
                    await self._live(link, on_gone)
                finally:
                    link.kill()
                    await link.gone.wait()
            await asyncio.sleep(max(0.0, began + _PAUSE_S - time.monotonic()))

    async def _live(self, link: WarmLink, on_gone: Callable[[str], None]) -> None:
        _log.info("warm_process_ready", pid=link.pid)
        await self._change(link)
        async with _ending_if_stopped(link, "warm process"):
            await link.gone.wait()
        reason = f"the warm process (pid {link.pid}) of the node died"
        _log.error("warm_process_gone", reason=link.last_words())
        await self._change(None)
        on_gone(reason)

    async def _change(self, link: WarmLink | None) -> None:
        async with self._changed:
            self._link = link
            self._changed.notify_all()

    async def _fail(self, why: str) -> None:
        _log.error("template_failed", reason=why)
        async with self._changed:
            self._failure = why
            self._changed.notify_all()


@contextlib.asynccontextmanager
async def _ending_if_stopped(link: TemplateLink | WarmLink, what: str) -> AsyncIterator[None]:
    """Within, a process that somebody stops and does not continue is killed.

    Stopped, it would hold up launches, and never tell that a rank is dead.
    """
    watching = asyncio.create_task(_end_if_stopped(link, what))
    try:
        yield
    finally:
        watching.cancel()


async def _end_if_stopped(link: TemplateLink | WarmLink, what: str) -> None:
    looks = 0
    while looks < STOPPED_LOOKS:  # while the agent is stopped itself, none passes
        await asyncio.sleep(_LOOK_EVERY_S)
        looks = looks + 1 if process_state(link.pid) in STOPPED else 0
    _log.error("stopped_process_killed", what=what, pid=link.pid)
    link.kill()
