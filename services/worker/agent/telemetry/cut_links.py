"""Which ranks, as they meet those of other nodes, send to a link that carries nothing.

They wait for a connection or for a word of the others, and cannot say which of the two it is: the kernel can.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from services.contract.words.states import RankPhase
from services.worker.agent.host.connections import unanswered
from services.worker.agent.telemetry.hang import Mark

LOOKS_EVERY_S: Final = 2.0
SENT_AGAIN: Final = 3
"""A lossy link loses one packet twice now and then."""


class CutLinks:
    """Looks at the connections of ranks that meet, in a thread, every two seconds."""

    def __init__(self) -> None:
        self._found: frozenset[int] = frozenset()
        self._due_at = 0.0
        self._looking: asyncio.Task[frozenset[int]] | None = None

    def of(self, marks: Mapping[int, Mark], pids: Mapping[int, int]) -> frozenset[int]:
        """The ranks that were cut off at the last look, of those that still meet; begins the next look if it is due.

        Args:
            marks: What the boards show.
            pids: The processes of the ranks that live.
        """
        meeting = {
            rank: pids[rank]
            for rank, mark in marks.items()
            if rank in pids and mark.phase is RankPhase.RENDEZVOUS
        }
        if self._looking is not None and self._looking.done():
            self._found, self._looking = self._looking.result(), None
        if meeting and self._looking is None and time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + LOOKS_EVERY_S
            self._looking = asyncio.create_task(asyncio.to_thread(_cut_off, meeting))
        return self._found.intersection(meeting)


def _cut_off(pids: Mapping[int, int]) -> frozenset[int]:
    return frozenset(
        rank
        for rank, pid in pids.items()
        if any(each.retries >= SENT_AGAIN for each in unanswered(pid))
    )
