"""Whether the storage can still be used: tried every minute, and told when the answer changes."""

import asyncio
from collections.abc import Callable
from typing import Final

from services.worker.agent.host.reserve import in_storage_thread
from services.worker.agent.storage.shared_files import SharedFiles

EVERY_S: Final = 60.0
Found = tuple[str | None, str | None]


def look(files: SharedFiles) -> Found:
    """The storage's name, and why no job can use it. Blocking."""
    return files.identity(), files.fault()


async def watch_storage(
    files: SharedFiles,
    found: Found,
    tell: Callable[[str | None, str | None], None],
    every_s: float = EVERY_S,
) -> None:
    """Look until cancelled.

    Args:
        files: The storage.
        found: What was seen last.
        tell: Called with what is seen, when it is not what was seen before.
        every_s: So often.
    """
    while True:
        await asyncio.sleep(every_s)
        name, fault = await in_storage_thread(look, files)
        # One that is away is no other storage.
        now = (name or found[0], fault)
        if now != found:
            found = now
            tell(*now)
