"""Processes of this node: found by the mark in their environment, killed with their groups."""

import contextlib
import os
import queue
import re
import select
import signal
import subprocess
import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

import psutil

from services.contract.messages.warm_channel import NODE_MARK

STOPPED: Final = ("T", "t")
"""What ``process_state`` answers for a process that a signal or a tracer has stopped."""
_DIES_WITHIN_S: Final = 5.0
_PF_EXITING: Final = 0x4
_FLAGS_FIELD: Final = 6  # of /proc/<pid>/stat, counted after the command's closing parenthesis
_MOST_ENVIRONMENT: Final = 8 << 20
_ANSWERS_WITHIN_S: Final = 2.0
_ANSWERS_AT_LEAST_S: Final = 0.2
_BEFORE_A_NAME: Final = (b"", b"\0")
_BEHIND_A_MARK: Final = (b"", b"\0", b"/")
_waiting: Final[dict[int, threading.Thread]] = {}
"""By process, who was left behind with it."""
_ITS_PARENT: Final = re.compile(rb"^PPid:\s*(\d+)$", re.MULTILINE)
_ITS_TRACER: Final = re.compile(rb"^TracerPid:\s*(\d+)$", re.MULTILINE)


class ProcessHandle:
    """A process, child of this one or not, and never another one that has its number by now.

    Args:
        pid: The process.
        child: Where it is a child of this process, which must reap it.
    """

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._child = child
        self._descriptor: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        """SIGKILL it, if it still lives."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still lives."""
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def end(self) -> int | None:
        """See a process that is dying to its end; its exit code, where that can be known."""
        if self._descriptor is not None:
            self.kill()
            select.select([self._descriptor], [], [], _DIES_WITHIN_S)
            os.close(self._descriptor)
            self._descriptor = None
        return None if self._child is None else self._child.wait()


def kill_group(pid: int) -> None:
    """SIGKILL a rank and its process group; nothing happens where it is gone."""
    for kill in (os.killpg, os.kill):  # the group may not exist yet: a rank makes it after its fork
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def is_dying(pid: int) -> bool:
    """Whether a process is already exiting, a zombie or gone, so that no signal can end it.

    The kernel marks a process as exiting before it closes its sockets: a peer that saw the
    connection break is always later than this mark.
    """
    state, *fields = _stat(pid) or ["X"]
    return state in "ZX" or bool(int(fields[_FLAGS_FIELD - 1]) & _PF_EXITING)


def process_state(pid: int) -> str:
    """The kernel's letter for the state of a process (R, S, D, T, Z…); empty where it is gone."""
    return "".join(_stat(pid)[:1])


def kill_tracers(pid: int) -> list[int]:
    """SIGKILL whoever traces a thread of this process, and their tracers; answers whom.

    A dead process that somebody traces is reaped once its tracer has looked at it, which may be never:
    what a rank started can so keep the rank from being reaped, and its gang from ending. Its parent,
    which a process can make its tracer, reaps it all the same, and is spared.
    """
    killed: list[int] = []
    held = [pid]
    while held:
        tracers = {tracer for one in held for tracer in _tracers(one)}.difference(killed)
        for tracer in tracers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(tracer, signal.SIGKILL)
        killed += tracers
        held = list(tracers)
    return killed


def sweep(mark: str, spared: Collection[int] = ()) -> list[int]:
    """SIGKILL every live process with this mark but ``spared``; answers whom it killed."""
    killed = []
    for process in marked(mark):
        if process.pid not in spared:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.append(process.pid)
    return killed


def sweep_sessions(mark: str, sessions: Collection[int]) -> list[int]:
    """SIGKILL what the ranks with these pids left behind: the members of their sessions."""
    killed = []
    # The sessions first: no other process of the machine is read.
    for process in _marked_of(_members(sessions), mark):
        with contextlib.suppress(psutil.Error):
            process.kill()
            killed.append(process.pid)
    return killed


def marked(mark: str) -> list[psutil.Process]:
    """The live processes whose environment carries this mark (zombies have none).

    A node's mark stands for those of all lives of its agent, which are ``<node's>/<life>``. Processes whose
    memory does not answer are passed over: see `_Reader`.
    """
    return list(_marked_of(psutil.pids(), mark))


