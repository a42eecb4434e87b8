"""The owner of a stack that is ended while it starts, or cannot start."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.local import stack
from services.local.settings import LocalSettings, child_environment
from services.local.stack import StackError, running_stack
from tests.e2e.conftest import free_port
from tests.waiting import until

pytestmark = pytest.mark.redis

_NO_OPTIONS = (
    "what follows the ? in the URL of Redis are no options that redis-py takes there; those of TLS need rediss://, "
    "and a ? in a password is written as %3F"
)


def test_nothing_of_a_start_that_was_ended_goes_on(tmp_path: Path) -> None:
    before = psutil.Process().children()
    redis_log = tmp_path / "logs" / "redis.log"

    async def start() -> None:
        async with running_stack(LocalSettings(home=tmp_path, port=free_port())):
            pytest.fail("nothing else can have come up")

    async def end_it_early() -> None:
        starting = asyncio.create_task(start())
        await asyncio.to_thread(until, redis_log.exists, every_s=0.001)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        # One that still waits for Redis would print that its connection broke.
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(end_it_early())
    assert set(psutil.Process().children()) <= set(before)


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("PORT", "abc", "MESHLOOM_PORT: Input should be a valid integer, unable to parse string as an integer"),
        ("TOKEN_FILE", "/no/such", "MESHLOOM_TOKEN_FILE: cannot read /no/such: No such file or directory"),
        ("REDIS_URL", "http://a", "the URL of Redis must begin with redis://, rediss:// or unix://"),
        ("REDIS_URL", "redis://:key@a?socket_timeout=5s", _NO_OPTIONS),
        ("REDIS_URL", "redis://a?ssl_cert_reqs=none", _NO_OPTIONS),
    ],
)  # fmt: skip
def test_a_setting_of_no_use_is_one_sentence(
    variable: str, value: str, told: str, tmp_path: Path
) -> None:
    environment = child_environment(
        **{"MESHLOOM_HOME": str(tmp_path), f"MESHLOOM_{variable}": value}
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "services.local", "up"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (2, f"meshloom: {told}\n")


@pytest.fixture
def refusing_redis() -> Iterator[str]:
    """The URL of a server that refuses whatever is asked, in words that a terminal would obey."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as connection:
                while asked := connection.recv(1 << 16):
                    connection.sendall(b"-ERR \x1b]0;title\x07\x1b[2J\r\n" * asked.count(b"*"))

        answering = threading.Thread(target=answer)
        answering.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        answering.join()


def test_what_a_redis_of_no_use_says_is_shown_and_not_obeyed(
    tmp_path: Path, refusing_redis: str
) -> None:
    settings = LocalSettings(home=tmp_path, port=free_port(), redis_url=refusing_redis)

    async def start() -> None:
        async with running_stack(settings):
            pytest.fail("no Redis answers")

    with pytest.raises(StackError, match="look at MESHLOOM_REDIS_URL") as refused:
        asyncio.run(start())
    assert r"Redis cannot be used: \x1b]0;title\x07\x1b[2J;" in str(refused.value)


def test_where_another_in_the_controllers_place_redirects_to_is_shown_and_not_obeyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stack, "_READY_TIMEOUT_S", 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(
                    b"HTTP/1.1 302 Found\r\nLocation: /\x9b31m\r\nContent-Length: 0\r\n\r\n"
                )

        answering = threading.Thread(target=answer)
        answering.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StackError, match="not ready after") as refused:
            asyncio.run(stack._wait_until_ready(url, None))
        answering.join()
    assert r"/\x9b31m" in str(refused.value)
    assert str(refused.value).isprintable()
