"""Writes checkpoints beside the training: one rank's shard and its vote.

A write that fails costs that checkpoint, and training goes on to the next. After the last step, or
before a pause, there is no next one: a rank that meets a full disk then keeps its state and writes
again until there is room.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import torch

from services.contract.messages.rank_pipe import (
    RankCheckpointBegan,
    RankCheckpointFailed,
    RankCheckpointWaits,
    RankMessage,
    RankSeat,
    RankVote,
)
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import ShardFile
from services.contract.system.durable import node_condition
from services.contract.words.ids import checkpoint_id
from services.worker.rank.checkpoints import shard_file
from services.worker.rank.checkpoints.staging import Staged, Staging, StateChangedError
from services.worker.rank.checkpoints.state import TrainingState

Send = Callable[[RankMessage], None]
_ABANDONING_S: Final = 0.5
_TRIES_AGAIN_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
"""The waits between tries of a write that must succeed; the last for all more. The agent takes a
rank that is silent for 20 s after its end for wedged."""


class CheckpointWriteError(RuntimeError):
    """The last checkpoint of a run could not be written: its result would be lost."""


class AbandonedError(RuntimeError):
    """The rank ends early, and what it was writing with it."""

    def __init__(self) -> None:
        super().__init__("the rank ended before its shard was written")


class CheckpointWriter:
    """Writes at most one checkpoint at a time; its vote tells the agent that it is durable.

    A failure to copy or to write is told to the agent and does not stop the training, because the
    next checkpoint may succeed; only after the last one it is an error (``finish``). The last one
    is written again for as long as the node's state (a full disk) prevents it; the agent ends that
    when the grace of a stop is over. A block of ``with`` that ends by an exception abandons what is
    in flight.

    Args:
        seat: Names the job, the attempt, the rank and the storage.
        send: Tells the agent; may be called from any thread.
        mode: ``async`` copies the state and writes from a thread while training goes on;
            ``sync`` writes before it returns.
        data_digest: Goes into the vote.
        resumed_step: The step of the checkpoint that was loaded, which is not written again.
    """

    def __init__(
        self,
        seat: RankSeat,
        send: Send,
        mode: Literal["sync", "async"],
        *,
        data_digest: str,
        resumed_step: int,
    ) -> None:
        self._seat = seat
        self._send = send
        self._mode = mode
        self._data_digest = data_digest
        self._last_step = resumed_step
        self._staging = Staging()
        self._copies_beside = True
        self._failure: Exception | None = None
        self._is_last = False
        self._staged: Staged | None = None
        self._in_flight: threading.Thread | None = None
        self._abandoned = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._abandon()

    def resume(self, step: int) -> None:
        """The checkpoint of ``step`` was loaded, and is not written again."""
        self._last_step = step

    def is_due(self, step: int) -> bool:
        """Whether the state after ``step`` is not saved yet, and not being saved."""
        return step > self._last_step

    def save(self, state: TrainingState, *, is_last: bool = False) -> None:
        """Begins to save ``state``; waits first for the one before it.

        Args:
            state: Live. In mode ``async``, what is not ``lasting`` in it may change as soon as
                this returns, the rest after ``release``.
            is_last: No step follows: it is written again until the node lets it.
        """
        self._join()
        self._last_step = state.step
        self._is_last = is_last
        self._failure = None
        checkpoint = checkpoint_id(self._seat.job_id, state.step, self._seat.fence)
        self._send(RankCheckpointBegan(checkpoint_id=checkpoint, step=state.step))
        with self._failures_told(checkpoint):
            if self._mode == "sync":
                self._write(checkpoint, state, state.tensors)
                return
            lasting = state.lasting if self._copies_beside else {}
            staged = self._staging.begin(state.tensors, lasting)
            thread = threading.Thread(
                target=self._write_staged,
                args=(checkpoint, state, staged),
                name=f"checkpoint at step {state.step}",
            )
            thread.start()
            self._staged, self._in_flight = staged, thread

    @property
    def copied_bytes(self) -> int:
        """What the host's memory holds, or is about to hold, of copies of the state."""
        return self._staging.nbytes

    @property
    def is_copying(self) -> bool:
        """Whether ``release`` would have the training wait."""
        return self._staged is not None and self._staged.is_pending

    def release(self) -> None:
        """Returns once all may change of the state that was last given to ``save``."""
        if self._staged is not None:
            self._staged.wait()
            self._staged = None

    def finish(self, step: int) -> None:
        """Waits until nothing is in flight.

        Args:
            step: With which the run ends.

        Raises:
            CheckpointWriteError: The checkpoint of that step was begun and was not written.
        """
        self._join()
        if self._failure is not None and step == self._last_step:
            raise CheckpointWriteError(
                f"the checkpoint after step {self._last_step} could not be written: {self._failure}"
            ) from self._failure

    def _join(self) -> None:
        self.release()
        if self._in_flight is not None:
            self._in_flight.join()
            self._in_flight = None

    def _abandon(self) -> None:
        """Has the thread in flight remove its draft and end; it looks up at each piece it writes.

        A rank that fails must say so soon: for a thread that storage holds up nobody waits.
        """
        self._abandoned.set()
        if self._in_flight is not None:
            self._in_flight.join(_ABANDONING_S)

    def _go_on(self) -> None:
        if self._abandoned.is_set():
            raise AbandonedError

    def _write_staged(self, checkpoint: str, state: TrainingState, staged: Staged) -> None:
        with self._failures_told(checkpoint):
            self._write(checkpoint, state, staged.make(self._go_on))

    def _write(
        self, checkpoint: str, state: TrainingState, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        shard = self._written(checkpoint, state, tensors)
        self._send(
            RankVote(
                checkpoint_id=checkpoint,
                step=state.step,
                shard=shard,
                loss=state.loss,
                data_digest=self._data_digest,
                evaluation=dict(state.evaluation),
            )
        )

    def _written(
        self, checkpoint: str, state: TrainingState, tensors: Mapping[str, torch.Tensor]
    ) -> ShardFile:
        seat = self._seat
        chain = CommitChain(Path(seat.storage_root), seat.job_id)
        folder = chain.shard_folder(checkpoint)
        waits_s = itertools.chain(_TRIES_AGAIN_S, itertools.repeat(_TRIES_AGAIN_S[-1]))
        while True:
            try:
                return shard_file.write(folder, seat.rank, tensors, state.text, self._go_on)
            except OSError as error:
                condition = node_condition(error, seat.plan.ranks[seat.rank].node_id)
                if condition is None or not self._is_last:
                    raise
                told = RankCheckpointWaits(
                    checkpoint_id=checkpoint, step=state.step, condition=condition
                )
                self._send(told)
            self._abandoned.wait(next(waits_s))

    @contextlib.contextmanager
    def _failures_told(self, checkpoint: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 (told to the agent, and raised by finish)
            self._failure = error
            if isinstance(error, StateChangedError):
                self._copies_beside = False
            reason = f"{type(error).__name__}: {error}"
            self._send(RankCheckpointFailed(checkpoint_id=checkpoint, reason=reason))
