"""What Redis has taken of a gang's curve and output, on its way into storage as it goes."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from services.contract.messages.base import Message
from services.contract.system.cancellation import end_if_told
from services.worker.agent.host.reserve import in_storage_thread
from services.worker.agent.storage.record_files import KINDS, EntryId, Part, publish
from services.worker.agent.storage.shared_files import SharedFiles, as_shared

FLUSH_S: Final = 5.0
"""A Redis that is wiped costs the curve what came within this time, and within the writing."""
_RESTS: Final = 10
# Ids that Redis did not give: it counts from 0 within each millisecond.
_OWN_NUMBERS: Final = 1 << 20
_WaitingKey = tuple[str, int, str]
_log = structlog.get_logger()


class Journal:
    """Appends records to the files of their jobs. Run ``run`` as a task.

    While storage does not take them they wait, as many as Redis keeps of a job; older ones are let go.

    Args:
        files: The storage.
        writer: ``<node id>.<incarnation>``: its files are written by nobody else.
        every_s: So often.
    """

    def __init__(self, files: SharedFiles | Path, writer: str, every_s: float = FLUSH_S) -> None:
        self._files = as_shared(files)
        self._unpublished: set[Path] = set()
        self._publish_at = 0.0
        self._writer = writer
        self._every_s = every_s
        self._waiting: dict[_WaitingKey, deque[tuple[EntryId, str]]] = {}
        self._writing = asyncio.Lock()
        self._refused: str | None = None
        self._own = itertools.count(_OWN_NUMBERS)

    def take(
        self,
        job_id: str,
        fence: int,
        told: Mapping[str, Sequence[Message]],
        ids: Mapping[str, str],
    ) -> None:
        """Have records of one attempt appended.

        Args:
            job_id: The job.
            fence: The attempt.
            told: By kind, see ``KINDS``.
            ids: By kind, the ids that Redis gave them, separated by blanks; "" where it took none.
        """
        for name, records in told.items():
            if records:
                names = self._ids(ids.get(name, ""), len(records))
                texts = [record.model_dump_json() for record in records]
                entries = list(zip(names, texts, strict=True))
                self._put((job_id, fence, name), entries)

    async def run(self) -> None:
        """Append every few seconds, until cancelled."""
        while True:
            end_if_told()
            await asyncio.sleep(self._every_s)
            await self.flush()
            if time.monotonic() >= self._publish_at:
                await self.publish()

    async def flush(self, job_id: str | None = None) -> None:
        """Append what waits now, of this job or (None) of all."""
        async with self._writing:
            for key in list(self._waiting):
                if job_id in {None, key[0]}:
                    await self._append(key)

    async def _append(self, key: _WaitingKey) -> None:
        job_id, fence, name = key
        entries = self._waiting.pop(key)
        part = Part(self._files.root, job_id, KINDS[name], fence, self._writer)
        try:
            await in_storage_thread(self._write, part, entries)
            self._unpublished.add(part.path)
        except FileNotFoundError:
            return  # storage holds nothing of the job any more
        except OSError as error:
            if self._refused != str(error):
                _log.warning("records_wait_for_storage", job=job_id, why=str(error))
            self._refused = str(error)
            came_since = self._waiting.pop(key, ())
            self._put(key, [*entries, *came_since])
        else:
            self._refused = None

    def _write(self, part: Part, entries: Sequence[tuple[EntryId, str]]) -> None:
        self._files.require_known()
        part.append(entries)

    async def publish(self) -> None:
        """Have all nodes see what was appended."""
        await in_storage_thread(self._publish)

    def _publish(self) -> None:
        # A bucket takes whole files: where that takes long, it is not done at each flush.
        began = time.monotonic()
        for path in list(self._unpublished):
            self._unpublished.discard(path)
            try:
                if path.exists():  # else it was closed
                    publish(self._files, path)
            except OSError as error:
                self._unpublished.add(path)
                _log.warning("records_not_published", path=str(path), why=str(error))
        took_s = time.monotonic() - began
        self._publish_at = began + _RESTS * took_s

    def _put(self, key: _WaitingKey, entries: Sequence[tuple[EntryId, str]]) -> None:
        waiting = self._waiting.setdefault(key, deque(maxlen=KINDS[key[2]].kept))
        waiting.extend(entries)

    def _ids(self, given: str, count: int) -> list[EntryId]:
        """Those of ``count`` records; of our own where Redis gave none."""
        texts = given.split(" ")
        if len(texts) == count and all(texts):
            return [EntryId.parse(text) for text in texts]
        now_ms = time.time_ns() // 1_000_000
        return [EntryId(now_ms, next(self._own)) for _ in range(count)]
