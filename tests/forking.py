"""Processes that begin with torch imported: forks of one that has done it, as a node's ranks are."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from typing import Final

# The test process has one server for all who fork, and what it imports is settled when it starts.
_IMPORTED: Final = [
    "services.worker.rank.loop.trainer",
    "tests.engine.gang",
    # What the command line imports, but not itself: it is to find its environment by itself.
    "httpx",
    "services.contract.planning",
    "services.contract.views",
    "typer",
]


def forking() -> ForkServerContext:
    """Starts processes in hundredths of a second; importing torch anew costs each seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context
