"""The loop of a job that continues without lost replicas: each step is made by all members, or by none.

A step is summed (own share, then what is taken over of absent replicas, then over members), voted on, and made. A
member that is lost in between costs the others what they compute in its place.
"""

import math
import time
from collections.abc import Mapping

from services.contract.messages.rank_pipe import RankSeat
from services.contract.words.states import RankPhase
from services.worker.rank.checkpoints import peer_memory
from services.worker.rank.gang.agreement import propose
from services.worker.rank.gang.replica_groups import MembersChangedError
from services.worker.rank.gang.replicas import (
    Ballot,
    Orders,
    Replicas,
    Standing,
)
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
from services.worker.rank.loop.context import LoopContext, NonFiniteLossError
from services.worker.rank.loop.run import Run
from services.worker.rank.loop.share_gradients import (
    Part,
    ShareGradients,
    Sums,
    parts_taken_over,
)
from services.worker.rank.loop.step import StepFigures, note_scale


def train_with_replicas(run: Run, seat: RankSeat, pipe: Pipe, beside: Beside, resumed: int) -> End:
    """Steps until the last one, an agreed stop, or until evaluations get no better.

    Returns once all members are there and the last checkpoint is written.

    Args:
        run: Of this replica.
        seat: This rank's.
        pipe: Of its agent, which says who takes part.
        beside: What goes on beside the steps.
        resumed: Steps that were made before, in the checkpoint that was loaded.

    Raises:
        TrainableError, DataError: The job cannot be continued without a replica.
        NonFiniteLossError: See ``train_step``.
    """
    loop = _Loop(run, seat, pipe, beside, resumed)
    loop.enter()
    while not loop.is_over:
        loop.make_step()
    return loop.end()


