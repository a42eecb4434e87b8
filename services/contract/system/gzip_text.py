"""The text of one gzip, read by zlib.

Python's own reader goes through any number of gzips that follow each other, and their headers byte by byte: 16 MiB
of empty ones take seconds, and a terabyte of zeros, which take no room on a disk, days.
"""

import io
import zlib
from typing import Any, BinaryIO, Final

_GZIP: Final = 16 + zlib.MAX_WBITS


class GzipText(io.RawIOBase):
    """What a gzip holds, and nothing of what follows it; its checksum is compared at its end.

    Args:
        packed: It begins here.
        most: So many packed bytes are read of it.
    """

    def __init__(self, packed: BinaryIO, most: int) -> None:
        super().__init__()
        self._packed = packed
        self._left = most
        self._gzip = zlib.decompressobj(wbits=_GZIP)

    def readable(self) -> bool:
        """Whether it is read: always."""
        return True

    def is_followed(self) -> bool:
        """Whether something stands behind it; asked once it was read to its end."""
        return bool(self._gzip.unused_data or self._packed.read(1))

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 no type of it in Python 3.11
        """Read up to as much as there is room for.

        Raises:
            EOFError: It goes on longer than what is read of it, or ends too early.
            zlib.error: It is no gzip, or damaged.
        """
        while not self._gzip.eof:
            piece = self._gzip.unconsumed_tail
            if not piece:
                piece = self._packed.read(min(self._left, io.DEFAULT_BUFFER_SIZE))
                self._left -= len(piece)
            if not piece:
                raise EOFError("it has no end, or is longer than what is read of one")
            if text := self._gzip.decompress(piece, len(buffer)):
                buffer[: len(text)] = text
                return len(text)
        return 0
