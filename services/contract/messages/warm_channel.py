"""What an agent says to its template and its warm process, and they to it, over unix sockets.

One JSON object a line, both ways. Descriptors travel with the line that says how many it has
(SCM_RIGHTS): a warm process's channel and lifeline; the two of the rank's end of its pipe, for rank 0
the bound rendezvous socket, and a file without a name that holds the rank's secrets. For every rank
begins with a copy of what the warm process has read, and the secrets of other jobs must not be in it.
Those of a program that is run for one answer are listed at `ForkProgram`.
"""

import json
import os
import socket
from array import array
from collections import deque
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from services.contract.messages.rank_pipe import RankSeat

NODE_MARK: Final = "MESHLOOM_NODE_MARK"
"""The variable by which processes of a life of an agent are found again."""
BLANK_MARK: Final = "-" * 160
"""Its value in a template, which is of no life of an agent; a mark is written over it."""
_READ_BYTES: Final = 65_536
_DESCRIPTORS_AT_ONCE: Final = 64


class _WarmMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TemplateReady(_WarmMessage):
    """Template to agent: everything is imported. ``threads`` beyond 1 would make forks unsafe.

    ``key`` names what was imported, and with which environment.
    """

    kind: Literal["template_ready"] = "template_ready"
    key: str
    import_s: float
    threads: int


class ForkWarm(_WarmMessage):
    """Agent to template: fork a warm process. Answered by one of the next two.

    Attributes:
        mark: Of this life of the agent.
        agent: Its process.
        descriptors: The warm process's end of its channel, and of a pipe with whose end it dies.
    """

    kind: Literal["fork_warm"] = "fork_warm"
    mark: str = Field(max_length=len(BLANK_MARK))
    agent: int
    descriptors: Literal[2] = 2


class ForkProgram(_WarmMessage):
    """Agent to template: fork a process for a program that is run for one answer.

    Answered like `ForkWarm`.

    Attributes:
        mark: Of that process and all that it starts.
        program: The module, which has ``main(asked: Question)``.
        descriptors: The end of a socket for the question, a file for the answer, one for its
            output, and the reading end of a pipe with whose end it dies.
    """

    kind: Literal["fork_program"] = "fork_program"
    mark: str = Field(max_length=len(BLANK_MARK))
    program: str
    descriptors: Literal[4] = 4


class WarmForked(_WarmMessage):
    """Template to agent: the process lives."""

    kind: Literal["warm_forked"] = "warm_forked"
    pid: int


class WarmRefused(_WarmMessage):
    """Template to agent: it cannot fork one."""

    kind: Literal["warm_refused"] = "warm_refused"
    reason: str


class ForkRank(_WarmMessage):
    """Agent to warm: fork a rank into this seat. Answered by one of the next two.

    ``has_secrets``: the last descriptor is of a file for the rank alone, with those that the seat
    lacks, as JSON.
    """

    kind: Literal["fork_rank"] = "fork_rank"
    seat: RankSeat
    descriptors: int = Field(ge=2, le=4)
    has_secrets: bool = False


class RankForked(_WarmMessage):
    """Warm to agent: the rank lives."""

    kind: Literal["rank_forked"] = "rank_forked"
    rank: int
    pid: int


class ForkFailed(_WarmMessage):
    """Warm to agent: the system refused the fork. ``number``: of its error, if it was one."""

    kind: Literal["fork_failed"] = "fork_failed"
    rank: int
    reason: str
    number: int | None = None


class RankReaped(_WarmMessage):
    """Warm to agent: a rank is dead and reaped. Exactly one of the last two is set."""

    kind: Literal["rank_reaped"] = "rank_reaped"
    pid: int
    exit_code: int | None = None
    signal: int | None = None


WarmMessage = Annotated[
    TemplateReady
    | ForkWarm
    | ForkProgram
    | WarmForked
    | WarmRefused
    | ForkRank
    | RankForked
    | ForkFailed
    | RankReaped,
    Field(discriminator="kind"),
]
WARM_MESSAGE: TypeAdapter[WarmMessage] = TypeAdapter(WarmMessage)


class _UnreadSeat(BaseModel):
    rank: int


class _UnreadFork(BaseModel):
    """What of a request to fork must be understood to refuse it."""

    kind: Literal["fork_rank"]
    seat: _UnreadSeat
    descriptors: int = Field(ge=2, le=4)


class WarmChannel:
    """One end of the socket between an agent and its template, or its warm process.

    Args:
        channel: A connected stream socket in blocking mode, owned from now on.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._unread = b""
        self._descriptors: deque[int] = deque()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._channel.fileno()

    def send(self, message: WarmMessage, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message with ``descriptors``, which stay the caller's to close.

        Raises:
            OSError: The other side is gone.
        """
        line = message.model_dump_json().encode() + b"\n"
        sent = 0
        if descriptors:
            sent = socket.send_fds(self._channel, [line], list(descriptors))
        self._channel.sendall(line[sent:])

    def receive(self) -> list[tuple[WarmMessage, tuple[int, ...]]]:
        """What came since the last call, each with its descriptors, now the caller's; no wait.

        A request to fork that cannot be read is refused here: it must not end the warm process,
        with which all ranks of the node would die.

        Raises:
            EOFError: The other side is gone and all that it sent was received.
        """
        try:
            # Not socket.recv_fds, which passes no flags on in CPython 3.11.
            received, ancillary, _, _ = self._channel.recvmsg(
                _READ_BYTES,
                socket.CMSG_SPACE(_DESCRIPTORS_AT_ONCE * array("i").itemsize),
                socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
            )
        except BlockingIOError:
            return []
        except ConnectionError as error:
            raise EOFError from error
        if not received:
            raise EOFError
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(array("i", data))
        *lines, self._unread = (self._unread + received).split(b"\n")
        read = [self._read(line) for line in lines]
        return [entry for entry in read if entry is not None]

    def close(self) -> None:
        """Close the socket, and the descriptors that nobody took."""
        self._channel.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _read(self, line: bytes) -> tuple[WarmMessage, tuple[int, ...]] | None:
        try:
            message = WARM_MESSAGE.validate_json(line)
        except ValidationError as error:
            self._refuse(line, error)
            return None
        return message, self._take(getattr(message, "descriptors", 0))

    def _refuse(self, line: bytes, error: ValidationError) -> None:
        """Answer a request that cannot be read, as far as it tells whom it is about.

        Raises:
            ValidationError: It is no request to fork.
        """
        try:
            # Unlike pydantic's parser, this one bears some nesting more than can be written.
            request = _UnreadFork.model_validate(json.loads(line))
        except (ValueError, RecursionError):
            raise error from None
        for descriptor in self._take(request.descriptors):
            os.close(descriptor)
        reason = "; ".join(str(fault["msg"]) for fault in error.errors(include_input=False))
        self.send(
            ForkFailed(
                rank=request.seat.rank, reason=f"the request to fork cannot be read: {reason}"
            )
        )

    def _take(self, count: int) -> tuple[int, ...]:
        # A line's descriptors come with its first byte, in the order of the lines.
        return tuple(self._descriptors.popleft() for _ in range(count))
