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
        return _read(root) or _make(root)
    except OSError:
        # Other parts of the agent tell what the storage lacks, and wait for it.
        return None


def _read(root: Path) -> str | None:
    try:
        descriptor = open_plain(root / NAME)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(BYTES * 2).decode("ascii", "replace")
    return text if IDENTITY.fullmatch(text) else None


def _make(root: Path) -> str | None:
    root.mkdir(parents=True, exist_ok=True)
    draft = root / f"{NAME}.{secrets.token_hex(4)}"
    write_new(draft, secrets.token_hex(BYTES).encode())
    try:
        # A link never replaces: of two agents that come at once, the second one reads the first one's.
        with contextlib.suppress(FileExistsError):
            (root / NAME).hardlink_to(draft)
    finally:
        draft.unlink()
    sync_folder(root)
    return _read(root)
