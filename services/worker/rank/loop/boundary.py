"""What the loop does between two steps: it tells of the one that ended, evaluates, saves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from services.contract.messages.board import BoardStep
from services.contract.messages.rank_pipe import RankEvaluated, RankMessage, RankOrder
from services.contract.words.states import RankPhase
from services.worker.rank.checkpoints.state import capture
from services.worker.rank.checkpoints.writer import CheckpointWriter
from services.worker.rank.loop import narration
from services.worker.rank.loop.early_stop import chosen_figure
from services.worker.rank.loop.evaluation import evaluate
from services.worker.rank.loop.run import Run
from services.worker.rank.loop.step import StepFigures
from services.worker.rank.loop.trace import TraceRecorder
from services.worker.rank.metrics.reporter import MetricsReporter


class Pipe(Protocol):
    """The rank's agent, as ``seat.AgentPipe`` is."""

    def send(self, message: RankMessage) -> None:
        """Tells it; callable from any thread."""
        ...

    def poll_orders(self, within_s: float = 0.0) -> list[RankOrder]:
        """What it asks; waits so long for it, if nothing is there."""
        ...


@dataclass(frozen=True)
class End:
    """The last step; whether it was one by request, or why it was one by evaluations."""

    step: int
    drained: bool = False
    early: str | None = None


@dataclass(frozen=True)
class Beside:
    """What goes on beside the steps."""

    writer: CheckpointWriter
    metrics: MetricsReporter
    traces: TraceRecorder


@dataclass(frozen=True)
class After:
    """What is known after a step."""

    step: int
    loss: float
    evaluation: Mapping[str, float]


def turn_traces(run: Run, traces: TraceRecorder, step: int) -> None:
    """Recordings begin and end; all ranks say so and wait, for else those of other nodes seem to hang."""
    run.watch.enter(RankPhase.TRACE)
    traces.turn(step)
    run.gang.control.meet()


def reason_to_end(run: Run) -> str | None:
    """Why the run ends before its last step."""
    return None if run.early_stop is None else run.early_stop.reason


def finish_step(
    run: Run, beside: Beside, step: int, figures: StepFigures, elapsed_s: float
) -> None:
    """Tells the board, the metrics' outlets and the log of a step that is done."""
    done = BoardStep(
        step=step,
        loss=figures.loss,
        grad_norm=figures.grad_norm,
        learning_rate=figures.learning_rate,
        tokens_per_s=figures.samples / elapsed_s,
        step_time_s=elapsed_s,
        data_wait_s=figures.data_wait_s,
    )
    run.watch.finish_step(done, beside.writer.copied_bytes)
    beside.metrics.report(step, {**figures.metrics, **_figures(run, done)})
    narration.stepped(run, done)
    if figures.is_skipped:
        narration.skipped(run, step)


def _figures(run: Run, step: BoardStep) -> dict[str, float]:
    return {
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "learning_rate": step.learning_rate,
        "tokens_per_s" if run.counts_tokens else "samples_per_s": step.tokens_per_s,
        "step_time_s": step.step_time_s,
        "data_wait_s": step.data_wait_s,
    }


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether what happens ``every`` so many steps, and after the last one, happens now."""
    return step == steps or (every > 0 and step % every == 0)


def save(run: Run, writer: CheckpointWriter, after: After, *, is_last: bool) -> None:
    """Begins to save the state, unless that was done."""
    if writer.is_due(after.step):
        run.watch.enter(RankPhase.CHECKPOINT)
        state = capture(run.trained, after.step, after.loss, after.evaluation)
        writer.save(state, is_last=is_last)


def await_copies(run: Run, writer: CheckpointWriter) -> None:
    """Returns once parameters and the optimizers' state may change."""
    if writer.is_copying:
        run.watch.enter(RankPhase.CHECKPOINT)
        writer.release()
        run.watch.enter(RankPhase.OPTIMIZER)
    else:
        writer.release()


def report_evaluation(
    run: Run, pipe: Pipe, metrics: MetricsReporter, step: int, *, speaks: bool = True
) -> Mapping[str, float]:
    """Evaluates, tells it and decides by it; the figures, none where the data has no validation.

    ``speaks``: no other replica tells the same.
    """
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
    if run.gang.rank == 0 and speaks:
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
