"""What the controller keeps of an uploaded archive, and how much of it there may be."""

from dataclasses import dataclass
from typing import Final, Literal

from services.contract.jobs.code_archives import (
    DEFAULT_CODE_MIB,
    DEFAULT_CODE_STORE_MIB,
    CodeDigest,
)
from services.controller.domain.record import Record

_SHARE: Final = 4
# Its keys and its record; so the number of archives is bounded, too.
_OVERHEAD_BYTES: Final = 16_384


class UploadedCode(Record):
    """An archive. ``uploaded_by``: the subject that brought it first, to whose share it counts."""

    digest: CodeDigest
    bytes: int
    files: int
    unpacked_bytes: int
    uploaded_by: str
    uploaded_ms: int

    @property
    def counted_bytes(self) -> int:
        """What of the room it takes."""
        return self.bytes + _OVERHEAD_BYTES


@dataclass(frozen=True)
class CodeLimits:
    """The largest archive, and what all of them may take together, in bytes; a quarter is a subject's."""

    archive_bytes: int = DEFAULT_CODE_MIB << 20
    store_bytes: int = DEFAULT_CODE_STORE_MIB << 20

    @property
    def share_bytes(self) -> int:
        """What the archives of one subject may take together."""
        return self.store_bytes // _SHARE


Kept = Literal["new", "known", "full", "share"]
"""Kept now; kept before; not kept, for all room is taken; or the subject's share of it."""
