"""Processes of this node: found by the mark in their environment, killed with their groups."""

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Final

import psutil

from services.contract.warm_channel import NODE_MARK

STOPPED: Final = ("T", "t")
"""What ``process_state`` answers for a process that a signal or a tracer has stopped."""
_DIES_WITHIN_S: Final = 5.0
_PF_EXITING: Final = 0x4
_FLAGS_FIELD: Final = 6  # of /proc/<pid>/stat, counted after the command's closing parenthesis


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
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

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
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    state, *fields = stat.rpartition(")")[2].split()
    return state in "ZX" or bool(int(fields[_FLAGS_FIELD - 1]) & _PF_EXITING)


def process_state(pid: int) -> str:
    """The kernel's letter for the state of a process (R, S, D, T, Z…); empty where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


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
    for process in marked(mark):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) in sessions:
                process.kill()
                killed.append(process.pid)
    return killed


def marked(mark: str) -> list[psutil.Process]:
    """The live processes whose environment carries this mark (zombies have none).

    A node's mark stands for those of all lives of its agent, which are ``<node's>/<life>``.
    """
    own = os.getpid()
    wanted = f"{NODE_MARK}={mark}".encode()
    found = []
    for pid in psutil.pids():
        # Read plainly: psutil parses the whole environment, of every process of the machine.
        with contextlib.suppress(OSError, psutil.Error):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            marks = (entry for entry in environment.split(b"\0") if entry.startswith(wanted))
            if pid != own and any(entry[len(wanted) :][:1] in {b"", b"/"} for entry in marks):
                found.append(psutil.Process(pid))
    return found
