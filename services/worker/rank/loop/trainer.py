"""What a rank does, from its seat to its last word."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

# The first optimizer imports it. Here the warm process does, once for all ranks of a node: each
# would else begin a second later.
import torch._dynamo

from services.contract.messages.board import BoardStep, BoardWriter
from services.contract.messages.rank_pipe import (
    RankEvaluated,
    RankFinished,
    RankMessage,
    RankOrder,
    RankReady,
    RankSeat,
)
from services.contract.words.ids import job_of_checkpoint
from services.contract.words.states import RankPhase
from services.worker.rank.checkpoints.loading import resume
from services.worker.rank.checkpoints.state import capture
from services.worker.rank.checkpoints.writer import CheckpointWriter
from services.worker.rank.gang.agreement import propose
from services.worker.rank.gang.control import CONTROL_GROUP
from services.worker.rank.gang.groups import joined, mesh_axes
from services.worker.rank.loop import narration
from services.worker.rank.loop.board_watch import BoardWatch
from services.worker.rank.loop.determinism import make_deterministic
from services.worker.rank.loop.early_stop import check_validation, chosen_figure
from services.worker.rank.loop.evaluation import evaluate
from services.worker.rank.loop.run import Run, build
from services.worker.rank.loop.step import train_step
from services.worker.rank.loop.trace import TraceRecorder
from services.worker.rank.metrics.reporter import MetricsReporter
from services.worker.rank.process.host_memory import count_shared_memory


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
        check_validation(seat.spec, run.data.validation)
        watch.enter(RankPhase.LOAD)
        resumed = resume(run.trained, seat, pipe.send)
        if run.early_stop is not None and _is_clone(seat):
            run.early_stop.start_over()
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
            with writer, TraceRecorder(seat, pipe.send, watch, gang.device) as traces:
                end = _loop(run, pipe, _Beside(writer, metrics, traces), resumed)
                traces.take_orders(
                    pipe.poll_orders()
                )  # what came too late is answered as the block ends
                run.data.close()
                watch.enter(RankPhase.CHECKPOINT)
                writer.finish(end.step)
            watch.enter(RankPhase.FINISHED)
            if end.early is not None:
                narration.ended_early(run, end.step, end.early)
            pipe.send(RankFinished(step=end.step, drained=end.drained, early=end.early))


def _is_clone(seat: RankSeat) -> bool:
    """Whether the run begins with a checkpoint of another job."""
    return seat.resume_from is not None and job_of_checkpoint(seat.resume_from) != seat.job_id


@dataclass(frozen=True)
class _End:
    """The last step; whether it was one by request, or why it was one by evaluations."""

    step: int
    drained: bool = False
    early: str | None = None


@dataclass(frozen=True)
class _Beside:
    """What goes on beside the steps."""

    writer: CheckpointWriter
    metrics: MetricsReporter
    traces: TraceRecorder


@dataclass(frozen=True)
class _After:
    """What is known after a step."""

    step: int
    loss: float
    evaluation: Mapping[str, float]


def _loop(run: Run, pipe: Pipe, beside: _Beside, resumed: int) -> _End:
    """Steps until the last one, an agreed stop, or until evaluations get no better."""
    writer, metrics, traces = beside.writer, beside.metrics, beside.traces
    steps, wanted = run.spec.train.steps, run.spec.checkpoint
    if resumed < steps and (early := _early(run)) is not None:
        return _End(resumed, early=early)
    for step in range(resumed + 1, steps + 1):
        orders = pipe.poll_orders()
        traces.take_orders(orders)
        agreement = propose(orders, run.gang.control, trace=traces.is_due)
        traces.begin_step(step)
        loss = _timed_step(run, writer, metrics, step)
        traces.end_step()
        if step == resumed + 1:
            count_shared_memory()  # of reductions, too: all of it is there after a step
        agreed = agreement.outcome()
        if agreed.trace:
            _turn(run, traces, step)
        is_regular = _is_due(step, wanted.every_steps, steps)
        evaluation: Mapping[str, float] = {}
        # Not before a checkpoint that somebody waits for: it would be no step's of another attempt.
        is_judged = is_regular and wanted.keep_best is not None
        if is_judged or _is_due(step, run.spec.train.eval_every, steps):
            with traces.paused():
                evaluation = _report_evaluation(run, pipe, metrics, step)
        early = None if step == steps else _early(run)
        if agreed.checkpoint or is_regular or early is not None:
            is_last = step == steps or early is not None or (agreed.checkpoint and agreed.stop)
            _save(run, writer, _After(step, loss, evaluation), is_last=is_last)
        if early is not None:
            return _End(step, early=early)
        if agreed.stop and step < steps:
            return _End(step, drained=True)
    return _End(max(steps, resumed))


def _turn(run: Run, traces: TraceRecorder, step: int) -> None:
    """Recordings begin and end; all ranks say so and wait, for else those of other nodes seem to hang."""
    run.watch.enter(RankPhase.TRACE)
    traces.turn(step)
    run.gang.control.meet()


def _early(run: Run) -> str | None:
    """Why the run ends before its last step."""
    return None if run.early_stop is None else run.early_stop.reason


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


def _save(run: Run, writer: CheckpointWriter, after: _After, *, is_last: bool) -> None:
    if writer.is_due(after.step):
        run.watch.enter(RankPhase.CHECKPOINT)
        state = capture(run.trained, after.step, after.loss, after.evaluation)
        writer.save(state, is_last=is_last)


def _await_copies(run: Run, writer: CheckpointWriter) -> None:
    if writer.is_copying:
        run.watch.enter(RankPhase.CHECKPOINT)
        writer.release()
        run.watch.enter(RankPhase.OPTIMIZER)
    else:
        writer.release()


def _report_evaluation(
    run: Run, pipe: Pipe, metrics: MetricsReporter, step: int
) -> Mapping[str, float]:
    """Evaluates, tells it and decides by it; the figures, none where the data has no validation."""
    evaluation = evaluate(run, step)
    if evaluation is None:
        return {}
    keep_best = run.spec.checkpoint.keep_best
    figures = evaluation.figures
    if keep_best is not None:
        value = chosen_figure(figures, keep_best.metric, "checkpoint.keep_best")
        figures = {keep_best.metric: value, **figures}  # of many only the first are kept
    if run.early_stop is not None:
        run.early_stop.note(step, evaluation.figures)
    if run.gang.rank == 0:
        metrics.report(step, evaluation.figures, validation=True)
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
    return figures


def _ready(run: Run, groups: tuple[str, ...]) -> RankReady:
    return RankReady(
        units=run.units,
        groups=groups,
        parameters=sum(p.numel() for p in run.model.parameters()),
        data_digest=run.data.digest,
        throughput_unit="tokens" if run.counts_tokens else "samples",
        loss_unit=run.loss_unit,
        notices=tuple(run.data.notices),
    )
