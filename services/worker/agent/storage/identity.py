"""Which storage a node has: a random name in its root, made by the agent that comes first."""

import contextlib
import os
import re
import secrets
from pathlib import Path
from typing import Final

from services.contract.system.durable import open_plain, sync_folder, write_new

NAME: Final = ".storage-id"
BYTES: Final = 16
IDENTITY: Final = re.compile(rf"[0-9a-f]{{{2 * BYTES}}}")


def storage_identity(root: Path) -> str | None:
    """The name of the storage at ``root``; None where it cannot be read or written.

    Nodes that tell different names have different storages: a job that moves between them does not find its checkpoints.
    """
    try:
        return read_identity(root) or make_identity(root, secrets.token_hex(BYTES))
    except OSError:
        # Other parts of the agent tell what the storage lacks, and wait for it.
        return None


def read_identity(root: Path) -> str | None:
    """The name of the storage at ``root``; None where it has none.

    Raises:
        OSError: It does not answer.
    """
    try:
        # The root itself may be a link.
        descriptor = open_plain(root.resolve() / NAME)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(BYTES * 2).decode("ascii", "replace")
    return text if IDENTITY.fullmatch(text) else None


def make_identity(root: Path, name: str) -> str | None:
    """The name of the storage at ``root``: ``name``, unless another agent was first to give it one.

    Raises:
        OSError: The storage refuses.
    """
    root.mkdir(parents=True, exist_ok=True)
    draft = root / f"{NAME}.{secrets.token_hex(4)}"
    write_new(draft, name.encode())
    try:
        # A link never replaces: of two agents that come at once, the second one reads the first one's.
        with contextlib.suppress(FileExistsError):
            (root / NAME).hardlink_to(draft)
    finally:
        draft.unlink()
    sync_folder(root)
    return read_identity(root)
