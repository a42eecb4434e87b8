"""Records steps of this rank by PyTorch's profiler, for people who ask for a trace.

The profiler begins and ends between two steps, on the training thread, and neither it nor what fails in
it changes a number. While its events are taken, which holds the interpreter's lock, the board says
TRACE; a thread then compresses them beside the next steps.
"""

import gzip
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp_core import torch_private
from services.contract.jobs.traces import MOST_BYTES, draft, raw_draft, remove_drafts, trace_file
from services.contract.messages.rank_pipe import (
    RankMessage,
    RankOrder,
    RankSeat,
    RankTraced,
    RankTraceFailed,
    TraceOrder,
)
from services.contract.system.durable import make_folders, node_condition, sync_folder
from services.contract.words.states import RankPhase
from services.worker.rank.loop.board_watch import BoardWatch

_COMPRESSION: Final = 4
_PIECE_BYTES: Final = 1 << 20
_TAIL_BYTES: Final = 16
_WRITTEN_WITHIN_S: Final = 10.0
_ABANDONING_S: Final = 0.5


class TraceError(RuntimeError):
    """A trace could not be recorded, and why."""


class _Recording:
    """A trace in the making.

    Args:
        order: What was asked for.
        first_step: The step with which it begins.
        device: Whose work is recorded beside the host's.
    """

    def __init__(self, order: TraceOrder, first_step: int, device: torch.device) -> None:
        self.order = order
        self.first_step = first_step
        self.done = 0
        self._thread = threading.get_ident()
        activities = {ProfilerActivity.CPU}
        if device.type == "cuda":
            activities.add(ProfilerActivity.CUDA)
        self._activities = activities
        self._profiler = profile(activities=activities)
        self._span: record_function | None = None

    @property
    def is_done(self) -> bool:
        """Whether all steps are recorded."""
        return self.done >= self.order.steps

    @property
    def is_of_this_thread(self) -> bool:
        """Whether it was begun in this one, which the profiler follows; a script may report from several."""
        return self._thread == threading.get_ident()

    def start(self) -> None:
        """Records from now on."""
        if torch_private.is_profiling():
            raise TraceError("the training code is recording with a profiler of its own")
        try:
            self._profiler.start()
        except Exception:
            self.discard()
            raise

    def discard(self) -> None:
        """Ends it, if it goes on: events that nobody takes would fill the memory."""
        if torch_private.is_profiling():
            with suppress(Exception):  # what made it fail was told
                self._profiler.stop()

    def begin_step(self, step: int) -> None:
        """What follows is this step. Readers of traces find steps by this name."""
        self._span = record_function(f"ProfilerStep#{step}")
        self._span.__enter__()  # type: ignore[no-untyped-call]  # PyTorch's

    def end_step(self) -> None:
        """The step is done."""
        if self._span is not None:
            span, self._span = self._span, None
            span.__exit__(None, None, None)
            self.done += 1

    def collect(self, *, on: bool) -> None:
        """Goes on to record, or records nothing for a while."""
        self._profiler.toggle_collection_dynamic(on, self._activities)

    def save(self, path: Path) -> None:
        """Ends it, and writes what was recorded as JSON.

        Raises:
            TraceError: It is not whole, or larger than may be.
        """
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(path))
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise TraceError(
                f"{self.done} steps make {size >> 20} MiB, and a trace has {MOST_BYTES >> 20} at most: "
                "ask for fewer steps"
            )
        with path.open("rb") as file:  # the profiler says nothing of a write that failed
            file.seek(max(size - _TAIL_BYTES, 0))
            if not file.read().rstrip().endswith(b"}"):
                raise TraceError(
                    f"{path.parent} could not be written completely: its disk may be full"
                )


