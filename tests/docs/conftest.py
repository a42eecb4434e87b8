"""Rank processes for the pages' snippets, which are written for ranks without an accelerator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.gang import Gangs


@pytest.fixture(scope="session")
def gangs(gangs: Gangs, device: str) -> Iterator[Gangs]:
    """`gangs(world)` is the gang of that world size, on the host whatever `--device` says."""
    if device == "cpu":
        yield gangs
        return
    on_host = Gangs("cpu")
    yield on_host
    on_host.close()
