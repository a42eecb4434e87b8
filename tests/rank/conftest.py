"""A small corpus, and ranks that a test may start."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.contract.jobs.specs import JobSpec
from tests.rank.gang import Ranks, Trained, ranks_below, spec_of


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sources that nobody changes while ranks read it."""
    folder = tmp_path_factory.mktemp("library")
    for number in range(12):
        lines = [f"def f_{number}_{k}(x):\n    return x * {k} + {number}\n" for k in range(60)]
        (folder / f"module_{number}.py").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Starts attempts of one job; ends whatever is left of them."""
    with ranks_below(tmp_path) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Undisturbed runs, each trained once: what other runs are compared with and resumed from."""
    trained = Trained(tmp_path_factory.mktemp("trained"))
    yield trained
    trained.close()


@pytest.fixture
def spec(library: Path) -> Callable[..., JobSpec]:
    """``spec(section={…})`` is a tiny job with these differences."""

    def make(**parts: dict[str, Any]) -> JobSpec:
        return spec_of(library, **parts)

    return make
