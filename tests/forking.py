"""Processes that begin with torch imported: forks of one that has done it, as a node's ranks are."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Final
from unittest import mock

# What a server imports is settled when it starts, and the test process has one for all who fork.
_IMPORTED: Final = (
    "services.worker.rank.loop.trainer",
    "tests.engine.gang",
    # What the command line imports, but not itself: it is to find its environment by itself.
    "httpx",
    "services.contract.api.plan_views",
    "services.contract.api.views",
    "typer",
)

HUGGING_FACE: Final = (
    "transformers.trainer",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "qwen2")),
)


def forking() -> ForkServerContext:
    """Starts processes in hundredths of a second; importing torch again costs each seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    return context


@contextmanager
def imported(*modules: str) -> Iterator[None]:
    """Within, processes of ``forking`` begin with these modules imported, too.

    For libraries that take seconds, and that most ranks must do without: a server of its own forks
    those processes.
    """
    if not modules:
        yield
        return
    with mock.patch.object(
        forkserver, "connect_to_new_process", _server_with(modules).connect_to_new_process
    ):
        yield


@cache
def _server_with(modules: tuple[str, ...]) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*_IMPORTED, *modules])
    return server
