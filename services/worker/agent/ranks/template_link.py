"""The agent's side of the template: started, or adopted from an agent that died; asked for forks."""

import asyncio
import contextlib
import hashlib
import os
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import structlog
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
from services.contract.system.durable import append_plain, open_plain
from services.worker.agent.host.folders import NodeFolder
from services.worker.agent.host.processes import STOPPED, ProcessHandle, process_state

_ADOPTED_WITHIN_S: Final = 30.0  # it may still be importing
_CONNECTED_WITHIN_S: Final = 1.0
FORKS_WITHIN_LOOKS: Final = 20
_LOOK_EVERY_S: Final = 1.0
_LOG_TAIL_BYTES: Final = 4_000
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_CODE: Final = Path(__file__).resolve().parents[3]
_log = structlog.get_logger()


class WarmGoneError(Exception):
    """The template or the warm process is dead: no rank can be forked."""


@dataclass(frozen=True)
class Imported:
    """What a template imports, and the environment that it hands on.

    Attributes:
        environment: Of ranks.
        trainer: What they run, as ``package.module:callable``.
        user_path: Where modules of users are found.
        linger_s: How long it waits for another agent once this one is dead.
        rank_user: The system user that ranks become; None: they stay the agent's.
    """

    environment: Mapping[str, str]
    trainer: str
    user_path: tuple[Path, ...]
    linger_s: float
    rank_user: str | None = None

    @property
    def ranks_arguments(self) -> tuple[str, ...]:
        """What a template is told of the processes in which user code runs."""
        user = () if self.rank_user is None else (f"--rank-user={self.rank_user}",)
        return (*(f"--user-path={entry}" for entry in self.user_path), *user)

    @property
    def template_environment(self) -> dict[str, str]:
        """Of no life of an agent."""
        return {**self.environment, NODE_MARK: BLANK_MARK}

    def key(self) -> str:
        """Differs where a template would fork other ranks: other settings, or other code."""
        known = [sys.executable, self.trainer, *self.ranks_arguments]
        known += sorted(f"{name}={value}" for name, value in self.template_environment.items())
        for package in ("services", "fsdp_core"):
            for file in sorted((_CODE / package).rglob("*.py")):
                with contextlib.suppress(OSError):
                    known.append(f"{file} {file.stat().st_mtime_ns}")
        return hashlib.sha256("\0".join(known).encode()).hexdigest()


