"""A rank takes its seat: the board and the pipe around one call of the trainer.

The trainer is found by name, so that this module and the warm process know no torch; it is any
callable of the shape ``Train``. Its exception, or its return, is all that decides how a rank ends.
"""

import contextlib
import faulthandler
import importlib
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn, Protocol, cast

from services.contract.messages.board import BoardWriter
from services.contract.messages.rank_pipe import RankFailed, RankMessage, RankOrder, RankSeat
from services.contract.messages.rank_stacks import STACKS_SIGNAL, stacks_path
from services.contract.system.mask import Mask
from services.contract.system.own_process import flush_outputs, say
from services.contract.system.pipe_end import PipeEnd
from services.contract.words.bounds import mask_before_cuts
from services.contract.words.states import RankPhase
from services.worker.rank.process.failures import one_line, traceback_of
from services.worker.rank.process.host_memory import ThreadRefusals, refusal_behind
from services.worker.rank.process.user_path import add_code

DEFAULT_TRAINER: Final = "services.worker.rank.loop.trainer:train"
SCRIPT_TRAINER: Final = "services.worker.rank.script.runner:run"
"""What trains in the place of any other trainer where the job runs a script."""
_READ_BYTES: Final = 65_536
_PULSE_S: Final = 0.25
_EXIT_CODES: Final = 256


class AgentPipe:
    """The rank's end of the pipe to its agent: one JSON object a line, both ways.

    ``send`` may be called from any thread; ``poll_orders`` from one. A process that user code forks has it, too, and
    speaks for no rank: it would tell the end of one that trains on.

    Args:
        end: Of this process from now on, in blocking mode.
    """

    def __init__(self, end: PipeEnd) -> None:
        os.set_blocking(end.reading, False)
        self._end = end
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._unread = b""

    def send(self, message: RankMessage) -> None:
        """Tell the agent. Does nothing when the agent has ended: training does not depend on it."""
        if os.getpid() != self._pid:
            return
        left = memoryview(message.model_dump_json().encode() + b"\n")
        with self._sending, contextlib.suppress(OSError):
            while left:
                left = left[os.write(self._end.writing, left) :]

    def poll_orders(self, within_s: float = 0.0) -> list[RankOrder]:
        """The orders that came since the last call, oldest first.

        ``within_s``: how long to wait for the first, if none is there.
        """
        if within_s:
            select.select([self._end.reading], [], [], within_s)
        while True:
            try:
                received = os.read(self._end.reading, _READ_BYTES)
            except OSError:  # nothing there now (EAGAIN), or the agent has ended
                break
            if not received:
                break
            self._unread += received
        *lines, self._unread = self._unread.split(b"\n")
        return [RankOrder.model_validate_json(line) for line in lines]


class Train(Protocol):
    """What a trainer is: it trains until done, drained or failed (an exception).

    ``listen_fd`` is the bound rendezvous socket of the store that rank 0 hosts, None elsewhere.
    It sends ``RankFinished`` itself, for only it knows whether it drained.
    """

    def __call__(
        self, *, seat: RankSeat, pipe: AgentPipe, board: BoardWriter, listen_fd: int | None
    ) -> None:
        """Train the seat's share of the job."""
        ...


def load_trainer(name: str) -> Train:
    """The callable that ``package.module:callable`` names.

    Raises:
        ImportError: There is no such module.
        AttributeError: It has no such callable.
    """
    module, _, attribute = name.partition(":")
    return cast("Train", getattr(importlib.import_module(module), attribute))


def take_seat(
    seat: RankSeat,
    end: PipeEnd,
    listen_fd: int | None,
    trainer: str = DEFAULT_TRAINER,
    become_user: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Run the trainer in this process, then end the process: code 0, or 1 after an exception.

    A script that calls ``sys.exit`` with another code ends with that.

    ``become_user`` is called before any user code, once the files in the attempt's folder are open.

    The process leaves by ``os._exit``: tearing gloo down can abort after all work is done, and
    must not turn a success into a failure. Every kind of exception counts, ``SystemExit`` too.
    """
    mask = Mask(seat.secrets)
    mask_before_cuts(mask.text)
    pipe = AgentPipe(end)
    step = 0
    code = 1
    threads: ThreadRefusals | None = None
    try:
        board = BoardWriter.create(Path(seat.board_path), seat.fence)
        board.store(replace(board.snapshot, phase=RankPhase.INIT, stored_ns=time.monotonic_ns()))
        _show_life(seat, board)
        threads = ThreadRefusals(lambda: board.snapshot.step)
        threads.watch()
        become_user()
        if seat.code_folder is not None:
            add_code(seat.code_folder)
        try:
            trains = trainer if seat.spec.entrypoint is None else SCRIPT_TRAINER
            load_trainer(trains)(seat=seat, pipe=pipe, board=board, listen_fd=listen_fd)
            code = 0
        finally:
            step = board.snapshot.step
    except BaseException as error:  # noqa: BLE001 whatever ends a rank is reported
        text = mask.text(traceback_of(error))
        code = _exit_code(error)
        say(text, "stderr")
        refused = refusal_behind(error) or (None if threads is None else threads.before(step))
        pipe.send(
            RankFailed(
                error=one_line(error, mask) + _told(refused, error, mask) + _advice(seat, refused),
                error_types=(*_names(type(error)), *_of_another(refused, error)),
                traceback=text,
                step=step,
            )
        )
    flush_outputs()
    os._exit(code)


def _exit_code(error: BaseException) -> int:
    asked = error.code if isinstance(error, SystemExit) else None
    return asked if isinstance(asked, int) and 0 < asked < _EXIT_CODES else 1


def _told(refused: BaseException | None, error: BaseException, mask: Mask) -> str:
    """What is behind an error that does not say itself that memory was refused."""
    if refused is None or refused is error:
        return ""
    return f"; the system refused memory: {one_line(refused, mask)}"


def _of_another(refused: BaseException | None, error: BaseException) -> tuple[str, ...]:
    return () if refused is None or refused is error else _names(type(refused))


def _advice(seat: RankSeat, refused: BaseException | None) -> str:
    """What to do about an allocation that was refused because of the rank's limit."""
    limit = seat.spec.resources.memory_gib
    if limit is None or refused is None:
        return ""
    return (
        f" (this rank may take {limit:g} GiB: raise resources.memory_gib, lower train.micro_batch, or "
        "shard over more ranks)"
    )


def _show_life(seat: RankSeat, board: BoardWriter) -> None:
    """Have this process answer from outside, whatever its training thread is doing.

    The stacks are written by a signal handler in C, which needs no lock of the interpreter; the
    pulse needs it, and so tells whether somebody never gives it back.
    """
    path = stacks_path(Path(seat.log_folder), seat.rank)
    draft = path.with_suffix(".draft")
    faulthandler.register(STACKS_SIGNAL, file=draft.open("ab"), all_threads=True)
    draft.replace(path)  # who sees the file may send the signal: without a handler it would kill

    def beat() -> None:
        never = threading.Event()
        while True:
            board.beat(time.monotonic_ns())
            never.wait(_PULSE_S)

    threading.Thread(target=beat, name="pulse", daemon=True).start()


def _names(kind: type[BaseException]) -> tuple[str, ...]:
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__[:-1])
