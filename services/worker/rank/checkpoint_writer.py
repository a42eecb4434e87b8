"""Writes checkpoints beside the training: one rank's shard and its vote."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from services.contract.commit_chain import CommitChain
from services.contract.ids import checkpoint_id
from services.contract.messages.rank_pipe import (
    RankCheckpointBegan,
    RankCheckpointFailed,
    RankMessage,
    RankSeat,
    RankVote,
)
from services.worker.rank import shard_file
from services.worker.rank.staging import Staged, Staging
from services.worker.rank.training_state import TrainingState

Send = Callable[[RankMessage], None]


class CheckpointWriteError(RuntimeError):
    """The last checkpoint of a run could not be written: its result would be lost."""


class CheckpointWriter:
    """Writes at most one checkpoint at a time; its vote tells the agent that it is durable.

    A failure to write is told to the agent and does not stop the training, because the next
    checkpoint may succeed; only after the last one it is an error (``finish``).

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
        self._failure: Exception | None = None
        self._in_flight: threading.Thread | None = None

    def is_due(self, step: int) -> bool:
        """Whether the state after ``step`` is not saved yet, and not being saved."""
        return step > self._last_step

    def save(self, state: TrainingState) -> None:
        """Begins to save ``state``; waits first for the one before it.

        Args:
            state: Live: in mode ``async`` it is copied before this returns.
        """
        self._wait()
        self._last_step = state.step
        self._failure = None
        checkpoint = checkpoint_id(self._seat.job_id, state.step, self._seat.fence)
        self._send(RankCheckpointBegan(checkpoint_id=checkpoint, step=state.step))
        if self._mode == "sync":
            self._write(checkpoint, state)
            return
        staged = self._staging.copy(state.tensors)
        self._in_flight = threading.Thread(
            target=self._write_staged,
            args=(checkpoint, replace(state, tensors=staged.tensors), staged),
            name=f"checkpoint at step {state.step}",
        )
        self._in_flight.start()

    def finish(self, step: int) -> None:
        """Waits until nothing is in flight.

        Args:
            step: With which the run ends.

        Raises:
            CheckpointWriteError: The checkpoint of that step was begun and was not written.
        """
        self._wait()
        if self._failure is not None and step == self._last_step:
            raise CheckpointWriteError(
                f"the checkpoint after step {self._last_step} could not be written: {self._failure}"
            ) from self._failure

    def _wait(self) -> None:
        if self._in_flight is not None:
            self._in_flight.join()
            self._in_flight = None

    def _write_staged(self, checkpoint: str, state: TrainingState, staged: Staged) -> None:
        staged.wait()
        self._write(checkpoint, state)

    def _write(self, checkpoint: str, state: TrainingState) -> None:
        chain = CommitChain(Path(self._seat.storage_root), self._seat.job_id)
        try:
            shard = shard_file.write(
                chain.shard_folder(checkpoint), self._seat.rank, state.tensors, state.text
            )
        except Exception as error:  # noqa: BLE001 (told to the agent, and raised by finish)
            self._failure = error
            reason = f"{type(error).__name__}: {error}"
            self._send(RankCheckpointFailed(checkpoint_id=checkpoint, reason=reason))
            return
        self._send(
            RankVote(
                checkpoint_id=checkpoint,
                step=state.step,
                shard=shard,
                loss=state.loss,
                data_digest=self._data_digest,
            )
        )
