"""A trainer of which one replica does not learn how a vote ended, as if the connection broke right then.

And all take their time to give their state, as large models do.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from services.worker.rank.gang.replica_groups import MembersChangedError
from services.worker.rank.gang.replicas import Ballot, Replicas
from services.worker.rank.loop import trainer

LATE_REPLICA = 1
LATE_VOTE = 5


def train(**parts: Any) -> None:  # noqa: ANN401 as the trainer's
    """Trains as the rank's trainer does."""
    votes = 0
    vote = Replicas.vote

    def late(self: Replicas, ballot: Ballot) -> Ballot:
        nonlocal votes
        votes += 1
        outcome = vote(self, ballot)
        if self.number == LATE_REPLICA and votes == LATE_VOTE:
            self.leave()
            raise MembersChangedError
        return outcome

    give = Replicas.send_state

    def slowly(self: Replicas, text: bytes, tensors: Sequence[torch.Tensor]) -> None:
        threading.Event().wait(0.5)
        give(self, text, tensors)

    Replicas.send_state = slowly  # type: ignore[method-assign]  # in a process of its own
    Replicas.vote = late  # type: ignore[method-assign]  # in a process of its own
    trainer.train(**parts)
