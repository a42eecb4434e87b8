"""A trainer whose replicas break their connections once, or part only once they are let go.

With ``breaking`` replica 1 leaves its groups as it sums for the fifth time, and does not end. With ``held`` all replicas part
once there is a file ``go`` below the storage's root, and with ``late`` replica 0 sums for the sixth time then.
"""

import threading
from pathlib import Path
from typing import Any

import torch

from services.contract.messages.rank_pipe import RankSeat
from services.worker.rank.gang.replica_groups import MembersChangedError
from services.worker.rank.gang.replicas import Replicas
from services.worker.rank.loop import trainer

GO = "go"
BREAKS_AT = 5
LATE_AT = 6
_LOOK_S = 0.02


def breaking(**parts: Any) -> None:  # noqa: ANN401 as the trainer's
    """Trains as the rank's trainer does."""
    sums = 0
    add_up = Replicas.sum

    def once_broken(self: Replicas, gradients: torch.Tensor, figures: torch.Tensor) -> None:
        nonlocal sums
        sums += 1
        if self.number == 1 and sums == BREAKS_AT:
            self.leave()
            raise MembersChangedError
        add_up(self, gradients, figures)

    Replicas.sum = once_broken  # type: ignore[method-assign]  # in a process of its own
    trainer.train(**parts)


def late(*, seat: RankSeat, **parts: Any) -> None:  # noqa: ANN401 as the trainer's
    """Trains as the rank's trainer does."""
    sums = 0
    add_up, go = Replicas.sum, Path(seat.storage_root) / GO

    def once_let_go(self: Replicas, gradients: torch.Tensor, figures: torch.Tensor) -> None:
        nonlocal sums
        sums += 1
        while self.number == 0 and sums == LATE_AT and not go.exists():
            threading.Event().wait(_LOOK_S)
        add_up(self, gradients, figures)

    Replicas.sum = once_let_go  # type: ignore[method-assign]  # in a process of its own
    trainer.train(seat=seat, **parts)


def held(*, seat: RankSeat, **parts: Any) -> None:  # noqa: ANN401 as the trainer's
    """Trains as the rank's trainer does."""
    part, go = Replicas.part, Path(seat.storage_root) / GO

    def once_let_go(self: Replicas) -> bool:
        while not go.exists():
            threading.Event().wait(_LOOK_S)
        return part(self)

    Replicas.part = once_let_go  # type: ignore[method-assign]  # in a process of its own
    trainer.train(seat=seat, **parts)
