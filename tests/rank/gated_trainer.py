"""The real trainer, in which no copy is made before the training thread waits for the copies."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from services.contract.messages.board import BoardWriter
from services.contract.messages.rank_pipe import RankSeat
from services.worker.rank.checkpoints import staging
from services.worker.rank.checkpoints import writer as checkpoint_writer
from services.worker.rank.loop import trainer
from services.worker.rank.process.seat import AgentPipe

# What is replaced in them is none of their business.
_staged: Any = staging.Staged
_writer: Any = checkpoint_writer
_PATIENCE_S: Final = 60.0
_make, _wait = staging.Staged.make, staging.Staged.wait
_training_waits = threading.Event()


def train(*, seat: RankSeat, pipe: AgentPipe, board: BoardWriter, listen_fd: int | None) -> None:
    """As the trainer does."""
    _staged.make = make
    _staged.wait = wait
    _writer._ABANDONING_S = _PATIENCE_S  # the thread ends at once, if only the machine lets it
    trainer.train(seat=seat, pipe=pipe, board=board, listen_fd=listen_fd)


def make(staged: staging.Staged, go_on: Callable[[], None]) -> Mapping[str, torch.Tensor]:
    while not _training_waits.wait(0.01):
        go_on()
    _training_waits.clear()
    return _make(staged, go_on)


def wait(staged: staging.Staged) -> None:
    _training_waits.set()
    _wait(staged)
