"""What tests of the engine may ask for besides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.gang import Gangs


@pytest.fixture(scope="session")
def cpu_gangs(gangs: Gangs, device: str) -> Iterator[Gangs]:
    """Gangs over gloo on the CPU, wherever those of other tests compute."""
    if device == "cpu":
        yield gangs
        return
    on_cpu = Gangs("cpu")
    yield on_cpu
    on_cpu.close()
