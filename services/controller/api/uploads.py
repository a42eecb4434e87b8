"""Bodies larger than others: of uploaded code, read to a bound by few at a time."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from fastapi import Request
from starlette.types import Scope

from services.controller.domain.access.code import CodeLimits
from services.controller.domain.errors import BodyTooLargeError, TooManyUploadsError

CODE_PATH: Final = "/v1/code"
MEDIA_TYPE: Final = "application/gzip"
_AT_ONCE: Final = 8
_OF_ONE_SUBJECT: Final = 2
_JUDGED_AT_ONCE: Final = 1
# So much is read of a body that is refused, so that a client which still sends sees the answer.
_READ_ON_BYTES: Final = 1 << 21


def is_code(scope: Scope) -> bool:
    """Whether the body of a request is an archive of code, whose route bounds it by itself."""
    return bool(scope["method"] == "PUT" and scope["path"].startswith(f"{CODE_PATH}/"))


@dataclass
class Uploads:
    """How code is taken here: its limits, how many read at a time, and how many archives are judged."""

    limits: CodeLimits = field(default_factory=CodeLimits)
    hands: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_JUDGED_AT_ONCE))
    _taken: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def slot(self, subject: str) -> Iterator[None]:
        """Within, this subject sends an archive, which is held in memory.

        Raises:
            TooManyUploadsError: As many are sent at present as may be.
        """
        free = _AT_ONCE - self._taken.total()
        # One more only while more are free than the subject has: a few that act together leave some.
        if self._taken[subject] >= min(free, _OF_ONE_SUBJECT):
            raise TooManyUploadsError(
                f"{self._taken.total()} archives are being uploaded, {self._taken[subject]} of them "
                f"by {subject}; retry in a moment"
            )
        self._taken[subject] += 1
        try:
            yield
        finally:
            self._taken[subject] -= 1
            self._taken += Counter()  # forgets subjects that have none

    async def body_of(self, request: Request) -> bytes:
        """The whole body.

        Raises:
            BodyTooLargeError: It is larger than an archive may be.
            ClientDisconnect: The client went away.
        """
        most = self.limits.archive_bytes
        announced = request.headers.get("content-length", "")
        size = int(announced) if announced.isdecimal() else 0
        body = bytearray()
        if size <= most + _READ_ON_BYTES:
            size = 0
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    body += part
                elif size > most + _READ_ON_BYTES:
                    break
        if size > most:
            raise BodyTooLargeError(
                f"the archive is larger than {most >> 20} MiB (MESHLOOM_MAX_CODE_MIB of the "
                "controller); leave out what no job needs"
            )
        return bytes(body)