def await_passed_over() -> bool:
    """Returns once one that `marked` passed over answers or is gone; False if there is none."""
    waiting = list(_waiting.values())
    while waiting and all(thread.is_alive() for thread in waiting):
        waiting[0].join(_ANSWERS_AT_LEAST_S)
    return bool(waiting)


def _marked_of(pids: Iterable[int], mark: str) -> Iterator[psutil.Process]:
    for pid, waiting in list(_waiting.items()):
        if not waiting.is_alive():
            _waiting.pop(pid, None)
    own, reader = os.getpid(), _Reader()
    try:
        for pid in pids:
            if pid == own or pid in _waiting:
                continue
            environment = reader.read(pid)
            if environment is None:
                reader = _Reader()
            elif carries(environment, mark):
                with contextlib.suppress(psutil.Error):
                    yield psutil.Process(pid)
    finally:
        reader.end()


def _members(sessions: Collection[int]) -> Iterator[int]:
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has ended
            if os.getsid(pid) in sessions:
                yield pid


class _Reader:
    """A thread that reads environments of processes, and is left behind with one that does not answer.

    The kernel keeps whoever reads a process's memory waiting while that process changes what it maps. A call to
    a server or a device that is away makes this last as long, whosever the process is.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="environments", daemon=True)
        self._reads = True
        try:
            self._thread.start()
        except (
            RuntimeError
        ):  # ranks may have taken all that the system has: then whoever asks reads
            self._reads = False

    def read(self, pid: int) -> bytes | None:
        """What a process shows of its environment; None where it does not answer, and this reader is of no more use."""
        if not self._reads:
            return _environment(pid)
        self._asked.put(pid)
        # Where somebody has made many of these, they are waited for less.
        within_s = max(_ANSWERS_WITHIN_S / (1 + len(_waiting)), _ANSWERS_AT_LEAST_S)
        try:
            return self._answers.get(timeout=within_s)
        except queue.Empty:
            _waiting[pid] = self._thread
            self.end()
            return None

    def end(self) -> None:
        """Nothing more is asked."""
        self._asked.put(None)

    def _work(self) -> None:
        while (pid := self._asked.get()) is not None:
            self._answers.put(_environment(pid))


def _environment(pid: int) -> bytes:
    """Empty where it is gone or may not be read."""
    try:
        # Read plainly: psutil parses the whole environment, of every process of the machine.
        with Path(f"/proc/{pid}/environ").open("rb") as file:
            # No more than exec takes: a process can name all of its memory as its environment.
            return file.read(_MOST_ENVIRONMENT)
    except OSError:
        return b""


def carries(environment: bytes, mark: str) -> bool:
    """Whether this mark, or one below it, is in an environment as the kernel shows it.

    Looked for as it stands: a pattern takes a sixth of a second for the megabytes that a process can show, and
    no other thread of the agent runs meanwhile.
    """
    wanted = f"{NODE_MARK}={mark}".encode()
    at = environment.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        if (
            environment[max(at - 1, 0) : at] in _BEFORE_A_NAME
            and environment[end : end + 1] in _BEHIND_A_MARK
        ):
            return True
        at = environment.find(wanted, at + 1)
    return False


def _stat(pid: int) -> list[str]:
    """What follows a process's name in the kernel's line about it; nothing where it is gone."""
    try:
        # Bytes: a process may give itself a name that is no text.
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return stat.rpartition(b")")[2].decode().split()


def _tracers(pid: int) -> set[int]:
    found: set[int] = set()
    for said in _thread_statuses(pid):
        parents = {int(parent) for parent in _ITS_PARENT.findall(said)}
        found |= {int(tracer) for tracer in _ITS_TRACER.findall(said)} - parents
    return found - {0}


def _thread_statuses(pid: int) -> Iterator[bytes]:
    """What the kernel tells of each thread of a process, and of no later one that has its number."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
        threads = os.open(f"/proc/{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        closing.callback(os.close, threads)
        for thread in os.listdir(threads):  # noqa: PTH208 a descriptor, not a path
            with contextlib.suppress(OSError):
                status = os.open(f"{thread}/status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=threads)
                with open(status, "rb") as file:  # noqa: PTH123 the same
                    yield file.read()
