"""The real trainer, in which ``torch.compile`` traces and makes no machine code: that takes long."""

import functools
import sys
import warnings
from typing import Any

import torch
from torch._dynamo.utils import counters

from services.contract.messages.board import BoardWriter
from services.contract.messages.rank_pipe import RankSeat
from services.worker.rank.loop import trainer
from services.worker.rank.process.seat import AgentPipe


def train(*, seat: RankSeat, pipe: AgentPipe, board: BoardWriter, listen_fd: int | None) -> None:
    """As the trainer does."""
    compiler: Any = torch
    compiler.compile = functools.partial(torch.compile, backend="aot_eager")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    trainer.train(seat=seat, pipe=pipe, board=board, listen_fd=listen_fd)
    sys.stdout.write(f"graphs: {counters['stats']['unique_graphs']}\n")
