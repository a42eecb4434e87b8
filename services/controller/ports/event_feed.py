"""The events of all jobs, in the order in which they were written."""

from dataclasses import dataclass
from typing import Protocol

from services.controller.ports.machines import Entry


@dataclass(frozen=True)
class FeedEntry(Entry):
    """An event of a job. Its id is its place in the feed, not in the job's own log."""

    job_id: str


class EventFeed(Protocol):
    """The newest events of all jobs. Each is written together with what it reports."""

    async def read(self, after: str | None, limit: int) -> list[FeedEntry]:
        """Up to ``limit`` events behind ``after`` (None: from the oldest that is kept), oldest first.

        Raises:
            CursorExpiredError: Events behind ``after`` may have been trimmed.
        """
        ...

    async def newest(self) -> str:
        """The id of the newest event; ``0-0`` if there is none."""
        ...

    async def wait(self, after: str, timeout_s: float) -> None:
        """Return once there is an event behind ``after``, or after ``timeout_s`` seconds."""
        ...
