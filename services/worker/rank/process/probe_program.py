"""A program that its agent asks one question: on stdin, and answered into a descriptor.

Neither stdout nor stderr can carry the answer: what the user wrote prints there. stdin is a socket:
one byte says that this process has imported what it needs, from when on its time counts.

What the user wrote runs in a child. The process itself waits for the child's end, then ends whatever the
child has left, with whatever mark and in whatever session, and leaves as the child did.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Final, NoReturn

from pydantic import BaseModel

from services.contract.messages.rank_stacks import STACKS_SIGNAL
from services.contract.system.own_process import set_up_process
from services.contract.system.rank_user import RankUser
from services.worker.rank.process.user_path import add_user_path
from services.worker.rank.process.warm import children, die_with_parent

_PR_SET_CHILD_SUBREAPER: Final = 36
_prctl = ctypes.CDLL(None).prctl


@dataclass(frozen=True)
class Question:
    """A question. ``answer``: the descriptor of a file for what comes of it."""

    question: bytes
    answer: int

    def reply(self, message: BaseModel) -> NoReturn:
        """Write the answer and end the process, whatever threads the user's code has left."""
        with open(self.answer, "wb") as file:  # noqa: PTH123 a descriptor, not a path
            file.write(message.model_dump_json().encode())
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)


def take_question(program: str) -> Question:
    """Have this process end with its agent and show its stacks to it; then read the question.

    Args:
        program: Its name, as the agent starts it.
    """
    set_up_process()
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("--answer", type=int, required=True, help="descriptor of the answer's file")
    parser.add_argument("--agent", type=int, required=True, help="process id of the agent")
    parser.add_argument("--user-path", action="append", default=[], help="where users' modules are")
    parser.add_argument("--rank-user", help="system user to become")
    arguments = parser.parse_args()
    add_user_path(arguments.user_path)
    die_with_parent(arguments.agent)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    os.set_inheritable(arguments.answer, False)  # noqa: FBT003 the standard library's signature
    with socket.socket(fileno=os.dup(0)) as channel, channel.makefile("rb") as asked:
        channel.sendall(b"?")
        question = asked.read()
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 a device, not a path to a file
        os.dup2(nothing.fileno(), 0)
    parent = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child:
        os.close(arguments.answer)
        _see_to_its_end(child)
    die_with_parent(parent)
    if arguments.rank_user is not None:
        RankUser.named(arguments.rank_user).become()
        die_with_parent(parent)
    return Question(question, arguments.answer)


def _see_to_its_end(child: int) -> NoReturn:
    """Wait for the child, or for SIGTERM, and leave nothing behind; stacks are the child's to show."""
    faulthandler.unregister(STACKS_SIGNAL)
    faulthandler.disable()
    signal.signal(STACKS_SIGNAL, lambda *_: os.kill(child, STACKS_SIGNAL))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    pid = status = 0
    while pid != child or os.WIFSTOPPED(status):  # it may have made this process its tracer
        pid, status = os.waitpid(-1, 0)
    for number in (STACKS_SIGNAL, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):
        while left := children():
            for each in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(each, signal.SIGKILL)
            os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError, ValueError):  # SIGKILL and SIGSTOP have no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
