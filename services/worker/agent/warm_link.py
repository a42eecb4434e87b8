"""The agent's side of the warm process: started, spoken to, ended; one object a life of it."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from services.contract.messages.rank_pipe import RankSeat
from services.contract.warm_channel import (
    ForkFailed,
    ForkRank,
    RankForked,
    RankReaped,
    WarmChannel,
    WarmMessage,
    WarmReady,
)

_LOG_TAIL_BYTES: Final = 4_000


class WarmGoneError(Exception):
    """The warm process is dead: no rank can be forked, and those that it forked die with it."""


class ForkRefusedError(Exception):
    """The system refused to fork a rank."""


class WarmLink:
    """A live warm process. Use ``start``, in the main thread: the kernel binds its life to it.

    Args:
        process: The warm process.
        channel: The agent's end of the socket to it.
        log_path: Where its own output goes.
        on_rank: Called with every rank that lives and with every dead one, in the order in which
            the system gave their process ids out and took them back.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: WarmChannel,
        log_path: Path,
        on_rank: Callable[[RankForked | RankReaped], None],
    ) -> None:
        self.pid = process.pid
        self.ready: asyncio.Future[WarmReady] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self._process = process
        self._channel = channel
        self._log_path = log_path
        self._on_rank = on_rank
        self._forks: deque[asyncio.Future[int]] = deque()
        self._sending = asyncio.Lock()

    @classmethod
    def start(
        cls,
        environment: dict[str, str],
        trainer: str,
        log_path: Path,
        on_rank: Callable[[RankForked | RankReaped], None],
    ) -> Self:
        """Start a warm process with exactly this environment and listen to it."""
        ours, theirs = socket.socketpair()
        arguments = ["--channel", str(theirs.fileno()), "--agent", str(os.getpid())]
        with theirs, log_path.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 our own module in our own interpreter
                [
                    sys.executable,
                    "-m",
                    "services.worker.rank.warm",
                    *arguments,
                    "--trainer",
                    trainer,
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is the agent's to handle
            )
        link = cls(process, WarmChannel(ours), log_path, on_rank)
        asyncio.get_running_loop().add_reader(ours.fileno(), link._receive)
        return link

    async def fork(self, seat: RankSeat, descriptors: tuple[int, ...]) -> int:
        """Fork a rank and answer its process id. ``descriptors`` stay the caller's to close.

        Raises:
            WarmGoneError: The warm process died before it answered.
            ForkRefusedError: The fork failed.
        """
        if self.gone.is_set():
            raise WarmGoneError(self.last_words())
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        message = ForkRank(seat=seat, descriptors=len(descriptors))
        async with self._sending:
            self._forks.append(answer)
            with contextlib.suppress(OSError):  # its end is seen by the reader, which says why
                await asyncio.to_thread(self._channel.send, message, descriptors)
        return await answer

    def last_words(self) -> str:
        """The end of what the warm process wrote."""
        with contextlib.suppress(OSError), self._log_path.open("rb") as log:
            log.seek(max(0, self._log_path.stat().st_size - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()
        return ""

    def kill(self) -> None:
        """End the warm process and with it all of its ranks; ``gone`` is set soon after."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _receive(self) -> None:
        try:
            for message, _ in self._channel.receive():
                self._handle(message)
        except EOFError:
            self._end()

    def _handle(self, message: WarmMessage) -> None:
        match message:
            case WarmReady():
                self.ready.set_result(message)
            case RankForked(pid=pid):
                self._on_rank(message)
                _resolve(self._forks.popleft(), pid)
            case ForkFailed(reason=reason):
                _reject(self._forks.popleft(), ForkRefusedError(f"fork failed: {reason}"))
            case RankReaped():
                self._on_rank(message)
            case ForkRank():
                raise AssertionError("the warm process asked its agent for a fork")

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        # It closed its end, so it is dead or about to be: this wait is short.
        self._process.kill()
        self._process.wait()
        error = WarmGoneError(
            f"the warm process ended ({self._process.returncode}): {self.last_words()}"
        )
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # nobody may be waiting: that is no mistake
        while self._forks:
            _reject(self._forks.popleft(), error)
        self.gone.set()


def _resolve(future: asyncio.Future[int], value: int) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[int], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
