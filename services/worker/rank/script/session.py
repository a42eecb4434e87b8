"""What answers ``meshloom.session`` in a rank."""

import hashlib
import math
import operator
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist

from fsdp_core.checkpoint import local_shards
from meshloom.session import Figures
from services.contract.messages.board import MAX_STEP, BoardStep
from services.contract.messages.rank_pipe import (
    RankMessage,
    RankOrder,
    RankReady,
    RankSeat,
    ThroughputUnit,
)
from services.contract.system.own_process import say
from services.contract.words.states import RankPhase
from services.worker.rank.checkpoints.loading import fill_from, source_of
from services.worker.rank.checkpoints.random_state import (
    random_tensors,
    random_text,
    restore_random,
)
from services.worker.rank.checkpoints.shard_file import ShardReader
from services.worker.rank.checkpoints.state import (
    TrainingState,
    about_of,
    as_text,
    boxes_of,
    saved_shards,
)
from services.worker.rank.checkpoints.writer import CheckpointWriter
from services.worker.rank.gang.control import CONTROL_GROUP, ControlChannel
from services.worker.rank.loop.board_watch import BoardWatch
from services.worker.rank.loop.trace import TraceRecorder
from services.worker.rank.metrics.reporter import MetricsReporter
from services.worker.rank.script import nested

_TREE: Final = "script"
# A rank may evaluate for long while the others wait in ``should_stop``. Hangs are found by boards.
_WAITS_FOR_RANKS: Final = timedelta(days=1)


class Pipe(Protocol):
    """The rank's agent, as ``seat.AgentPipe`` is."""

    def send(self, message: RankMessage) -> None:
        """Tells it; callable from any thread."""
        ...

    def poll_orders(self) -> list[RankOrder]:
        """What it asks; never blocks."""
        ...


@dataclass(frozen=True)
class Ties:
    """What ties a script to the rest of Meshloom.

    Attributes:
        seat: The rank.
        pipe: Its agent.
        watch: Told of steps and phases.
        writer: Writes the checkpoints.
        metrics: Told of the metrics.
        traces: Records steps, which are what lies between two reports.
        store: For keys of the session's own.
    """

    seat: RankSeat
    pipe: Pipe
    watch: BoardWatch
    writer: CheckpointWriter
    metrics: MetricsReporter
    traces: TraceRecorder
    store: dist.PrefixStore  # type: ignore[name-defined]  # PyTorch exports it implicitly


