"""Rank processes for the pages' snippets, which are written for ranks without an accelerator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.gang import Gangs


@pytest.fixture(scope="session")
def gangs() -> Iterator[Gangs]:
    """`gangs(world)` is the gang of that world size."""
    gangs = Gangs("cpu")
    yield gangs
    gangs.close()
