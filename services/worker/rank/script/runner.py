"""What a rank of a script does, from its seat to its last word."""

import os
from pathlib import Path
from typing import Protocol

import torch

import meshloom.session
from services.contract.messages.board import BoardWriter
from services.contract.messages.rank_pipe import (
    RankFinished,
    RankMessage,
    RankOrder,
    RankSeat,
)
from services.contract.words.states import RankPhase
from services.worker.rank.checkpoints.writer import CheckpointWriter
from services.worker.rank.gang.control import CONTROL_GROUP
from services.worker.rank.loop.board_watch import BoardWatch
from services.worker.rank.loop.trace import TraceRecorder
from services.worker.rank.metrics.reporter import MetricsReporter
from services.worker.rank.process.user_path import user_folders
from services.worker.rank.script import entry
from services.worker.rank.script.environment import torchrun_environment
from services.worker.rank.script.session import Session, Ties
from services.worker.rank.script.store import ScriptStore


class Pipe(Protocol):
    """The rank's agent, as ``seat.AgentPipe`` is."""

    def send(self, message: RankMessage) -> None:
        """Tells it; callable from any thread."""
        ...

    def poll_orders(self) -> list[RankOrder]:
        """What it asks; never blocks."""
        ...


def run(*, seat: RankSeat, pipe: Pipe, board: BoardWriter, listen_fd: int | None) -> None:
    """Runs the job's script as this rank, until it ends.

    Args:
        seat: Which script, with whom, from which checkpoint.
        pipe: Told of readiness, checkpoints and the end; asked for orders.
        board: Told of the steps that the script reports.
        listen_fd: On rank 0, the bound socket of the rendezvous store.

    Raises:
        SystemExit: The script ended by ``sys.exit`` with another code than 0.
        Exception: Whatever ends the script early.
    """
    if seat.spec.entrypoint is None:
        raise ValueError("the job has no entrypoint")
    torch.set_num_threads(seat.threads)
    device = _device(seat)
    watch = BoardWatch(board, (CONTROL_GROUP,), device)
    watch.enter(RankPhase.RENDEZVOUS)
    store = ScriptStore(seat, listen_fd)
    environment = os.environ  # noqa: TID251 a script reads it, as under torchrun
    environment.update(torchrun_environment(seat, environment))
    writer = CheckpointWriter(
        seat, pipe.send, seat.spec.checkpoint.mode, data_digest="", resumed_step=0
    )
    metrics = MetricsReporter(seat, pipe.send)
    traces = TraceRecorder(seat, pipe.send, watch, device)
    session = Session(Ties(seat, pipe, watch, writer, metrics, traces, store.part("session")))
    meshloom.session.install(session)
    folders = (*(Path(f) for f in [seat.code_folder] if f is not None), *user_folders())
    pipe.send(session.ready)
    watch.enter(RankPhase.SCRIPT)
    with metrics, writer, traces:
        entry.run(seat.spec.entrypoint, folders)
        traces.take_orders(pipe.poll_orders())  # what came too late is answered as the block ends
        watch.enter(RankPhase.CHECKPOINT)
        writer.finish(session.step)
    watch.enter(RankPhase.FINISHED)
    store.leave()
    pipe.send(RankFinished(step=session.step, drained=session.has_drained))


def _device(seat: RankSeat) -> torch.device:
    # The script sees the accelerators of its job alone, in the order of their local ranks.
    return torch.device("cuda", seat.local_rank) if "cuda" in seat.device else torch.device("cpu")
