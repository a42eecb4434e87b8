"""The template: it has imported torch and the trainer once, and each warm process is a fork of it.

So a warm process that dies is replaced without another import, and programs that are asked for one
answer begin without one. The template outlives its agent for
a while: an agent that starts meanwhile on the same node, with the same settings and the same code,
adopts it. It runs no rank, has one thread and never touches CUDA. Warm processes and ranks do not
outlive their agent: a lifeline kills the warm process, and the kernel its ranks.
"""

import argparse
import contextlib
import ctypes
import fcntl
import gc
import os
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Final, NoReturn

from pydantic import ValidationError

from services.contract.messages.warm_channel import (
    BLANK_MARK,
    NODE_MARK,
    ForkProgram,
    ForkWarm,
    TemplateReady,
    WarmChannel,
    WarmForked,
    WarmRefused,
)
from services.contract.system.own_process import set_up_process
from services.contract.system.rank_user import RankUser
from services.worker.rank.process.probe_program import run_program
from services.worker.rank.process.seat import DEFAULT_TRAINER, SCRIPT_TRAINER, load_trainer
from services.worker.rank.process.user_path import add_user_path, hidden_by_us
from services.worker.rank.process.warm import Ranks, serve_agent

_F_SETSIG: Final = 10
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_MOST_AGENTS_WAITING: Final = 4
_COMPILED: Final = "TORCHINDUCTOR_CACHE_DIR"
_libc = ctypes.CDLL(None)


class Template:
    """Forks warm processes for one agent after the other.

    Args:
        ready: What each agent is told first.
        listener: Where the next agent comes to, once the present one is gone.
        linger_s: How long to wait for it.
        ranks: What ranks are.
    """

    def __init__(
        self,
        ready: TemplateReady,
        listener: socket.socket,
        linger_s: float,
        ranks: Ranks,
    ) -> None:
        self._ready = ready
        self._listener = listener
        self._linger_s = linger_s
        self._ranks = ranks
        self._wake = wake_when_a_child_ends()

    def serve(self, first: WarmChannel) -> None:
        """Serve the first agent, and those that come within ``linger_s`` after its end."""
        channel: WarmChannel | None = first
        while channel is not None:
            with contextlib.suppress(EOFError, OSError, ValidationError):
                self._serve_one(channel)
            channel.close()
            channel = self._next_agent(time.monotonic() + self._linger_s)

    def _next_agent(self, until: float) -> WarmChannel | None:
        while (left := until - time.monotonic()) > 0:
            self._listener.settimeout(left)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                break
            if peer(connection)[1] == os.getuid():
                connection.settimeout(None)
                return WarmChannel(connection)
            connection.close()
        return None

    def _serve_one(self, channel: WarmChannel) -> None:
        channel.send(self._ready)
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            selector.register(self._wake[0], selectors.EVENT_READ)
            while True:
                selector.select()
                with contextlib.suppress(BlockingIOError):
                    self._wake[0].recv(4096)
                # The whole batch is taken before the first fork: a fork closes what is not its own.
                orders = channel.receive()
                for index, (message, descriptors) in enumerate(orders):
                    if isinstance(message, ForkWarm | ForkProgram):
                        later = [fd for _, fds in orders[index + 1 :] for fd in fds]
                        self._fork(channel, selector, (message, descriptors), later)
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass

    def _fork(
        self,
        channel: WarmChannel,
        selector: selectors.BaseSelector,
        order: tuple[ForkWarm | ForkProgram, tuple[int, ...]],
        later: list[int],
    ) -> None:
        answer: WarmForked | WarmRefused
        asked, descriptors = order
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            answer = WarmRefused(reason=f"fork failed: {error}")
        else:
            if pid == 0:
                selector.close()
                channel.close()
                for descriptor in later:
                    os.close(descriptor)
                self._become(asked, descriptors)
            answer = WarmForked(pid=pid)
        # First: who stopped this process behind its answer would else keep a dead fork's end open.
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(answer)

    def _become(self, asked: ForkWarm | ForkProgram, descriptors: tuple[int, ...]) -> NoReturn:
        try:
            os.setsid()
            *others, lifeline = descriptors
            die_at_the_end_of(lifeline)
            _carry(asked.mark)
            self._listener.close()
            signal.set_wakeup_fd(-1)
            for end in self._wake:
                end.close()
            if isinstance(asked, ForkProgram):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                question, answer, words = others
                run_program(asked.program, (question, answer, words), self._ranks.user, lifeline)
            (channel,) = others
            serve_agent(
                WarmChannel(socket.socket(fileno=channel)),
                self._ranks,
                asked.agent,
                lifeline,
                wake_when_a_child_ends(),
            )
        except BaseException:  # noqa: BLE001 a forked child must never return into the loop
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)