class TraceRecorder:
    """Records when the agent asks for it, one trace at a time, and tells what came of it.

    A block of ``with`` that ends gives up what is not recorded yet.

    Args:
        seat: Names the job, the rank and the storage.
        send: Tells the agent; may be called from any thread.
        watch: Told while the profiler begins and ends.
        device: Whose work is recorded beside the host's.
    """

    def __init__(
        self,
        seat: RankSeat,
        send: Callable[[RankMessage], None],
        watch: BoardWatch,
        device: torch.device,
    ) -> None:
        self._seat = seat
        self._send = send
        self._watch = watch
        self._device = device
        self._asked: TraceOrder | None = None
        self._recording: _Recording | None = None
        self._writing: threading.Thread | None = None
        self._is_busy = False
        self._abandoned = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The profiler is not stopped: the process ends, and after a failure its device may never answer.
        how = "ended" if kind is None else f"failed ({kind.__name__})"
        if self._asked is not None:
            is_script = self._seat.spec.entrypoint is not None
            hint = "; a step of a script begins with a session.report" if is_script else ""
            self._fail(self._asked.trace_id, f"the rank {how} before its next step{hint}")
        if self._recording is not None:
            order = self._recording.order
            made = f"{self._recording.done} of {order.steps} steps"
            self._fail(order.trace_id, f"the rank {how} after {made}")
        if self._writing is not None:
            if kind is None:
                self._writing.join(_WRITTEN_WITHIN_S)
            self._abandoned.set()
            self._writing.join(_ABANDONING_S)

    def take_orders(self, orders: Iterable[RankOrder]) -> None:
        """Takes what agents ask for; it begins at the next ``turn``."""
        for order in orders:
            if order.trace is None:
                continue
            if self._is_busy:
                reason = "it still records, or writes, another trace"
                self._send(RankTraceFailed(trace_id=order.trace.trace_id, reason=reason))
            else:
                self._asked, self._is_busy = order.trace, True

    @property
    def is_due(self) -> bool:
        """Whether one begins or ends at the end of the step that is about to be made."""
        recording = self._recording
        ends = recording is not None and recording.done + 1 >= recording.order.steps
        return self._asked is not None or ends

    def begin_step(self, step: int) -> None:
        """Step number ``step`` begins; all that follows up to ``end_step`` is in it."""
        recording = self._recording
        if recording is not None and recording.is_of_this_thread:
            with self._failures_told(recording.order.trace_id):
                recording.begin_step(step)

    def end_step(self) -> None:
        """It is done."""
        recording = self._recording
        if recording is not None and recording.is_of_this_thread:
            with self._failures_told(recording.order.trace_id):
                recording.end_step()

    def turn(self, step: int) -> None:
        """Between ``step`` and the next one: what is recorded ends, and what was asked for begins.

        Takes as long as the profiler does, with the phase TRACE on the board.
        """
        recording = self._recording
        if recording is not None and recording.is_done and recording.is_of_this_thread:
            with self._failures_told(recording.order.trace_id):
                self._save(recording, step)
                self._recording = None
        order, self._asked = self._asked, None
        if order is not None:
            with self._failures_told(order.trace_id):
                self._watch.enter(RankPhase.TRACE)
                recording = _Recording(order, step + 1, self._device)
                recording.start()
                self._recording = recording

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing is recorded: an evaluation may be longer than all steps."""
        recording = self._recording
        if recording is None:
            yield
            return
        with self._failures_told(recording.order.trace_id):
            recording.collect(on=False)
        yield
        if self._recording is recording:
            with self._failures_told(recording.order.trace_id):
                recording.collect(on=True)

    def _file(self, trace_id: str) -> Path:
        return trace_file(
            Path(self._seat.storage_root), self._seat.job_id, trace_id, self._seat.rank
        )

    def _save(self, recording: _Recording, last_step: int) -> None:
        file = self._file(recording.order.trace_id)
        self._watch.enter(RankPhase.TRACE)
        make_folders(file.parent, Path(self._seat.storage_root))
        recording.save(raw_draft(file))
        self._writing = threading.Thread(
            target=self._write,
            args=(recording.order, recording.first_step, last_step),
            name="trace",
            daemon=True,
        )
        self._writing.start()

    def _write(self, order: TraceOrder, first_step: int, last_step: int) -> None:
        with self._failures_told(order.trace_id):
            size = self._compressed(self._file(order.trace_id))
            self._is_busy = False  # before it is told: then another one may be asked for
            self._send(
                RankTraced(
                    trace_id=order.trace_id,
                    bytes=size,
                    first_step=first_step,
                    last_step=last_step,
                )
            )

    def _compressed(self, file: Path) -> int:
        raw, unfinished = raw_draft(file), draft(file)
        with raw.open("rb") as source, unfinished.open("xb") as target:
            with gzip.GzipFile("", "wb", _COMPRESSION, target, mtime=0) as packed:
                while part := source.read(_PIECE_BYTES):
                    if self._abandoned.is_set():
                        raise TraceError("the rank ended before it was written")
                    packed.write(part)
            target.flush()
            os.fsync(target.fileno())
            size = target.tell()
        unfinished.replace(file)
        sync_folder(file.parent)
        remove_drafts(file)
        return size

    @contextmanager
    def _failures_told(self, trace_id: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 (told to the agent: training does not depend on it)
            if self._recording is not None:
                self._recording.discard()
            node_id = self._seat.plan.ranks[self._seat.rank].node_id
            reason = (
                str(error) if isinstance(error, TraceError) else f"{type(error).__name__}: {error}"
            )
            self._fail(trace_id, node_condition(error, node_id) or reason)

    def _fail(self, trace_id: str, reason: str) -> None:
        try:
            remove_drafts(self._file(trace_id))
        except OSError as error:
            reason = f"{reason}; what it had written cannot be removed: {error}"
        self._recording, self._is_busy = None, False
        self._send(RankTraceFailed(trace_id=trace_id, reason=reason))