class _Loop:
    def __init__(self, run: Run, seat: RankSeat, pipe: Pipe, beside: Beside, resumed: int) -> None:
        self._run = run
        self._pipe = pipe
        self._beside = beside
        self._orders = Orders(pipe)
        self._replicas = Replicas(seat, self._orders, run.watch)
        self._gradients = ShareGradients(run)
        self._made = resumed
        self._outcome = Ballot()
        self._after = After(resumed, math.nan, {})
        self._began = time.perf_counter()
        self._checkpoint_asked = self._stop_asked = False
        # Of the next step: what this replica has computed of it, and the sums over all members.
        self._own: Sums | None = None
        self._others: tuple[tuple[Part, ...], Sums] | None = None
        self._sums: Sums | None = None

    @property
    def is_over(self) -> bool:
        """Whether no step follows."""
        is_done = self._made >= self._run.spec.train.steps
        return is_done or self._outcome.stop or reason_to_end(self._run) is not None

    def enter(self) -> None:
        """Enters the next epoch; then all members have made the same steps, and have the same state."""
        while True:
            outcome = self._outcome
            own = Standing(self._made, outcome.checkpoint, outcome.stop)
            standings = self._replicas.enter(own)
            ahead = max(standings, key=lambda each: each.made)
            try:
                if self._replicas.is_joining:
                    self._receive()
                elif ahead.made > self._made:
                    # Some rank saw the vote pass: so all had cast it, and this one has the sums.
                    self._make(Ballot(self._outcome.epoch, ahead.checkpoint, ahead.stop))
                if not self._replicas.is_joining:
                    self._send()
            except MembersChangedError:
                continue
            self._outcome = Ballot(self._replicas.epoch, ahead.checkpoint, ahead.stop)
            return

    def make_step(self) -> None:
        """Makes the next one, with whoever is left, and enters an epoch of which all were told."""
        traces, step = self._beside.traces, self._made + 1
        self._take_orders()
        recording = propose([], self._run.gang.control, trace=traces.is_due)
        traces.begin_step(step)
        self._run.watch.memory.begin_step()
        self._began = time.perf_counter()
        while self._made < step:
            try:
                self._sum(step)
                outcome = self._replicas.vote(self._ballot())
            except MembersChangedError:
                self.enter()
            else:
                self._make(outcome)
        if recording.outcome().trace:
            # The ranks of a replica record together; other replicas wait where they sum.
            turn_traces(self._run, traces, self._made)
        if self._outcome.epoch > self._replicas.epoch and not self.is_over:
            self.enter()

    def end(self) -> End:
        """Writes the last checkpoint, and parts once all members know that it is written."""
        writer = self._beside.writer
        while True:
            self._run.watch.enter(RankPhase.CHECKPOINT)
            try:
                if self._replicas.is_first and self._is_saved_at_the_end:
                    save(self._run, writer, self._after, is_last=True)
                    writer.finish(self._made)
                self._run.watch.enter(RankPhase.RENDEZVOUS)
                if self._replicas.part():
                    break
            except MembersChangedError:
                pass
            # Who returns now gets the state of the end, and ends with the others.
            self.enter()
        self._gradients.close()
        steps = self._run.spec.train.steps
        early = reason_to_end(self._run) if self._made < steps else None
        return End(self._made, drained=early is None and self._made < steps, early=early)

    @property
    def _is_saved_at_the_end(self) -> bool:
        is_done = self._made >= self._run.spec.train.steps
        is_early = reason_to_end(self._run) is not None
        return self._made > 0 and (is_done or is_early or self._outcome.checkpoint)

    def _take_orders(self) -> None:
        orders = self._orders.take()
        self._beside.traces.take_orders(orders)
        self._checkpoint_asked |= any(order.checkpoint for order in orders)
        self._stop_asked |= any(order.stop for order in orders)

    def _ballot(self) -> Ballot:
        self._take_orders()
        told = self._replicas.told_epoch()
        return Ballot(told, self._checkpoint_asked, self._stop_asked)

    # -- A step

    def _sum(self, step: int) -> None:
        """Sums gradients over all members; they are kept until the step is made, or summed again."""
        run, gang = self._run, self._run.gang
        if self._own is None:
            run.watch.enter(RankPhase.DATA)
            self._own = self._gradients.of_own_share(step, self._await_copies)
        sums = self._own.copy()
        parts = parts_taken_over(
            self._replicas.members, gang.replica, gang.replicas, self._gradients.per_rank
        )
        if parts:
            if self._others is None or self._others[0] != parts:
                others = self._gradients.of_others(step, parts, self._await_copies)
                self._others = (parts, others)
            sums += self._others[1]
        # By this phase agents know a replica that waits for others from one that stands still by itself.
        run.watch.enter(RankPhase.RENDEZVOUS)
        self._sums = None
        self._replicas.sum(sums.gradients, sums.figures)
        self._sums = sums

    def _make(self, outcome: Ballot) -> None:
        """Updates by the sums, and does what follows the step."""
        if self._sums is None:
            raise RuntimeError(
                f"step {self._made + 1} was made by another replica, but not summed here"
            )
        step, sums = self._made + 1, self._sums
        figures = self._update(step, sums)
        finish_step(self._run, self._beside, step, figures, time.perf_counter() - self._began)
        self._beside.traces.end_step()
        self._own = self._others = self._sums = None
        self._made, self._outcome = step, outcome
        self._checkpoint_asked &= not outcome.checkpoint
        self._stop_asked &= not outcome.stop
        self._after = After(step, figures.loss, {})
        self._follow_up(step, figures.loss)

    def _update(self, step: int, sums: Sums) -> StepFigures:
        run = self._run
        context = LoopContext(run, step, self._await_copies)
        self._gradients.set_gradients(sums)
        # Each rank of a tensor-parallel group has counted the same, and so has each of the shares' ranks.
        shares = run.gang.replicas * run.gang.world_size
        *totals, counted = sums.figures.tolist()
        loss, *metrics = (total / shares for total in totals)

        def check_loss() -> None:
            if not math.isfinite(loss):
                raise NonFiniteLossError(f"the loss of step {step} is {loss}")

        context.update(None, check_loss)
        if run.ema is not None and not context.has_overflowed:
            run.ema.follow(step)
        named = dict(zip(sums.names, metrics, strict=True))
        return StepFigures(
            loss,
            context.norm,
            run.optimizers.first_rate * run.schedule(step),
            int(counted) * run.gang.data_ranks // run.gang.world_size,
            {**named, **note_scale(run, context)},
            sums.data_wait_s,
            context.has_overflowed,
        )

    def _follow_up(self, step: int, loss: float) -> None:
        run, wanted, steps = self._run, self._run.spec.checkpoint, self._run.spec.train.steps
        is_regular = is_due(step, wanted.every_steps, steps)
        evaluation: Mapping[str, float] = {}
        if (is_regular and wanted.keep_best is not None) or is_due(
            step, run.spec.train.eval_every, steps
        ):
            speaks = self._replicas.is_first
            with self._beside.traces.paused():
                evaluation = report_evaluation(
                    run, self._pipe, self._beside.metrics, step, speaks=speaks
                )
        self._after = After(step, loss, evaluation)
        # The last one is written where all wait for it: whoever writes it may be lost.
        if (
            not self.is_over
            and (self._outcome.checkpoint or is_regular)
            and self._replicas.is_first
        ):
            save(run, self._beside.writer, self._after, is_last=False)

    def _await_copies(self) -> None:
        await_copies(self._run, self._beside.writer)

    # -- State from memory

    def _send(self) -> None:
        if not self._replicas.sends:
            return
        position = self._gradients.position_after(self._made)
        self._replicas.send_state(*peer_memory.packed(self._run.trained, self._made, position))

    def _receive(self) -> None:
        self._run.watch.enter(RankPhase.LOAD)
        texts = self._replicas.receive_texts()
        self._made = peer_memory.filled(self._run.trained, texts, self._replicas.receive_tensor)
        self._after = After(self._made, math.nan, {})
        self._replicas.note_state()
        self._own = self._others = self._sums = None
        self._run.watch.resume(self._made)
        self._beside.writer.resume(self._made - 1)
