"""Rank processes for the tests of what users put around the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.gang import Gangs


@pytest.fixture(scope="session")
def gangs(device: str) -> Iterator[Gangs]:
    """`gangs(world)` is the gang of that world size."""
    gangs = Gangs(device)
    yield gangs
    gangs.close()
