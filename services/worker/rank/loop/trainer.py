"""What a rank does, from its seat to its last word."""

import time
from typing import Protocol

import torch

# The first optimizer imports it. Here the warm process does, once for all ranks of a node: each
# would else begin a second later.
import torch._dynamo

from services.contract.messages.rank_pipe import (
    RankEvaluated,
    RankFinished,
    RankMessage,
    RankOrder,
    RankReady,
    RankSeat,
)
from services.contract.rank_channel import BoardStep, BoardWriter
from services.contract.states import RankPhase
from services.worker.rank.checkpoints.loading import resume
from services.worker.rank.checkpoints.state import capture
from services.worker.rank.checkpoints.writer import CheckpointWriter
from services.worker.rank.gang.agreement import propose
from services.worker.rank.gang.control import CONTROL_GROUP
from services.worker.rank.gang.groups import joined, mesh_axes
from services.worker.rank.loop import narration
from services.worker.rank.loop.board_watch import BoardWatch
from services.worker.rank.loop.determinism import make_deterministic
from services.worker.rank.loop.evaluation import evaluate
from services.worker.rank.loop.run import Run, build
from services.worker.rank.loop.step import train_step
from services.worker.rank.metrics.reporter import MetricsReporter


class Pipe(Protocol):
    """The rank's agent, as ``seat.AgentPipe`` is."""

    def send(self, message: RankMessage) -> None:
        """Tells it; callable from any thread."""
        ...

    def poll_orders(self) -> list[RankOrder]:
        """What it asks; never blocks."""
        ...


def train(*, seat: RankSeat, pipe: Pipe, board: BoardWriter, listen_fd: int | None) -> None:
    """Trains the seat's share of the job, until the last step or until the agent stops it.

    Args:
        seat: What to train, with whom, from where.
        pipe: Told of readiness, checkpoints, evaluations and the end; asked for orders.
        board: Told of every phase and step.
        listen_fd: On rank 0, the bound socket of the rendezvous store.

    Raises:
        Exception: Whatever ends the rank early, the user's own exceptions included.
    """
    torch.set_num_threads(seat.threads)
    if seat.spec.train.deterministic:
        make_deterministic()
    groups = (*mesh_axes(seat.plan.sharding.mesh), CONTROL_GROUP)
    watch = BoardWatch(board, groups, torch.device(seat.device))
    watch.enter(RankPhase.RENDEZVOUS)
    with joined(seat, listen_fd, watch) as gang:
        watch.enter(RankPhase.BUILD)
        run = build(seat, gang, watch)
        watch.enter(RankPhase.LOAD)
        resumed = resume(run.trained, seat, pipe.send)
        watch.resume(resumed)
        writer = CheckpointWriter(
            seat,
            pipe.send,
            seat.spec.checkpoint.mode,
            data_digest=run.data.digest,
            resumed_step=resumed,
        )
        pipe.send(_ready(run, groups))
        narration.ready(run, resumed)
        with MetricsReporter(seat, pipe.send) as metrics:
            with writer:
                last, drained = _loop(run, pipe, writer, metrics, resumed)
                run.data.close()
                watch.enter(RankPhase.CHECKPOINT)
                writer.finish(last)
            watch.enter(RankPhase.FINISHED)
            pipe.send(RankFinished(step=last, drained=drained))


def _loop(
    run: Run, pipe: Pipe, writer: CheckpointWriter, metrics: MetricsReporter, resumed: int
) -> tuple[int, bool]:
    """Steps until the last one or an agreed stop; returns the step, and whether it was a stop."""
    steps = run.spec.train.steps
    for step in range(resumed + 1, steps + 1):
        agreement = propose(pipe, run.gang.control)
        loss = _timed_step(run, writer, metrics, step)
        agreed = agreement.outcome()
        if _is_due(step, run.spec.train.eval_every, steps):
            _report_evaluation(run, pipe, metrics, step)
        if agreed.checkpoint or _is_due(step, run.spec.checkpoint.every_steps, steps):
            is_last = step == steps or (agreed.checkpoint and agreed.stop)
            _save(run, writer, step, loss, is_last=is_last)
        if agreed.stop and step < steps:
            return step, True
    return max(steps, resumed), False


def _timed_step(run: Run, writer: CheckpointWriter, metrics: MetricsReporter, step: int) -> float:
    run.watch.memory.begin_step()
    began = time.perf_counter()
    figures = train_step(run, step, lambda: _await_copies(run, writer))
    elapsed = time.perf_counter() - began
    done = BoardStep(
        step=step,
        loss=figures.loss,
        grad_norm=figures.grad_norm,
        learning_rate=figures.learning_rate,
        tokens_per_s=figures.samples / elapsed,
        step_time_s=elapsed,
        data_wait_s=figures.data_wait_s,
    )
    run.watch.finish_step(done, writer.copied_bytes)
    metrics.report(step, {**figures.metrics, **_figures(run, done)})
    narration.stepped(run, done)
    if figures.is_skipped:
        narration.skipped(run, step)
    return figures.loss


def _figures(run: Run, step: BoardStep) -> dict[str, float]:
    return {
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "learning_rate": step.learning_rate,
        "tokens_per_s" if run.counts_tokens else "samples_per_s": step.tokens_per_s,
        "step_time_s": step.step_time_s,
        "data_wait_s": step.data_wait_s,
    }


def _is_due(step: int, every: int, steps: int) -> bool:
    return step == steps or (every > 0 and step % every == 0)


def _save(run: Run, writer: CheckpointWriter, step: int, loss: float, *, is_last: bool) -> None:
    if writer.is_due(step):
        run.watch.enter(RankPhase.CHECKPOINT)
        writer.save(capture(run.trained, step, loss), is_last=is_last)


def _await_copies(run: Run, writer: CheckpointWriter) -> None:
    if writer.is_copying:
        run.watch.enter(RankPhase.CHECKPOINT)
        writer.release()
        run.watch.enter(RankPhase.OPTIMIZER)
    else:
        writer.release()


def _report_evaluation(run: Run, pipe: Pipe, metrics: MetricsReporter, step: int) -> None:
    evaluation = evaluate(run, step)
    if evaluation is None or run.gang.rank != 0:
        return
    metrics.report(step, {**evaluation.metrics, "loss": evaluation.loss}, validation=True)
    baselines = dict(run.data.baselines())
    pipe.send(
        RankEvaluated(
            step=step,
            loss=evaluation.loss,
            tokens=evaluation.tokens,
            baselines=baselines,
            metrics=dict(evaluation.metrics),
        )
    )
    narration.evaluated(step, evaluation.loss, baselines)


def _ready(run: Run, groups: tuple[str, ...]) -> RankReady:
    return RankReady(
        units=run.units,
        groups=groups,
        parameters=sum(p.numel() for p in run.model.parameters()),
        data_digest=run.data.digest,
        throughput_unit="tokens" if run.counts_tokens else "samples",
        loss_unit=run.loss_unit,
    )
