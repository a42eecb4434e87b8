"""Whether a shard file is what its rank voted for. Blocking: run in a thread."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from services.contract.storage.manifests import ShardFile
from services.contract.system.durable import is_hollow, open_plain

_READ_BYTES: Final = 1 << 20


def size_fault(size: int, shard: ShardFile) -> str | None:
    """What is wrong with the size of a shard file, if anything is."""
    if size == shard.bytes:
        return None
    return f"it has {size} bytes, not the {shard.bytes} that the rank voted for"


def digest_fault(sha256: str, shard: ShardFile) -> str | None:
    """What is wrong with the digest of a shard file, if anything is."""
    if sha256 == shard.sha256:
        return None
    return f"its sha256 is {sha256}, the rank voted for {shard.sha256}"


def fault_of(
    path: Path, shard: ShardFile, is_over: Callable[[], bool] = lambda: False
) -> str | None:
    """What of a shard file is not as its rank voted; None where all is.

    Args:
        path: The file.
        shard: The vote.
        is_over: Asked before each piece: whether the answer is of no use any more.

    Raises:
        OSError: The storage does not answer, which says nothing about the file.
    """
    digest = hashlib.sha256()
    try:
        descriptor = open_plain(path)
    except FileNotFoundError:
        return "the file is missing"
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 a descriptor, not a path
        size = os.fstat(descriptor).st_size
        if (fault := size_fault(size, shard)) is not None:
            return fault
        if is_hollow(descriptor):
            return f"nearly all of its {size} bytes are holes, which no rank of ours leaves"
        left = size  # and no more: somebody may go on to write there
        while not is_over() and left and (part := file.read(min(left, _READ_BYTES))):
            digest.update(part)
            left -= len(part)
    return digest_fault(digest.hexdigest(), shard)
