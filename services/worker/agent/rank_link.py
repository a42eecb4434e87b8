"""The agent's end of the pipe to one rank: one JSON object a line, both ways."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

import structlog
from pydantic import ValidationError

from services.contract.mask import Mask
from services.contract.messages.rank_pipe import RANK_MESSAGE, RankMessage, RankOrder

_READ_BYTES: Final = 65_536
_log = structlog.get_logger()


class RankLink:
    """Hears a rank until it, and whatever inherited its end, is gone.

    Args:
        channel: The agent's end of the pipe, owned from now on.
        on_message: Called with each message, in order.
        mask: Takes secrets out of what it says.
    """

    def __init__(
        self, channel: socket.socket, on_message: Callable[[RankMessage], None], mask: Mask
    ) -> None:
        self._mask = mask
        self.closed = False
        self._channel = channel
        self._on_message = on_message
        self._unread = b""

    def listen(self) -> None:
        """Begin to hear."""
        self._channel.settimeout(0)
        asyncio.get_running_loop().add_reader(self._channel, self.hear)

    def hear(self) -> None:
        """Take in what is there now."""
        while not self.closed:
            try:
                received = self._channel.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                received = b""
            if not received:
                self.close()
                return
            *lines, self._unread = (self._unread + received).split(b"\n")
            for line in lines:
                self._take(line)

    def send(self, order: RankOrder) -> None:
        """Give an order; a rank that is gone, or reads nothing for ages, misses it."""
        with contextlib.suppress(OSError):
            self._channel.send(order.model_dump_json().encode() + b"\n")

    def close(self) -> None:
        """Hear no more."""
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()

    def _take(self, line: bytes) -> None:
        try:
            message = RANK_MESSAGE.validate_json(self._mask.line(line))
        except ValidationError as error:
            _log.warning("unreadable_line_from_rank", error=str(error))
            return
        self._on_message(message)
