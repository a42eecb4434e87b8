"""Asks a program of ours one question in a process of its own, and sees it to its end.

The process is a fork of the template, which has imported torch: no program waits for that. User code may run in it. So it has a session, a mark and the environment of a rank; it is the first
that the kernel kills for want of memory; and when it has ended, in whatever way, so has all that it
started. Question and answer touch no disk by name: files without one carry what it says, and are cut
where it says too much.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import structlog

from services.contract.messages.base import Message
from services.contract.messages.rank_stacks import STACKS_SIGNAL
from services.contract.messages.warm_channel import ForkProgram
from services.worker.agent.host.memory_events import oom_kills
from services.worker.agent.host.processes import ProcessHandle, kill_group, sweep
from services.worker.agent.ranks.template_link import WarmGoneError

MOST_ANSWERED: Final = 16 << 20
MOST_KEPT: Final = 64 << 20
_CUT_EVERY_S: Final = 0.1
_BLOCK: Final = 512
_STARTS_WITHIN_S: Final = 300.0
_STACKS_WITHIN_S: Final = 1.0
_LEAVES_WITHIN_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.02
_WORDS_KEPT: Final = 8_000
_MOST_LOOKS: Final = 50
_QUIET_LOOKS: Final = 2
_LAST: Final = 19
_FIRST_TO_DIE: Final = b"1000"
_END_BYTES: Final = 16
_log = structlog.get_logger()


@dataclass(frozen=True)
class ProgramEnd:
    """How the process ended.

    Attributes:
        answer: What it answered; empty where it did not.
        code: Its exit code, or minus the signal that ended it; None: its time was over.
        words: The end of what it wrote.
        stacks: What it wrote when its time was over and it was asked where it is.
        lacked_memory: Whether the kernel killed for want of memory meanwhile.
    """

    answer: bytes
    code: int | None
    words: str
    stacks: str = ""
    lacked_memory: bool = False

    @property
    def how(self) -> str:
        """In a few words for people."""
        if self.code is None:
            return "it timed out"
        if self.code >= 0:
            return f"its process exited with code {self.code}"
        with contextlib.suppress(ValueError):
            return f"its process was ended by {signal.Signals(-self.code).name}"
        return f"its process was ended by signal {-self.code}"


@dataclass(frozen=True)
class ProgramCall:
    """A program to ask, and what it may take.

    Attributes:
        module: The program.
        name: Distinguishes its mark from those of others that the node runs at the time.
        question: What it reads.
        timeout_s: After which it is killed; it counts once the program has the question.
        niceness: How much further than the agent it stands back for others.
    """

    module: str
    name: str
    question: Message
    timeout_s: float
    niceness: int = 0


class ProgramRunner:
    """Runs such programs for one life of an agent.

    Args:
        fork: Has the template fork; see `WarmKeeper.fork_program`.
        mark: Of this life.
        folder: On whose disk the nameless files are.
    """

    def __init__(
        self,
        fork: Callable[[ForkProgram, tuple[int, int, int, int]], Awaitable[int]],
        mark: str,
        folder: Path,
    ) -> None:
        self._fork = fork
        self._mark = mark
        self._folder = folder

    async def ask(self, call: ProgramCall) -> ProgramEnd:
        """Run the program to its end, or to that of its time.

        Raises:
            OSError: It could not be started, or takes too long to start.
        """
        mark = f"{self._mark}/{call.name}"
        async with _file(self._folder) as answer, _file(self._folder) as words:
            kills = oom_kills()
            code, stacks = await self._run(call, mark, answer, words)
            await _sweep(mark)
            return ProgramEnd(
                answer=await asyncio.to_thread(_beginning, answer),
                code=code,
                words=await asyncio.to_thread(_end, words),
                stacks=stacks,
                lacked_memory=oom_kills() > kills,
            )

    async def _run(
        self, call: ProgramCall, mark: str, answer: IO[bytes], words: IO[bytes]
    ) -> tuple[int | None, str]:
        ours, theirs = socket.socketpair()
        reading, lifeline = os.pipe()
        with contextlib.ExitStack() as closing:
            closing.enter_context(ours)
            closing.callback(os.close, lifeline)
            try:
                with theirs:
                    files = (theirs.fileno(), answer.fileno(), words.fileno(), reading)
                    process = _Program(await self._forked(call.module, mark, files), ours)
            finally:
                os.close(reading)
            try:
                _put_last(process.pid, call.niceness)
                await process.hand_over(call.question)
                with _cut_meanwhile(answer, words):
                    return await _ended(process, call.timeout_s, words)
            finally:
                await process.end_all()

    async def _forked(self, program: str, mark: str, files: tuple[int, int, int, int]) -> int:
        try:
            return await self._fork(ForkProgram(mark=mark, program=program), files)
        except WarmGoneError as error:
            raise OSError(str(error)) from error


class _Program:
    """A process that runs a program.

    Args:
        pid: The process.
        channel: The agent's end of its socket, which stays the caller's.
    """

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._handle = ProcessHandle(pid)
        self._channel = channel
        self._channel.setblocking(False)  # noqa: FBT003 the standard library's signature
        self._has_ended = False

    async def hand_over(self, question: Message) -> None:
        """Send the program its question, once it is ready to read it.

        Raises:
            TimeoutError: It is not, for too long.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_STARTS_WITHIN_S):
                if await loop.sock_recv(self._channel, 1):
                    await loop.sock_sendall(self._channel, question.model_dump_json().encode())
                    self._channel.shutdown(socket.SHUT_WR)
        except TimeoutError:
            raise TimeoutError(f"it was not ready within {_STARTS_WITHIN_S:g} s") from None
        except ConnectionError:  # its end, which is seen next, says more
            return

    async def ended(self) -> int:
        """Its exit code, or minus the signal that ended it, once it has ended."""
        said = b""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            # No more than a number: user code that reaches into our process may write there for ever.
            while len(said) < _END_BYTES and (
                part := await loop.sock_recv(self._channel, _END_BYTES - len(said))
            ):
                said += part
        self._has_ended = True
        with contextlib.suppress(ValueError):
            return int(said)
        # Only who was killed says nothing, and only user code in its place something else.
        return -signal.SIGKILL

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still lives."""
        self._handle.send_signal(number)

    async def end_all(self) -> None:
        """End the process, which ends what it has left; where somebody keeps it from that, it alone."""
        try:
            if not self._has_ended:
                self.send_signal(signal.SIGTERM)
                async with asyncio.timeout(_LEAVES_WITHIN_S):
                    await self.ended()
        except TimeoutError:
            _log.warning("a_program_did_not_leave", pid=self.pid)
        finally:
            if not self._has_ended:
                kill_group(self.pid)
            self._handle.end()


async def _ended(process: _Program, timeout_s: float, words: IO[bytes]) -> tuple[int | None, str]:
    try:
        async with asyncio.timeout(timeout_s):
            return await process.ended(), ""
    except TimeoutError:
        return None, await _stacks(process, words)


@contextlib.asynccontextmanager
async def _file(folder: Path) -> AsyncIterator[IO[bytes]]:
    """A file without a name. Who closes it last frees what it has, which may be gigabytes in small pieces."""
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 closed beside the loop
    try:
        yield file
    finally:
        await asyncio.to_thread(file.close)


@contextlib.contextmanager
def _cut_meanwhile(*files: IO[bytes]) -> Iterator[None]:
    """Within, the process cannot fill the disk by these files: what is in one too large is lost.

    It goes on to write where it was, so that the end of its words stays: what is cut is a hole.

    Raises:
        OSError: The system has no threads or descriptors left.
    """
    over = threading.Event()
    with contextlib.ExitStack() as unless_begun:
        # Of its own: they are closed here while the thread still cuts.
        descriptors = []
        for file in files:
            descriptors.append(os.dup(file.fileno()))
            unless_begun.callback(os.close, descriptors[-1])
        cutting = threading.Thread(target=_cut, args=(descriptors, over), name="cuts", daemon=True)
        try:
            cutting.start()
        except RuntimeError as error:  # ranks may have taken all that the system has
            raise OSError(errno.EAGAIN, str(error)) from error
        unless_begun.pop_all()
    try:
        yield
    finally:
        over.set()


def _cut(descriptors: Iterable[int], over: threading.Event) -> None:
    """In a thread: the kernel lets nobody cut a file before it has written what others write to it.

    A process may write two gigabytes with one call, and from a hundred threads.
    """
    try:
        while not over.wait(_CUT_EVERY_S):
            for descriptor in descriptors:
                if os.fstat(descriptor).st_blocks * _BLOCK > MOST_KEPT:
                    os.ftruncate(descriptor, 0)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _put_last(pid: int, niceness: int) -> None:
    """Where processors or memory are short, others go first."""
    with contextlib.suppress(OSError):  # it may have ended already
        inherited = os.getpriority(os.PRIO_PROCESS, pid)
        os.setpriority(os.PRIO_PROCESS, pid, min(_LAST, inherited + niceness))
        Path(f"/proc/{pid}/oom_score_adj").write_bytes(_FIRST_TO_DIE)


async def _sweep(mark: str) -> None:
    """End what the process left behind, wherever it went."""
    quiet = 0
    # One look is not enough: a process that calls exec has no environment for a moment.
    for _ in range(_MOST_LOOKS):
        quiet = 0 if await asyncio.to_thread(sweep, mark) else quiet + 1
        if quiet == _QUIET_LOOKS:
            return
        await asyncio.sleep(_LOOK_EVERY_S)
    _log.warning("left_by_a_program", mark=mark)


async def _stacks(process: _Program, words: IO[bytes]) -> str:
    """Where the process is, which it writes behind its other words."""
    before = os.fstat(words.fileno()).st_size
    with contextlib.suppress(TimeoutError):
        process.send_signal(STACKS_SIGNAL)
        async with asyncio.timeout(_STACKS_WITHIN_S):
            while os.fstat(words.fileno()).st_size == before:  # noqa: ASYNC110 a file tells nobody
                await asyncio.sleep(_LOOK_EVERY_S)
            await asyncio.sleep(_LOOK_EVERY_S)
    return await asyncio.to_thread(_end, words, after=before)


def _beginning(file: IO[bytes]) -> bytes:
    # The descriptor's place is the child's as well.
    return os.pread(file.fileno(), MOST_ANSWERED, 0)


def _end(file: IO[bytes], after: int = 0) -> str:
    size = os.fstat(file.fileno()).st_size
    start = max(after, size - _WORDS_KEPT)
    text = os.pread(file.fileno(), size - start, start).decode(errors="replace")
    # A line without its beginning may hold a part of a secret, which no mask would know.
    return (text if start == after else text.partition("\n")[2]).strip()
