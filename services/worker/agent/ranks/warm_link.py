"""The agent's side of the warm process: started, spoken to, ended; one object a life of it."""

import asyncio
import contextlib
import errno
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Self

import structlog

from services.contract.messages.rank_pipe import RankSeat
from services.contract.messages.warm_channel import (
    ForkFailed,
    ForkRank,
    RankForked,
    RankReaped,
    WarmChannel,
    WarmMessage,
)
from services.worker.agent.host.processes import ProcessHandle
from services.worker.agent.ranks.template_link import (
    TemplateLink,
    WarmGoneError,
    in_time,
    last_words,
    reject,
    resolve,
    unanswered,
)

_GONE: Final = (errno.EPIPE, errno.ECONNRESET)
_log = structlog.get_logger()


class ForkRefusedError(OSError):
    """The system refused to fork a rank, for which ``number`` is its error's, if it was one."""

    def __init__(self, reason: str, number: int | None = None) -> None:
        super().__init__(reason)
        self.errno = number


class WarmLink:
    """A live warm process. Use ``fork_from``.

    Args:
        process: The warm process.
        channel: The agent's end of the socket to it.
        lifeline: The only writing end of the pipe with whose end it dies.
        log_path: Where its own output goes.
        on_rank: Called with every rank that lives and with every dead one, in the order in which
            the system gave their process ids out and took them back.
    """

    def __init__(
        self,
        process: ProcessHandle,
        channel: WarmChannel,
        lifeline: int,
        log_path: Path,
        on_rank: Callable[[RankForked | RankReaped], None],
    ) -> None:
        self.pid = process.pid
        self.gone = asyncio.Event()
        self._process = process
        self._channel = channel
        self._lifeline = lifeline
        self._log_path = log_path
        self._on_rank = on_rank
        self._forks: deque[asyncio.Future[int]] = deque()
        self._sending = asyncio.Lock()
        asyncio.get_running_loop().add_reader(channel.fileno(), self._receive)

    @classmethod
    async def fork_from(
        cls,
        template: TemplateLink,
        mark: str,
        log_path: Path,
        on_rank: Callable[[RankForked | RankReaped], None],
    ) -> Self:
        """Fork a warm process that carries ``mark``, and listen to it.

        Raises:
            WarmGoneError: The template died, or refused.
        """
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        try:
            with theirs:
                pid = await template.fork_warm(mark, (theirs.fileno(), reading))
        except BaseException:
            ours.close()
            os.close(writing)
            raise
        finally:
            os.close(reading)
        return cls(ProcessHandle(pid), WarmChannel(ours), writing, log_path, on_rank)

    async def fork(self, seat: RankSeat, descriptors: tuple[int, ...]) -> int:
        """Fork a rank and answer its process id. ``descriptors`` stay the caller's to close.

        Raises:
            WarmGoneError: The warm process died before it answered, or did not and was killed.
            ForkRefusedError: The fork failed.
        """
        if self.gone.is_set():
            raise WarmGoneError(self.last_words())
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with contextlib.ExitStack() as files:
            if seat.secrets:
                descriptors = (*descriptors, files.enter_context(_secrets_of(seat)))
            message = ForkRank(
                seat=seat.model_copy(update={"secrets": {}}),
                descriptors=len(descriptors),
                has_secrets=bool(seat.secrets),
            )
            return await self._forked(message, descriptors, answer)

    def last_words(self) -> str:
        """The end of what it and the template wrote."""
        return last_words(self._log_path)

    def kill(self) -> None:
        """End the warm process and with it all of its ranks; ``gone`` is set soon after."""
        self._process.kill()

    async def _forked(
        self, message: ForkRank, descriptors: tuple[int, ...], answer: asyncio.Future[int]
    ) -> int:
        asking = asyncio.create_task(self._ask(message, descriptors, answer))
        try:
            if not await in_time(answer):
                answer.cancel()
                words = unanswered(self.pid)
                _log.error("warm_process_killed", why=words)
                self.kill()
                await self.gone.wait()
                raise WarmGoneError(f"the warm process {words}")
            return answer.result()
        finally:
            await asking  # the descriptors are the caller's again

    async def _ask(
        self, message: ForkRank, descriptors: tuple[int, ...], answer: asyncio.Future[int]
    ) -> None:
        async with self._sending:
            if self.gone.is_set():
                reject(answer, WarmGoneError(self.last_words()))
                return
            self._forks.append(answer)
            try:
                await asyncio.to_thread(self._channel.send, message, descriptors)
            except OSError as error:
                if self.gone.is_set() or error.errno in _GONE:  # the reader says why
                    return
                # Nothing was sent: what the kernel refuses, it refuses before the first byte.
                self._forks.remove(answer)
                why = f"the request to fork was not sent: {error}"
                reject(answer, ForkRefusedError(why, error.errno))

    def _receive(self) -> None:
        try:
            for message, _ in self._channel.receive():
                self._handle(message)
        except EOFError:
            self._end()

    def _handle(self, message: WarmMessage) -> None:
        match message:
            case RankForked(pid=pid):
                self._on_rank(message)
                resolve(self._forks.popleft(), pid)
            case ForkFailed(reason=reason, number=number):
                error = ForkRefusedError(f"fork failed: {reason}", number)
                reject(self._forks.popleft(), error)
            case RankReaped():
                self._on_rank(message)
            case _:
                raise AssertionError(f"a warm process does not send {message.kind}")

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        os.close(self._lifeline)
        self._process.end()
        error = WarmGoneError(f"the warm process ended: {self.last_words()}")
        while self._forks:
            reject(self._forks.popleft(), error)
        self.gone.set()


@contextlib.contextmanager
def _secrets_of(seat: RankSeat) -> Iterator[int]:
    """The descriptor of a file without a name that holds them."""
    descriptor = os.memfd_create("secrets", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(json.dumps(seat.secrets).encode())
        yield descriptor
    finally:
        os.close(descriptor)
