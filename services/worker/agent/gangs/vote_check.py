"""Reads the shards for which ranks vote, and has all nodes see them, before the votes go on to the controller.

So the manifest that is linked names only digests that an agent has seen, and each agent reads what
its own ranks wrote a moment ago, most of it from the page cache. Where checkpoints lie in a bucket the
shard is uploaded then; a bucket that does not answer is waited for, and training goes on. It is done in threads of the
gang's own, which stand back for training, so that one gang's large shard delays no other gang.
"""

import asyncio
import contextlib
import itertools
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from services.contract.messages.rank_pipe import RankVote
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import ShardFile
from services.contract.system.durable import StorageAwayError
from services.worker.agent.storage.shard_check import fault_of
from services.worker.agent.storage.shared_files import SharedFiles, as_shared

_MOST_THREADS: Final = 4
_MOST_WAITING: Final = 64
# A rank writes one shard while the one before it is read. Beyond these two small ones alone may wait: many
# votes for one large file, by links to it, would keep a gang that has ended for hours.
_ANY_SIZE: Final = 2
_MOST_BYTES_WAITING: Final = 16 << 30
_NICENESS: Final = 10
_TRIES_AGAIN_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
"""The waits between tries of an upload; the last for all more."""
Checked = Callable[[int, RankVote, str | None], None]
Waits = Callable[[int, RankVote, str], None]


class _OverError(Exception):
    """The answer is of no use any more."""


class VoteCheck:
    """Checks the votes of the ranks of one gang. No method blocks.

    Args:
        files: Where the checkpoints of all jobs lie.
        job_id: The job.
        ranks: How many there are.
        on_checked: Called in the loop with the rank, its vote, and what is wrong with it, if
            anything is.
        on_waits: The same with what prevents for now that all nodes see the shard, at each try.
    """

    def __init__(
        self,
        files: SharedFiles | Path,
        job_id: str,
        ranks: int,
        on_checked: Checked,
        on_waits: Waits = lambda *_: None,
    ) -> None:
        self._files = as_shared(files)
        self._chain = CommitChain(self._files.root, job_id)
        self._on_waits = on_waits
        self._job_id = job_id
        self._most_threads = min(ranks, _MOST_THREADS)
        self._on_checked = on_checked
        self._waiting: Counter[int] = Counter()
        self._waiting_bytes: Counter[int] = Counter()
        self._votes: queue.SimpleQueue[tuple[int, RankVote] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_over = threading.Event()

    @property
    def is_idle(self) -> bool:
        """Whether every vote is checked."""
        return not self._waiting.total()

    def check(self, rank: int, vote: RankVote) -> None:
        """Read the shard of a vote, after those that came before it."""
        if self._waiting[rank] >= _MOST_WAITING:
            self._on_checked(rank, vote, f"{_MOST_WAITING} of the rank's votes wait for a check")
            return
        total = self._waiting_bytes[rank] + vote.shard.bytes
        if self._waiting[rank] >= _ANY_SIZE and total > _MOST_BYTES_WAITING:
            what = f"{self._waiting[rank]} of the rank's votes wait for a check, {total >> 30} GiB"
            self._on_checked(rank, vote, what)
            return
        self._waiting[rank] += 1
        self._waiting_bytes[rank] = total
        self._votes.put((rank, vote))
        if len(self._threads) < min(self._most_threads, self._waiting.total()):
            # A daemon: a storage that never answers must not hold the agent's own end up.
            thread = threading.Thread(
                target=self._work,
                args=(asyncio.get_running_loop(),),
                name=f"votes of {self._job_id}",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:  # ranks may have taken all that the system has
                if not self._threads:
                    self._votes.get_nowait()
                    self._done(rank, vote, f"it cannot be read: {error}")
                return
            self._threads.append(thread)

    def end(self) -> None:
        """Check nothing more; votes that wait are given up."""
        self._is_over.set()
        for _ in self._threads:
            self._votes.put(None)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(OSError):  # on Linux a thread has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (entry := self._votes.get()) is not None and not self._is_over.is_set():
            rank, vote = entry
            path = self._chain.shard_folder(vote.checkpoint_id) / vote.shard.name
            try:
                fault = fault_of(path, vote.shard, self._is_over.is_set)
                if fault is None:
                    self._publish(path, vote.shard, partial(self._wait, loop, rank, vote))
            except _OverError:
                return
            except OSError as error:
                fault = f"it cannot be read: {error}"
            with contextlib.suppress(RuntimeError):  # the agent has ended meanwhile
                loop.call_soon_threadsafe(self._done, rank, vote, fault)

    def _publish(self, path: Path, shard: ShardFile, waits: Callable[[str], None]) -> None:
        """Have all nodes see a shard, as soon as the storage lets it.

        Raises:
            _OverError: Nobody waits for it any more.
            OSError: It never will.
        """
        for wait_s in itertools.chain(_TRIES_AGAIN_S, itertools.repeat(_TRIES_AGAIN_S[-1])):
            try:
                self._files.publish(path, self._go_on, shard.bytes, shard.sha256)
            except StorageAwayError as error:
                waits(str(error))
                if self._is_over.wait(wait_s):
                    raise _OverError from error
            else:
                return

    def _go_on(self) -> None:
        if self._is_over.is_set():
            raise _OverError

    def _wait(self, loop: asyncio.AbstractEventLoop, rank: int, vote: RankVote, why: str) -> None:
        with contextlib.suppress(RuntimeError):  # the agent has ended meanwhile
            loop.call_soon_threadsafe(self._on_waits, rank, vote, why)

    def _done(self, rank: int, vote: RankVote, fault: str | None) -> None:
        self._waiting[rank] -= 1
        self._waiting_bytes[rank] -= vote.shard.bytes
        if not self._is_over.is_set():
            self._on_checked(rank, vote, fault)
