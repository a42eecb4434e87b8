"""A program that its agent asks one question: on a socket, and answered into a descriptor.

It runs in a fork of the template, so that it need not import torch. Neither stdout nor stderr can carry
the answer: what the user wrote prints there. One byte on the socket says that this process has imported
what it needs, from when on its time counts; the last line there is how it ended.

What the user wrote runs in a child. The process itself waits for the child's end, then ends whatever the
child has left, with whatever mark and in whatever session, and reports how the child ended.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

from pydantic import BaseModel

from services.contract.messages.rank_stacks import STACKS_SIGNAL
from services.contract.system.own_process import flush_outputs
from services.contract.system.rank_user import RankUser, forgo_rights
from services.worker.rank.process.warm import children, die_with_parent, end_strays

_PR_SET_CHILD_SUBREAPER: Final = 36
_FAILED: Final = 1
_LOOK_EVERY_S: Final = 0.1
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
        flush_outputs()
        os._exit(0)


def run_program(
    program: str, descriptors: tuple[int, int, int], user: RankUser | None, lifeline: int
) -> NoReturn:
    """Be a program from its question to its end.

    Args:
        program: The module; its ``main`` takes a `Question` and does not return.
        descriptors: The end of the agent's socket, a file for the answer, one for output. They are
            this process's from now on.
        user: The system user that it becomes once it has the question; None: it stays this one.
        lifeline: A descriptor that is not for the user's code: see `warm.WarmProcess`.
    """
    channel, answer, words = descriptors
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 a device, not a path to a file
        os.dup2(nothing.fileno(), 0)
    for number in (1, 2):
        os.dup2(words, number)
    os.close(words)
    sys.argv = [program]
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    with socket.socket(fileno=channel) as agent:
        main = _imported(program, agent)
        with contextlib.suppress(ConnectionError), agent.makefile("rb") as asked:
            agent.sendall(b"?")
            question = asked.read()
        parent = os.getpid()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        child = os.fork()
        if child:
            os.close(answer)
            _see_to_its_end(child, agent)
    os.close(lifeline)
    try:
        die_with_parent(parent)
        if user is not None:
            forgo_rights()
            user.become()
            die_with_parent(parent)  # the kernel forgets it with the old user
        main(Question(question, answer))
    except BaseException:  # noqa: BLE001 a forked child must never return into the template's loop
        traceback.print_exc()
    finally:
        flush_outputs()
        os._exit(_FAILED)


def _imported(program: str, agent: socket.socket) -> Callable[[Question], NoReturn]:
    gc.disable()  # imports leave no garbage; looking for it takes a fifth of their time
    try:
        main: Callable[[Question], NoReturn] = importlib.import_module(program).main
    except Exception:  # noqa: BLE001 whatever it is, the agent reads it with the output
        traceback.print_exc()
        _report(agent, _FAILED)
    gc.freeze()
    gc.enable()
    return main


def _see_to_its_end(child: int, agent: socket.socket) -> NoReturn:
    """Wait for the child, or for SIGTERM, and leave nothing behind; stacks are the child's to show."""
    faulthandler.unregister(STACKS_SIGNAL)
    faulthandler.disable()
    signal.signal(STACKS_SIGNAL, lambda *_: os.kill(child, STACKS_SIGNAL))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    end = os.pidfd_open(child)
    pid = status = 0
    while pid != child or os.WIFSTOPPED(status):  # it may have made this process its tracer
        # Where one has ended there may be more: those that a model starts without end would else fill the process table.
        over, _, _ = select.select([end], [], [], 0 if pid else _LOOK_EVERY_S)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if over and not pid:
            # Something that it has started traces it, and is told of its end first.
            end_strays(())
            select.select([], [], [], _LOOK_EVERY_S)
    for number in (STACKS_SIGNAL, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):
        while children():
            end_strays(())
            os.waitpid(-1, 0)
            # All that are dead by now: to look for the others takes time for each process that is left.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    _report(agent, os.waitstatus_to_exitcode(status))


def _report(agent: socket.socket, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # the agent may be gone
        agent.sendall(b"%d\n" % code)
    os._exit(0)