class Session:
    """The session of one rank.

    Args:
        ties: What it speaks to.
    """

    def __init__(self, ties: Ties) -> None:
        seat = ties.seat
        self._seat = seat
        self._pipe = ties.pipe
        self._watch = ties.watch
        self._writer = ties.writer
        self._metrics = ties.metrics
        self._traces = ties.traces
        self._store = ties.store
        self._process = os.getpid()
        self._channel: ControlChannel | None = None
        self._asked = _Asked()
        self._reported = 0
        self._restored = 0
        self._left_out: list[str] | None = None
        self._saved = 0
        self._of = seat.spec.steps or 0
        self._loss: float | None = None
        self._moved_at = time.perf_counter()
        self._evaluated = 0
        self._has_told_stop = False
        self._unheeded: list[RankOrder] = []
        self._unit: ThroughputUnit = "samples"
        self._notices: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The last step that is known of."""
        return max(self._reported, self._restored, self._saved)

    @property
    def has_drained(self) -> bool:
        """Whether the script was told to stop, and steps are left."""
        return self._has_told_stop and not 0 < self._of <= self.step

    @property
    def ready(self) -> RankReady:
        """What the agent is told of a script, as far as it is known now."""
        return RankReady(
            units=(),
            groups=(CONTROL_GROUP,),
            parameters=0,
            data_digest="",
            throughput_unit=self._unit,
            loss_unit="",
            notices=self._notices,
        )

    def report(self, step: int, figures: Figures, metrics: Mapping[str, Any]) -> None:
        """See ``meshloom.session.report``."""
        self._check_process()
        values = {name: _number(name, value) for name, value in metrics.items()}
        loss = None if figures.loss is None else _number("loss", figures.loss)
        if not 0 <= operator.index(step) <= MAX_STEP:
            raise ValueError(f"session.report: step is {step!r}, not a number of steps")
        if step < self._reported:
            raise ValueError(
                f"session.report: step {step} comes after step {self._reported}; count the steps "
                "of the job, and continue from the restored one"
            )
        self._tell_what_was_left_out()
        self._of = figures.of or self._of
        if step > self._reported:
            self._notice_a_fresh_start()
            values |= self._finish_step(step, loss, figures, values)
        elif self._reported:
            self._evaluated += 1
            self._watch.evaluate(self._evaluated)
        self._metrics.report(step, values)

    def checkpoint(self, state: Any, step: int | None, every: int | None) -> bool:  # noqa: ANN401 (any nesting)
        """See ``meshloom.session.checkpoint``."""
        self._check_process()
        if step is None or every is not None:
            self._agree("checkpoint")
        # Not each rank reports, and all must save the same step.
        at = self._asked.step if step is None else step
        if every is not None and not self._is_due(at, every):
            return False
        if not 0 < at <= MAX_STEP:
            raise ValueError(
                f"session.checkpoint: the step is {at}; give step=, or report one before"
            )
        if not self._writer.is_due(at):
            return False
        self._notice_a_fresh_start()
        self._tell_what_was_left_out()
        self._watch.enter(RankPhase.CHECKPOINT)
        is_last = self._asked.stop or at == self._of
        self._writer.save(self._captured(state, at), is_last=is_last)
        self._saved = at
        self._asked.checkpoint = False
        self._watch.enter(RankPhase.SCRIPT)
        return True

    def restore(self, state: Any) -> Any:  # noqa: ANN401 (any nesting)
        """See ``meshloom.session.restore``."""
        self._check_process()
        if self._seat.resume_from is None:
            return None
        self._watch.enter(RankPhase.LOAD)
        manifest = source_of(self._seat, self._seat.resume_from, self._pipe.send)
        found: list[Any] = []
        fill_from(
            self._seat,
            manifest,
            lambda readers: found.append(self._filled(state, readers)),
            self._pipe.send,
        )
        self._restored = manifest.step
        self._writer.resume(manifest.step)
        self._watch.resume(manifest.step)
        self._watch.enter(RankPhase.SCRIPT)
        if self._seat.rank == 0:
            where = f"restored {manifest.checkpoint_id}; continues after step {manifest.step}\n"
            say(where, "stdout")
        self._moved_at = time.perf_counter()
        return found[0]

    def should_stop(self) -> bool:
        """See ``meshloom.session.should_stop``."""
        self._check_process()
        self._agree("should_stop")
        self._has_told_stop = self._asked.stop
        return self._asked.stop

    def _finish_step(
        self, step: int, loss: float | None, figures: Figures, values: Mapping[str, float]
    ) -> dict[str, float]:
        """Puts the step on the board; the figures that it has there, by name."""
        now = time.perf_counter()
        steps = max(step - max(self._reported, self._restored), 1)
        elapsed_s = (now - self._moved_at) / steps
        if figures.tokens is not None and not self._reported:
            self._unit = "tokens"
            self._pipe.send(self.ready)
        units = figures.tokens if figures.tokens is not None else figures.samples
        self._loss = loss
        self._reported = step
        done = BoardStep(
            step=step,
            loss=math.nan if loss is None else loss,
            grad_norm=values.get("grad_norm", math.nan),
            learning_rate=values.get("learning_rate", math.nan),
            tokens_per_s=math.nan if units is None else float(units) / elapsed_s,
            step_time_s=elapsed_s,
            of=min(self._of, MAX_STEP),
        )
        self._watch.finish_step(done, self._writer.copied_bytes)
        self._traces.end_step()
        self._poll_orders()
        self._traces.turn(step)
        self._traces.begin_step(step + 1)
        self._watch.enter(RankPhase.SCRIPT)
        self._moved_at = time.perf_counter()
        speed = "tokens_per_s" if figures.tokens is not None else "samples_per_s"
        told = {"loss": loss, "step_time_s": elapsed_s, speed: done.tokens_per_s}
        return {n: v for n, v in told.items() if v is not None and not math.isnan(v)}

    def _notice_a_fresh_start(self) -> None:
        """Tells once that the script makes steps again which a checkpoint holds."""
        source = self._seat.resume_from
        if source is None or self._restored or self._notices:
            return
        notice = (
            f"the attempt resumes from checkpoint {source}, but the script has not called "
            "session.restore, so it starts over; call it before the first step: "
            "state = session.restore(state) or state"
        )
        self._notices = (notice,)
        if self._seat.rank == 0:
            say(f"notice: {notice}\n", "stdout")
        self._pipe.send(self.ready)

    def _tell_what_was_left_out(self) -> None:
        """When training goes on: it may have been restored in several calls, a part in each."""
        if self._left_out and self._seat.rank == 0:
            names = ", ".join(self._left_out)
            say(f"not restored, since the given state lacks it: {names}\n", "stdout")
        self._left_out = None

    def _is_due(self, step: int, every: int) -> bool:
        every = self._seat.spec.checkpoint.every_steps or every
        is_wanted, self._asked.checkpoint = self._asked.checkpoint, False
        return is_wanted or (every > 0 and step > 0 and step % every == 0)

    def _agree(self, asker: str) -> None:
        """Has all ranks know what any of them was asked, unless ``asker`` can hear the last answer.

        A step that asks for both, a checkpoint and a stop, in whichever order, agrees once.
        """
        if self._asked.is_news_to(asker):
            return
        self._poll_orders()
        orders, self._unheeded = self._unheeded, []
        requests = [any(o.checkpoint for o in orders), any(o.stop for o in orders), self.step]
        agreed = self._control().all_reduce(torch.tensor(requests), dist.ReduceOp.MAX).wait()
        self._asked.take(agreed.tolist(), asker)

    def _poll_orders(self) -> None:
        """Takes what this rank's agent asks for; on all but traces the ranks agree later."""
        orders = self._pipe.poll_orders()
        self._traces.take_orders(orders)
        self._unheeded += orders

    def _control(self) -> ControlChannel:
        if self._channel is None:
            group = dist.ProcessGroupGloo(
                self._store, self._seat.rank, self._seat.plan.world_size, _WAITS_FOR_RANKS
            )
            # It is a backend rather than a group, and has all that the channel uses of one.
            self._channel = ControlChannel(cast("dist.ProcessGroup", group), self._watch)
        return self._channel

    def _captured(self, state: Any, step: int) -> TrainingState:  # noqa: ANN401 (any nesting)
        taken = nested.taken(state)
        outline = f"{step}\n{taken.outline}"
        if not self._control().agree_on(hashlib.sha256(outline.encode()).digest()):
            raise ValueError(
                "session.checkpoint: the ranks name different steps, or have different names or shapes "
                f"of tensors in their states; rank {self._seat.rank} has {len(taken.tensors)} tensors "
                f"after step {step}"
            )
        device = self._device
        entries = local_shards(taken.tensors)
        tensors = {entry.fqn: entry.tensor for entry in entries} | random_tensors(device)
        is_first = self._seat.rank == 0
        about = {
            "step": step,
            "rank": self._seat.rank,
            "world_size": self._seat.plan.world_size,
            "boxes": boxes_of(entries),
            **random_text(),
            **({_TREE: taken.tree} if is_first else {}),
        }
        return TrainingState(step, self._loss, tensors, as_text(about))

    def _filled(self, state: Any, readers: list[ShardReader]) -> Any:  # noqa: ANN401 (any nesting)
        abouts = [(reader, about_of(reader)) for reader in readers]
        first, tree = next(
            ((reader, about[_TREE]) for reader, about in abouts if _TREE in about), (None, None)
        )
        if first is None or tree is None:
            raise ValueError(
                f"checkpoint {self._seat.resume_from} was not saved by session.checkpoint: a script "
                "cannot restore it"
            )
        first.verify()
        shards = [s for reader, about in abouts for s in saved_shards(reader, about["boxes"])]
        restored = nested.restored(state, tree, shards)
        before, left_out = self._left_out, nested.unasked(state, tree)
        self._left_out = left_out if before is None else [n for n in before if n in left_out]
        own = (self._seat.rank, self._seat.plan.world_size)
        for reader, about in abouts:
            if (about["rank"], about["world_size"]) == own:
                restore_random(self._device, reader, about)
        return restored

    @property
    def _device(self) -> torch.device:
        # A script may train on the host of a node with accelerators: then there is no state of theirs.
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # PyTorch's
        return (
            torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
        )

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "only the rank itself may use meshloom.session; this process was started by it, as "
                "a DataLoader's worker is"
            )


class _Asked:
    """What all ranks know that any of them was asked, and who has heard of the newest answer."""

    def __init__(self) -> None:
        self.checkpoint = False
        self.stop = False
        self.step = 0
        self._unheard: set[str] = set()

    def is_news_to(self, asker: str) -> bool:
        """Whether there is an answer that ``asker`` has not heard; it has then."""
        if asker not in self._unheard:
            return False
        self._unheard.discard(asker)
        return True

    def take(self, agreed: Sequence[int], asker: str) -> None:
        """An answer, which ``asker`` hears. What is asked for stays so until it is done."""
        checkpoint, stop, self.step = agreed
        self.checkpoint = self.checkpoint or bool(checkpoint)
        self.stop = self.stop or bool(stop)
        self._unheard = {"checkpoint", "should_stop"} - {asker}


def _number(name: str, value: object) -> float:
    if isinstance(value, torch.Tensor):
        value = value.detach()  # PyTorch warns of a loss that still has its graph
    try:
        return float(value)  # type: ignore[arg-type]  # users give what they have
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"session.report: {name} is a {type(value).__name__}, which is not a number: {error}"
        ) from error
