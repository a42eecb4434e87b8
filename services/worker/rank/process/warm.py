"""The warm process: a fork of the template, it forks every rank of a node.

It has one thread and never touches CUDA, for neither survives a fork. It holds no credential: its
environment was scrubbed by the agent. It dies with the agent, and its ranks die with it.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from services.contract.messages.rank_pipe import RankSeat
from services.contract.messages.warm_channel import (
    ForkFailed,
    ForkRank,
    RankForked,
    RankReaped,
    WarmChannel,
)
from services.contract.system.durable import append_plain
from services.contract.system.mask import Mask
from services.contract.system.own_process import LossyOutput
from services.contract.system.pipe_end import PipeEnd
from services.contract.system.rank_user import RankUser, forgo_rights
from services.worker.rank.metrics.files import MetricFiles
from services.worker.rank.process.host_memory import limit_memory
from services.worker.rank.process.seat import take_seat

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_PTRACER: Final = 0x59616D61
_NOT_STARTED: Final = 70  # EX_SOFTWARE: the rank failed before its trainer was called
_GIB: Final = 1 << 30
_DIES_BEFORE_BY: Final = 500
_LAST_BUT_PROBES: Final = 999
_STOPPED_WITHIN_S: Final = 5.0
_prctl = ctypes.CDLL(None).prctl


@dataclass(frozen=True)
class Ranks:
    """What all ranks of a node are.

    Attributes:
        trainer: What they run, as ``package.module:callable``.
        notices: What rank 0 of a gang writes first.
        user: The system user that they become; None: they stay this process's.
    """

    trainer: str
    notices: tuple[str, ...] = ()
    user: RankUser | None = None


class WarmProcess:
    """Forks ranks on request and reports how each ended.

    Args:
        channel: The end of the socket to the agent.
        ranks: What ranks are.
        agent: Its process, which may look into ranks.
        lifeline: A descriptor that is no rank's: who has it can undo that this process dies with
            the agent.
        wake: Both ends of a socket pair; ``wake[0]`` turns readable when a child ends.
    """

    def __init__(
        self,
        channel: WarmChannel,
        ranks: Ranks,
        agent: int,
        lifeline: int,
        wake: tuple[socket.socket, socket.socket],
    ) -> None:
        self._lifeline = lifeline
        self._channel = channel
        self._is = ranks
        self._agent = agent
        self._wake = wake
        self._ranks: set[int] = set()
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Answer until the agent closes the channel."""
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._wake[0], selectors.EVENT_READ)
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                self._selector.select()
                with contextlib.suppress(BlockingIOError):
                    self._wake[0].recv(4096)
                # The whole batch is taken before the first fork: a rank closes what is not its own.
                orders = self._channel.receive()
                for index, (message, descriptors) in enumerate(orders):
                    if isinstance(message, ForkRank):
                        later = [fd for _, fds in orders[index + 1 :] for fd in fds]
                        self._fork(message, descriptors, later)
                self._reap()

    def _fork(self, asked: ForkRank, descriptors: tuple[int, ...], later: list[int]) -> None:
        warm, seat = os.getpid(), asked.seat
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            said = ForkFailed(rank=seat.rank, reason=str(error), number=error.errno)
            self._channel.send(said)
            return
        finally:
            if os.getpid() == warm:
                for descriptor in descriptors:
                    os.close(descriptor)
        if pid == 0:
            self._become_rank(warm, asked, descriptors, later)
        self._ranks.add(pid)
        self._channel.send(RankForked(rank=seat.rank, pid=pid))

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                # One that has made this process its tracer is told of when it stops, too.
                if pid in self._ranks and not os.WIFSTOPPED(status):
                    self._ranks.discard(pid)
                    self._channel.send(_reaped(pid, status))
        end_strays(self._ranks)

    def _become_rank(
        self, warm: int, asked: ForkRank, descriptors: tuple[int, ...], later: list[int]
    ) -> NoReturn:
        try:
            seat, (reading, writing, *listening) = asked.seat, descriptors
            if asked.has_secrets:
                seat = _with_secrets(seat, listening.pop())
            os.setsid()
            die_with_parent(warm)
            # What it starts and disowns comes to the warm process at its end, and not before: so all
            # there that is no rank was left by one that is dead.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            _die_before_others()
            # Yama lets only ancestors look into a process; others that it names. Elsewhere void.
            _prctl(_PR_SET_PTRACER, self._agent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            self._channel.close()
            for end in self._wake:
                end.close()
            for descriptor in (self._lifeline, *later):
                os.close(descriptor)
            _redirect_output(Path(seat.log_folder), seat.rank, Mask(seat.secrets))
            if self._is.user is not None:
                forgo_rights()  # before torch starts threads
            if seat.rank == 0:
                sys.stderr.writelines(f"WARNING: {notice}\n" for notice in self._is.notices)
            faulthandler.enable()
            _limit_threads(seat.threads)
            if seat.spec.resources.memory_gib is not None:
                limit_memory(int(seat.spec.resources.memory_gib * _GIB))
            listen_fd = listening[0] if listening else None
            take_seat(
                seat,
                PipeEnd(reading, writing),
                listen_fd,
                self._is.trainer,
                lambda: self._become_user(warm, seat),
            )
        except BaseException:  # noqa: BLE001 a forked child must never return into the loop
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(_NOT_STARTED)

    def _become_user(self, warm: int, seat: RankSeat) -> None:
        if self._is.user is not None:
            if seat.rank == 0:
                MetricFiles.of(Path(seat.log_folder), seat.fence).open_early()
            self._is.user.become()
            die_with_parent(warm)  # the kernel forgets it with the old user


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Raises:
        SystemExit: ``parent`` ended before this call could take effect.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")


def _die_before_others() -> None:
    """Where memory runs out, the kernel ends ranks before their agent, Redis or a controller."""
    place = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        place.write_text(str(min(int(place.read_text()) + _DIES_BEFORE_BY, _LAST_BUT_PROBES)))


def serve_agent(
    channel: WarmChannel,
    ranks: Ranks,
    agent: int,
    lifeline: int,
    wake: tuple[socket.socket, socket.socket],
) -> None:
    """Be the warm process of an agent until it closes the channel."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    WarmProcess(channel, ranks, agent, lifeline, wake).serve()


def _with_secrets(seat: RankSeat, descriptor: int) -> RankSeat:
    with open(descriptor, "rb") as file:
        file.seek(0)  # its place is the agent's, who has written it
        return seat.model_copy(update={"secrets": json.loads(file.read())})


def _reaped(pid: int, status: int) -> RankReaped:
    code = os.waitstatus_to_exitcode(status)
    return RankReaped(pid=pid, exit_code=code) if code >= 0 else RankReaped(pid=pid, signal=-code)


def children() -> list[int]:
    """The processes that this one has to reap."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    try:
        return [int(pid) for pid in listing.read_text().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return []


def end_strays(spared: Collection[int]) -> None:
    """Kill the children of this process but ``spared``, and all below them, whatever mark or session they have.

    They are stopped first, until a look finds none that was not: those that fork without end, a few hundred at a
    time, would else be there again as fast as they are killed. Blocking, for some seconds at most.
    """
    until = time.monotonic() + _STOPPED_WITHIN_S
    stopped: set[int] = set()
    while new := _below(set(children()).difference(spared)) - stopped:
        _signal(new, signal.SIGSTOP)
        stopped |= new
        if time.monotonic() > until:
            break
    _signal(stopped, signal.SIGKILL)


def _below(pids: set[int]) -> set[int]:
    """These processes and all that descend from them."""
    found, todo = set(pids), list(pids)
    while todo:
        new = set(_children_of(todo.pop())) - found
        found |= new
        todo += new
    return found


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        # Of another user by now, by a program such as sudo: it must not end this process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _redirect_output(folder: Path, rank: int, mask: Mask) -> None:
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 a device, not a path to a file
        os.dup2(nothing.fileno(), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        log = append_plain(folder / f"rank-{rank}.{name}.log")
        os.dup2(log, number)
        os.close(log)
        setattr(sys, name, LossyOutput.text(number, mask.line))


def _limit_threads(threads: int) -> None:
    # Looked up, not imported: whether there is a torch to limit is the trainer's choice.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
