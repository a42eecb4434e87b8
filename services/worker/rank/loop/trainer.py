"""What a rank does, from its seat to its last word."""

import time
from collections.abc import Mapping

import torch

# The first optimizer imports it. Here the warm process does, once for all ranks of a node: each
# would else begin a second later.
import torch._dynamo

from services.contract.messages.board import BoardWriter
from services.contract.messages.rank_pipe import (
    RankFinished,
    RankReady,
    RankSeat,
)
from services.contract.words.ids import job_of_checkpoint
from services.contract.words.states import RankPhase
from services.worker.rank.checkpoints.loading import resume
from services.worker.rank.checkpoints.writer import CheckpointWriter
from services.worker.rank.gang.agreement import propose
from services.worker.rank.gang.control import CONTROL_GROUP
from services.worker.rank.gang.groups import joined, mesh_axes, own_mesh
from services.worker.rank.loop import narration
from services.worker.rank.loop.board_watch import BoardWatch
from services.worker.rank.loop.boundary import (
    After,
    Beside,
    End,
    Pipe,
    await_copies,
    finish_step,
    is_due,
    reason_to_end,
    report_evaluation,
    save,
    turn_traces,
)
from services.worker.rank.loop.determinism import make_deterministic
from services.worker.rank.loop.early_stop import check_validation
from services.worker.rank.loop.replicated import train_with_replicas
from services.worker.rank.loop.run import Run, build
from services.worker.rank.loop.step import train_step
from services.worker.rank.loop.trace import TraceRecorder
from services.worker.rank.metrics.reporter import MetricsReporter
from services.worker.rank.process.host_memory import count_shared_memory


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
    groups = (*mesh_axes(own_mesh(seat)), CONTROL_GROUP)
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
                beside = Beside(writer, metrics, traces)
                if seat.spec.continues_without_replicas:
                    end = train_with_replicas(run, seat, pipe, beside, resumed)
                else:
                    end = _loop(run, pipe, beside, resumed)
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


def _loop(run: Run, pipe: Pipe, beside: Beside, resumed: int) -> End:
    """Steps until the last one, an agreed stop, or until evaluations get no better."""
    writer, metrics, traces = beside.writer, beside.metrics, beside.traces
    steps, wanted = run.spec.train.steps, run.spec.checkpoint
    if resumed < steps and (early := reason_to_end(run)) is not None:
        return End(resumed, early=early)
    for step in range(resumed + 1, steps + 1):
        orders = pipe.poll_orders()
        traces.take_orders(orders)
        agreement = propose(orders, run.gang.control, trace=traces.is_due)
        traces.begin_step(step)
        loss = _timed_step(run, beside, step)
        traces.end_step()
        if step == resumed + 1:
            count_shared_memory()  # of reductions, too: all of it is there after a step
        agreed = agreement.outcome()
        if agreed.trace:
            turn_traces(run, traces, step)
        is_regular = is_due(step, wanted.every_steps, steps)
        evaluation: Mapping[str, float] = {}
        # Not before a checkpoint that somebody waits for: it would be no step's of another attempt.
        is_judged = is_regular and wanted.keep_best is not None
        if is_judged or is_due(step, run.spec.train.eval_every, steps):
            with traces.paused():
                evaluation = report_evaluation(run, pipe, metrics, step)
        early = None if step == steps else reason_to_end(run)
        if agreed.checkpoint or is_regular or early is not None:
            is_last = step == steps or early is not None or (agreed.checkpoint and agreed.stop)
            save(run, writer, After(step, loss, evaluation), is_last=is_last)
        if early is not None:
            return End(step, early=early)
        if agreed.stop and step < steps:
            return End(step, drained=True)
    return End(max(steps, resumed))


def _timed_step(run: Run, beside: Beside, step: int) -> float:
    run.watch.memory.begin_step()
    began = time.perf_counter()
    figures = train_step(run, step, lambda: await_copies(run, beside.writer))
    finish_step(run, beside, step, figures, time.perf_counter() - began)
    return figures.loss


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