class TemplateLink:
    """A live template. Use ``start`` or ``adopt``.

    Args:
        process: The template.
        channel: The agent's end of the socket to it.
        log_path: Where its own output goes.

    Attributes:
        ready: Set once it has imported everything.
        gone: Set once it is dead.
    """

    def __init__(self, process: ProcessHandle, channel: WarmChannel, log_path: Path) -> None:
        self.ready: asyncio.Future[TemplateReady] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self._process = process
        self._channel = channel
        self._log_path = log_path
        self._forks: deque[asyncio.Future[int]] = deque()
        asyncio.get_running_loop().add_reader(channel.fileno(), self._receive)

    @classmethod
    def start(cls, imported: Imported, folder: NodeFolder) -> Self:
        """Start a template with exactly this environment, and listen to it; nothing is where it listens.

        Raises:
            OSError: It cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, os.fdopen(append_plain(folder.warm_log), "ab") as log:
                process = subprocess.Popen(  # noqa: S603 our own module in our own interpreter
                    [
                        *(sys.executable, "-P", "-m", "services.worker.rank.process.template"),
                        *("--channel", str(theirs.fileno())),
                        *("--listen", folder.template_socket),
                        *("--linger-s", str(imported.linger_s)),
                        *("--key", imported.key()),
                        *("--trainer", imported.trainer),
                        *imported.ranks_arguments,
                    ],
                    env=imported.template_environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C is the agent's to handle
                )
        except OSError:
            ours.close()
            raise
        handle = ProcessHandle(process.pid, process)
        return cls(handle, WarmChannel(ours), folder.warm_log)

    @classmethod
    async def adopt(cls, imported: Imported, folder: NodeFolder) -> Self | None:
        """The template of an agent of this node that died, if it waits for another one.

        One that imports other code, or does not answer, is killed.
        """
        found = _connect(folder.template_socket)
        if found is None:
            return None
        link = cls(ProcessHandle(found[1]), WarmChannel(found[0]), folder.warm_log)
        try:
            async with asyncio.timeout(_ADOPTED_WITHIN_S):
                ready = await asyncio.shield(link.ready)
        except (TimeoutError, WarmGoneError) as error:
            why = str(error) or "it did not answer"
        else:
            if ready.key == imported.key():
                return link
            why = "it was started with other settings or other code"
        _log.warning("template_not_adopted", pid=found[1], why=why)
        link.give_up()
        return None

    @property
    def pid(self) -> int:
        """The template."""
        return self._process.pid

    async def fork_warm(self, mark: str, descriptors: tuple[int, int]) -> int:
        """Fork a warm process that carries ``mark``; answer its process id.

        Args:
            mark: Of this life of the agent.
            descriptors: The warm process's channel and lifeline, which stay the caller's to close.

        Raises:
            WarmGoneError: As `fork`.
        """
        return await self.fork(ForkWarm(mark=mark, agent=os.getpid()), descriptors)

    async def fork(self, order: ForkWarm | ForkProgram, descriptors: tuple[int, ...]) -> int:
        """Fork a process; answer its process id. ``descriptors`` stay the caller's to close.

        Raises:
            WarmGoneError: The template died, refused, or did not answer and was killed.
        """
        if self.gone.is_set():
            raise WarmGoneError(self.last_words())
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forks.append(answer)
        with contextlib.suppress(OSError):  # its end is seen by the reader, which says why
            self._channel.send(order, descriptors)
        if not await in_time(answer):
            answer.cancel()
            words = unanswered(self.pid)
            self.give_up()
            raise WarmGoneError(f"the template {words}")
        return answer.result()

    def last_words(self) -> str:
        """The end of what it and its forks wrote."""
        return last_words(self._log_path)

    def kill(self) -> None:
        """End it; ``gone`` is set soon after."""
        self._process.kill()

    def _receive(self) -> None:
        try:
            for message, _ in self._channel.receive():
                match message:
                    case TemplateReady():
                        self.ready.set_result(message)
                    case WarmForked(pid=pid):
                        resolve(self._forks.popleft(), pid)
                    case WarmRefused(reason=reason):
                        reject(self._forks.popleft(), WarmGoneError(reason))
                    case _:
                        raise AssertionError(f"a template does not send {message.kind}")
        except (EOFError, ValidationError):  # it is gone, or it is no template of ours
            self.give_up()

    def give_up(self) -> None:
        """End it, if that is not done, and hear no more; ``gone`` is set."""
        if self.gone.is_set():
            return
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        code = self._process.end()
        error = WarmGoneError(f"the template ended ({code}): {self.last_words()}")
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # nobody may be waiting: that is no mistake
        while self._forks:
            reject(self._forks.popleft(), error)
        self.gone.set()


def last_words(log_path: Path) -> str:
    """The end of a file."""
    with contextlib.suppress(OSError), open(open_plain(log_path), "rb") as log:  # noqa: PTH123 a descriptor
        log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_TAIL_BYTES))
        return log.read(_LOG_TAIL_BYTES).decode(errors="replace").strip()
    return ""


async def in_time(answer: asyncio.Future[int]) -> bool:
    """Whether an answer comes before so many looks; while the agent is stopped, none passes."""
    for _ in range(FORKS_WITHIN_LOOKS):
        if (await asyncio.wait({answer}, timeout=_LOOK_EVERY_S))[0]:
            return True
    return False


def unanswered(pid: int) -> str:
    """What is said of a process that does not answer, before it is killed for that."""
    state = " (it was stopped)" if process_state(pid) in STOPPED else ""
    within_s = FORKS_WITHIN_LOOKS * _LOOK_EVERY_S
    return f"(pid {pid}) did not answer within {within_s:g} s{state} and was killed"


def resolve(future: asyncio.Future[int], value: int) -> None:
    """Answer whoever waits, if somebody still does."""
    if not future.done():
        future.set_result(value)


def reject(future: asyncio.Future[int], error: Exception) -> None:
    """The same with an error."""
    if not future.done():
        future.set_exception(error)


def _connect(path: Path) -> tuple[socket.socket, int] | None:
    """A connection to the template that listens there, and its process id; None without one."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECTED_WITHIN_S)
    try:
        folder = os.open(path.parent, os.O_PATH)
        try:  # by way of the folder: the kernel takes paths of some 100 bytes only
            connection.connect(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
        option = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        connection.close()
        return None
    pid, user, _ = _CREDENTIALS.unpack(option)
    if user != os.getuid():
        connection.close()
        return None
    connection.settimeout(None)
    return connection, pid
