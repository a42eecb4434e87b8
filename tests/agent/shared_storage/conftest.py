"""The storages on which the cases of this folder run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.shared_storage.places import Place
from tests.s3_server import S3Server, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["folder", "bucket"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    if request.param == "folder":
        yield Place(tmp_path / "storage", None, "")
        return
    yield from _in_bucket(request, tmp_path, monkeypatch)


@pytest.fixture
def bucket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    yield from _in_bucket(request, tmp_path, monkeypatch)


def _in_bucket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    server = request.getfixturevalue("server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield Place(tmp_path, server, tmp_path.name)
    server.repair()
