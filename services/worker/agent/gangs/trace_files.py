"""The files of a gang's traces: all nodes see them, or they are removed, before the controller is told."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import structlog

from services.contract.jobs.traces import MOST_BYTES, remove_drafts, trace_file
from services.contract.messages.facts import Fact, TraceFailed, TraceRecorded
from services.worker.agent.host.reserve import in_storage_thread
from services.worker.agent.storage.shared_files import SharedFiles

_log = structlog.get_logger()


class TraceFiles:
    """Works in threads, one task a file.

    Args:
        files: The storage.
        root: Below which ranks write.
        tell: Takes the facts.
    """

    def __init__(self, files: SharedFiles, root: Path, tell: Callable[[Fact], None]) -> None:
        self._files = files
        self._root = root
        self._tell = tell
        self._under_way: set[asyncio.Task[None]] = set()
        self._publishing = asyncio.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether all is told."""
        return not self._under_way

    def publish(self, fact: TraceRecorded) -> None:
        """Have all nodes see the file, then tell the fact, or that it failed and where the file stays."""
        self._run(self._publish(fact))

    def drop(self, rank: int, trace_id: str, fact: TraceFailed) -> None:
        """Remove what a dead rank had not finished, then tell the fact."""
        self._run(self._drop(trace_file(self._root, fact.job_id, trace_id, rank), fact))

    async def _publish(self, fact: TraceRecorded) -> None:
        path = Path(fact.path)

        def publish() -> str:
            size = path.lstat().st_size
            if size > MOST_BYTES:
                raise OSError(f"the file has more than {MOST_BYTES >> 20} MiB")
            self._files.publish(path, size=size)
            return self._files.place(path)

        try:
            # One at a time: a bucket that does not answer must not hold all threads of the agent.
            async with self._publishing:
                place = await in_storage_thread(publish)
        except OSError as error:
            about = fact.model_dump(include={"job_id", "fence", "node_id", "trace_id", "rank"})
            why = f"{error}; its file stays on {fact.node_id}: {path}"
            self._tell(TraceFailed(**about, reason=why))
        else:
            self._tell(fact.model_copy(update={"path": place}))

    async def _drop(self, file: Path, fact: TraceFailed) -> None:
        try:
            await in_storage_thread(remove_drafts, file)
        except OSError as error:  # a round through the storage removes them later
            _log.warning("trace_not_removed", trace=fact.trace_id, why=str(error))
        self._tell(fact)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