def wake_when_a_child_ends() -> tuple[socket.socket, socket.socket]:
    """A pair of sockets of which the first turns readable when a child of this process ends."""
    wake = socket.socketpair()
    for end in wake:
        end.settimeout(0)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake[1].fileno(), warn_on_full_buffer=False)
    return wake


def die_at_the_end_of(lifeline: int) -> None:
    """Have the kernel kill this process when the other end of a pipe is closed, whatever it does.

    Its parent is the template, whose end says nothing about the agent's. So the end of the pipe that
    the agent alone has is bound to SIGKILL.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(lifeline, 1)  # nobody writes: it is closed already
        sys.exit("the agent has ended")


def peer(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end of a unix socket, as the kernel knows them."""
    option = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(option)
    return pid, uid, gid


def _carry(mark: str) -> None:
    """Carry a mark where others look for it: in the environment that this process began with.

    The kernel shows the memory in which exec put it; a later ``putenv`` does not reach there.
    """
    value = mark.encode().ljust(len(BLANK_MARK), b"\0")
    _libc.getenv.restype = ctypes.c_void_p
    ctypes.memmove(_libc.getenv(NODE_MARK.encode()), value, len(BLANK_MARK))
    os.environ[NODE_MARK] = mark  # noqa: TID251 written, for children


def _listen(path: Path) -> socket.socket:
    """A socket at ``path``, whatever the path's length: the kernel takes some 100 bytes only."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(path.parent, os.O_PATH)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    listener.listen(_MOST_AGENTS_WAITING)
    return listener


def main() -> None:
    """Import the trainer, then serve agents."""
    set_up_process()
    parser = argparse.ArgumentParser(prog="python -m services.worker.rank.process.template")
    parser.add_argument("--channel", type=int, required=True, help="descriptor of the unix socket")
    parser.add_argument("--listen", type=Path, required=True, help="socket for the next agent")
    parser.add_argument("--linger-s", type=float, required=True, help="how long to wait for it")
    parser.add_argument("--key", required=True, help="names the settings and the code")
    parser.add_argument("--trainer", default=DEFAULT_TRAINER, help="package.module:callable")
    parser.add_argument("--user-path", action="append", default=[], help="where users' modules are")
    parser.add_argument("--rank-user", help="system user that ranks become")
    arguments = parser.parse_args()
    channel = WarmChannel(socket.socket(fileno=arguments.channel))
    listener = _listen(arguments.listen)
    started = time.monotonic()
    caches_compiled = os.environ.get(_COMPILED)  # noqa: TID251 as below
    add_user_path(arguments.user_path)
    load_trainer(arguments.trainer)
    if arguments.trainer == DEFAULT_TRAINER:
        load_trainer(SCRIPT_TRAINER)
    if caches_compiled is None:
        # torch sets it to a folder of the user that imports it, where ranks of another one may not write.
        os.environ.pop(_COMPILED, None)  # noqa: TID251 of this process, for its forks
    # What is alive now is shared by all ranks: the collector must not touch (and so copy) it.
    gc.collect()
    gc.freeze()
    ready = TemplateReady(
        key=arguments.key,
        import_s=time.monotonic() - started,
        threads=len(list(Path("/proc/self/task").iterdir())),
    )
    ranks = Ranks(
        arguments.trainer,
        hidden_by_us(arguments.user_path),
        None if arguments.rank_user is None else RankUser.named(arguments.rank_user),
    )
    Template(ready, listener, arguments.linger_s, ranks).serve(channel)


if __name__ == "__main__":
    main()
