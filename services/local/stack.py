"""The local stack: Redis, controller and agent under one owner, in order up and in order down."""

import asyncio
import contextlib
import fcntl
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Final

import httpx
from redis import RedisError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from services.contract.api.views import NodeList
from services.contract.redis.redis_address import with_advice
from services.contract.words.control_characters import one_line
from services.contract.words.states import NodeState
from services.local.children import Child, Program
from services.local.embedded_redis import redis_program, wait_for_redis_in_loop
from services.local.settings import LocalSettings

_READY_TIMEOUT_S: Final = 60
_POLL_S: Final = 0.1
# Of the controller alone: whoever has the token is the operator.
_CONTROLLERS: Final = frozenset(
    f"MESHLOOM_{name}{suffix}" for name in ("TOKEN", "TELEMETRY_SECRET") for suffix in ("", "_FILE")
)
# The stack, its dashboard and `make run` speak HTTP on this machine alone.
_OF_HTTPS: Final = frozenset({"MESHLOOM_TLS_CERT", "MESHLOOM_TLS_KEY"})


class StackError(Exception):
    """The stack cannot be brought up; the text says what to do."""


class _NotReadyError(Exception):
    pass


@contextlib.asynccontextmanager
async def running_stack(settings: LocalSettings) -> AsyncIterator[str]:
    """Everything up and ready for jobs inside the block; yields the controller's URL.

    Raises:
        StackError: The home cannot be used, another stack owns it, the port is taken, or a part does not come up.
    """
    home = settings.home.resolve()
    logs = home / "logs"
    _make(logs, home)
    with _sole_owner(home), _redis(settings, home, logs) as (redis_url, redis_programs):
        _check_port(settings.host, settings.port)
        environment = {
            "MESHLOOM_REDIS_URL": redis_url,
            "MESHLOOM_HOME": str(home),
            "MESHLOOM_HOST": settings.host,
            "MESHLOOM_PORT": str(settings.port),
            # The agent writes there, the controller reads exports for downloads.
            "MESHLOOM_CHECKPOINT_ROOT": str(settings.checkpoint_root or home / "checkpoints"),
        }
        programs = [
            Program(
                name,
                [sys.executable, "-P", "-m", module],
                logs / f"{name}.log",
                environment,
                without,
            )
            for name, module, without in (
                ("controller", "services.controller", _OF_HTTPS),
                ("agent", "services.worker.agent", _CONTROLLERS),
            )
        ]
        async with _kept_alive(redis_programs) as redis_failed:
            address = settings.redis_address or redis_url
            # In no thread: one that waits for a server that has ended would hold up a Ctrl-C.
            await _or_failed(_wait_for_redis(address), redis_failed)
            async with _kept_alive(programs) as failed:
                url = f"http://{settings.host}:{settings.port}"
                await _or_failed(_wait_until_ready(url, settings.token), failed)
                yield url


def _make(folder: Path, home: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # somebody else's, who decides who reads it
            home.chmod(0o700)
    except OSError as error:
        raise StackError(f"MESHLOOM_HOME: {home} cannot be used: {error}") from error


def stack_is_up(settings: LocalSettings) -> bool:
    """Whether some process owns this home's stack now."""
    _make(settings.home, settings.home)
    try:
        with _sole_owner(settings.home.resolve()):
            return False
    except StackError:
        return True


@contextlib.contextmanager
def _sole_owner(home: Path) -> Iterator[None]:
    with (home / "owner.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(
                f"a stack already runs on {home}; use it, stop it, or set MESHLOOM_HOME"
            ) from None
        yield


@contextlib.contextmanager
def _redis(settings: LocalSettings, home: Path, logs: Path) -> Iterator[tuple[str, list[Program]]]:
    if settings.redis_url is not None:
        yield settings.redis_url, []
        return
    with redis_program(home / "redis") as redis:
        yield redis.url, [Program("redis", redis.command, logs / "redis.log", {}, _CONTROLLERS)]


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StackError(
                f"port {port} on {host} is not free ({error.strerror}); set MESHLOOM_PORT to another"
            ) from error


@contextlib.asynccontextmanager
async def _kept_alive(programs: list[Program]) -> AsyncIterator[asyncio.Future[None]]:
    """Children in order of need; ended in the opposite order, each before the next."""
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def report(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not failed.done():
            error = task.exception()
            failed.set_exception(error or StackError("a supervisor ended"))
            failed.exception()  # marks it as seen: nobody may be waiting any more

    tasks = []
    try:
        for program in programs:
            task = asyncio.create_task(Child(program).run(), name=program.name)
            task.add_done_callback(report)
            tasks.append(task)
        yield failed
    finally:
        for task in reversed(tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _or_failed(ready: Coroutine[None, None, None], failed: asyncio.Future[None]) -> None:
    task = asyncio.create_task(ready)
    try:
        await asyncio.wait([task, failed], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise StackError(str(failed.exception()))
        await task
    finally:
        # Over before what it asks is ended: asyncio prints a connection that breaks under it.
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _wait_for_redis(address: str) -> None:
    try:
        await wait_for_redis_in_loop(address)
    except RedisError as error:
        # Whatever answers there chooses the words.
        why = one_line(with_advice(str(error))).rstrip(".")
        raise StackError(f"Redis cannot be used: {why}; look at MESHLOOM_REDIS_URL") from error


async def _wait_until_ready(url: str, token: str | None) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(base_url=url, headers=headers) as client:
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type((httpx.HTTPError, _NotReadyError)),
                wait=wait_fixed(_POLL_S),
                stop=stop_after_delay(_READY_TIMEOUT_S),
                reraise=True,
            ):
                with attempt:
                    await _check_ready(client)
        except (httpx.HTTPError, _NotReadyError) as error:
            # Whatever listens on that port chooses where it redirects to.
            raise StackError(
                f"not ready after {_READY_TIMEOUT_S} s ({one_line(str(error))}); the logs folder says why"
            ) from error


async def _check_ready(client: httpx.AsyncClient) -> None:
    (await client.get("/readyz")).raise_for_status()
    answer = (await client.get("/v1/nodes")).raise_for_status()
    nodes = NodeList.model_validate_json(answer.content)
    # The record of an agent that was killed says READY until its lease is found to be over.
    if not any(node.state is NodeState.READY and node.lease_s for node in nodes.items):
        raise _NotReadyError("no node has joined")
