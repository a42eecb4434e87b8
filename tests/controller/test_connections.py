"""Connections over real sockets: who sends nothing, half of it or reads nothing is let go."""

import asyncio
import contextlib
import functools
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import h11
import httpx2
import psutil
import pytest
import trustme
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from services.controller.__main__ import ControllerServer
from services.controller.api.connections import (
    BoundedProtocol,
    BoundedTlsProtocol,
    ConnectionLimits,
    FewARound,
)
from services.local.embedded_redis import EmbeddedRedis
from tests.controller.conftest import job_body
from tests.controller.test_certificate import issued
from tests.controller.test_process import Controller, started
from tests.waiting import until

TOKEN = "the-operators-own-token"  # noqa: S105 a test's
SHOWN = {"Authorization": f"Bearer {TOKEN}"}
HEAD = f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
PARTS = {
    "nothing": b"",
    "half a line": b"GET /v1/jo",
    "half a head": HEAD,
    "half a body": HEAD + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
    "half a body of a stranger": b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    "half of the next": b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /v1",
    "the next without its body": b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD
    + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def strict(redis_server: EmbeddedRedis) -> Iterator[Controller]:
    """A controller that waits for half a second, for forty clients."""
    redis_server.flush()
    limits = {"request_timeout_s": "0.5", "max_connections": "40"}
    with started(redis_server.url, token=TOKEN, **limits) as controller:
        yield controller


def opened(controller: Controller, sent: bytes = b"") -> socket.socket:
    url = controller.client.base_url
    client = socket.create_connection((url.host, url.port or 80))
    client.setblocking(False)  # noqa: FBT003 the socket's own
    if sent:
        client.send(sent)
    return client


def is_closed(client: socket.socket) -> bool:
    """Whether the other side has ended the connection; what it wrote is passed over."""
    try:
        while client.recv(65_536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.mark.redis
def test_who_does_not_send_a_whole_request_is_let_go_and_a_stream_goes_on(
    strict: Controller,
) -> None:
    job_id = strict.client.post("/v1/jobs", json=job_body(), headers=SHOWN).json()["id"]
    path, headers = f"/v1/jobs/{job_id}/events", {**SHOWN, "Accept": "text/event-stream"}
    url = str(strict.client.base_url)
    with (
        httpx2.Client(base_url=url, timeout=60) as watcher,
        watcher.stream("GET", path, headers=headers) as stream,
        contextlib.ExitStack() as stack,
    ):
        lines = stream.iter_lines()
        assert any(line.startswith("data:") for line in lines)
        half = [stack.enter_context(opened(strict, part)) for part in PARTS.values() for _ in "123"]
        for client in half:
            until(lambda client=client: is_closed(client), timeout_s=30)  # type: ignore[misc] # a default
        # The stream is older than all of them, and is still told what happens.
        assert strict.client.post(f"/v1/jobs/{job_id}/kill", headers=SHOWN).status_code == 202
        assert any("event: end" in line for line in lines)


@pytest.mark.redis
def test_silent_clients_in_any_number_shut_nobody_out(strict: Controller) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(opened(strict)) for _ in range(60)]
        with httpx2.Client(base_url=str(strict.client.base_url), timeout=60) as client:
            assert client.get("/v1/jobs", headers=SHOWN).status_code == 200
        for each in silent:
            until(lambda each=each: is_closed(each), timeout_s=30)  # type: ignore[misc] # a default


def answered(controller: Controller, sent: bytes) -> bytes:
    """All that comes back until the connection is closed."""
    url = controller.client.base_url
    with socket.create_connection((url.host, url.port or 80), timeout=30) as client:
        client.sendall(sent)
        return b"".join(iter(lambda: client.recv(65_536), b""))


@pytest.mark.redis
def test_who_begins_no_handshake_takes_little_memory(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    authority, trusting = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(trusting)
    cert, key = issued(authority, tmp_path)
    with (
        started(redis_server.url, token=TOKEN, tls_cert=str(cert), tls_key=str(key)) as controller,
        ExitStack() as clients,
    ):
        url = f"https://localhost:{controller.client.base_url.port}/healthz"
        process = psutil.Process(controller.process.pid)

        def taken() -> int:
            # Answered once those that came before it are taken.
            assert httpx2.get(url, verify=trusting).status_code == 200
            return process.memory_info().rss

        before = taken()
        for _ in range(200):
            clients.enter_context(opened(controller))
        assert taken() - before < 200 * (160 << 10)


@pytest.mark.redis
def test_a_request_with_two_ends_is_refused_and_what_follows_it_is_not_read(
    strict: Controller,
) -> None:
    framed = (
        b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"
    )
    after = b"0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for head in (HEAD, HEAD.replace(b"POST", b"GET"), HEAD.replace(TOKEN.encode(), b"x")):
        back = answered(strict, head + framed + after)
        assert back.startswith(b"HTTP/1.1 400 ")
        assert back.count(b"HTTP/1.1") == 1


@pytest.mark.redis
def test_a_head_of_many_lines_or_bytes_is_refused_and_kept_connections_are_not(
    strict: Controller,
) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    assert answered(strict, head + b"a:\r\n" * 100 + b"\r\n").startswith(b"HTTP/1.1 431 ")
    # Also where the head comes in parts that end within a line's end.
    with opened(strict) as client:
        client.setblocking(True)  # noqa: FBT003 the socket's own
        for part in (head, *[b"a:\r", b"\n"] * 100):
            client.sendall(part)
        assert client.recv(100).startswith(b"HTTP/1.1 431 ")
    assert answered(strict, head + b"a: " + b"x" * 20_000).startswith(b"HTTP/1.1 400 ")
    # What is still sent does not cost the client its answer.
    told = answered(strict, head + b"a: \x0b\r\n" + b"b: " + b"x" * 60_000)
    assert b"application/problem+json" in told
    assert b'"code":"bad_request"' in told
    few = head + b"a:\r\n" * 90
    back = answered(strict, (few + b"\r\n") * 30 + few + b"Connection: close\r\n\r\n")
    assert back.count(b"HTTP/1.1 200 ") == 31


def lines_so_far(controller: Controller) -> int:
    """How many it has written until now, of which the last ones may still have been on their way."""
    shown = SHOWN | {"X-Request-ID": secrets.token_hex(8)}
    assert controller.client.post("/v1/jobs", json=job_body(), headers=shown).is_success
    until(lambda: controller.lines[-1].get("request_id") == shown["X-Request-ID"])
    return len(controller.lines)


@pytest.mark.redis
def test_what_is_no_body_ends_its_connection_and_leaves_no_word_in_the_log(
    strict: Controller,
) -> None:
    before = lines_so_far(strict)
    for _ in range(20):
        with opened(strict) as client:
            client.setblocking(True)  # noqa: FBT003 the socket's own
            client.sendall(
                b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            assert client.recv(4_096).startswith(b"HTTP/1.1 200 ")
            client.sendall(b"no chunk\r\n")
            with contextlib.suppress(ConnectionError):
                while client.recv(4_096):
                    pass
    made = strict.client.post("/v1/jobs", json=job_body(), headers=SHOWN).headers["x-request-id"]
    until(lambda: strict.lines[-1].get("request_id") == made)
    assert len(strict.lines) == before + 1


@pytest.mark.redis
def test_what_is_broken_in_the_middle_is_answered_once_and_leaves_no_word_in_the_log(
    strict: Controller,
) -> None:
    before = lines_so_far(strict)
    body = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n"
    for path in (b"POST /v1/jobs", b"GET /healthz"):
        back = answered(strict, path + b" HTTP/1.1\r\nHost: localhost\r\n" + body)
        assert back.startswith(b"HTTP/1.1 400 ")
        assert back.count(b"HTTP/1.1 ") == 1
    shown = SHOWN | {"X-Request-ID": "the-last"}
    assert strict.client.post("/v1/jobs", json=job_body(), headers=shown).is_success
    until(lambda: strict.lines[-1].get("request_id") == "the-last")
    assert [line["event"] for line in strict.lines[before:]] == ["request"] * 2


@pytest.mark.redis
@pytest.mark.parametrize(
    ("head", "behind"),
    [
        (b"GET /healthz HTTP/1.0\r\n\r\n", b"\n"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"\r\n"),
        (
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ),
    ],
    ids=["a line", "an end of a line", "a request"],
)
def test_what_comes_behind_a_connections_last_request_is_passed_over(
    strict: Controller, head: bytes, behind: bytes
) -> None:
    """It was answered 400, though it had been carried out: a client would have sent it again."""
    back = answered(strict, head + behind)
    assert back.startswith((b"HTTP/1.1 200 ", b"HTTP/1.0 200 "))
    assert back.count(b"HTTP/1.") == 1


# --- one protocol in this process ---------------------------------------------------------------


NOTHING = (b"content-length", b"0")


@dataclass
class Served:
    """A server of large answers, and the connections that it has."""

    address: tuple[str, int]
    state: ServerState


def bounded(state: ServerState) -> list[BoundedProtocol]:
    return [each for each in state.connections if isinstance(each, BoundedProtocol)]


async def asked_late(state: ServerState, receive: Receive) -> int:
    """How much comes of a body that is asked for once its connection is refused; -1 where to ask is an error."""
    await sooner_or_later(lambda: any(each._is_refused for each in bounded(state)))
    try:
        return len((await receive()).get("body", b""))
    except h11.LocalProtocolError:
        return -1


@contextlib.asynccontextmanager
async def served(
    limits: ConnectionLimits, parts: list[int] | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Served]:
    """Serve; ``parts`` are the sizes in which a request's body comes."""

    is_over = asyncio.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/late" and parts is not None:
            parts.append(await asked_late(state, receive))
            return
        if scope["path"] == "/waits":
            await is_over.wait()
        if scope["path"] == "/early":
            await send({"type": "http.response.start", "status": 200, "headers": [NOTHING]})
            await send({"type": "http.response.body"})
            return
        more = parts is not None
        while more and parts is not None:
            message = await receive()
            parts.append(len(message.get("body", b"")))
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] == "/until-some-waits" and not any(
            each.transport.get_write_buffer_size() for each in state.connections
        ):
            await send({"type": "http.response.body", "body": bytes(1 << 14), "more_body": True})
        if scope["path"] == "/until-some-waits":
            await send({"type": "http.response.body"})
            return
        size = 8 << 20 if scope["path"] == "/whole" else 1 << 20
        for _ in range((100 << 20) // size):
            await send({"type": "http.response.body", "body": bytes(size), "more_body": True})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(answer, log_config=None, lifespan="off")
    kind = BoundedProtocol if tls is None else BoundedTlsProtocol
    state, protocol = ServerState(), kind.within(limits)
    # As the controller's own: asyncio asks for no TCP_NODELAY on what it accepts.
    listener = socket.create_server(("127.0.0.1", 0))
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config, state, {}), sock=listener, ssl=tls
    )
    try:
        yield Served(listener.getsockname(), state)
    finally:
        is_over.set()
        server.close()
        for connection in set(state.connections):
            connection.transport.abort()
        await asyncio.gather(*state.tasks, return_exceptions=True)


async def sooner_or_later(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 a connection sets no event
            await asyncio.sleep(0)


@pytest.mark.anyio
async def test_answers_are_sent_without_waiting_for_more() -> None:
    async with served(ConnectionLimits()) as server:
        with socket.create_connection(server.address):
            await sooner_or_later(lambda: bool(server.state.connections))
            (connection,) = server.state.connections
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.anyio
async def test_few_connections_are_accepted_in_one_round_of_the_loop() -> None:
    async def silent(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise AssertionError("nobody asks")

    config = uvicorn.Config(silent, log_config=None, lifespan="off", ws="none")
    config.load()
    server = ControllerServer(config, asyncio.Event())
    server.lifespan = config.lifespan_class(config)
    connections = server.server_state.connections
    listener = socket.create_server(("127.0.0.1", 0), backlog=100)
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        starting = asyncio.create_task(server.startup([listener]))
        most = 0
        async with asyncio.timeout(30):
            while len(connections) < 60:
                before = len(connections)
                await asyncio.sleep(0)
                most = max(most, len(connections) - before)
        await starting
    await server.shutdown([listener])
    assert most <= 16, "in the ten rounds that a request takes more would come than there may be"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"GARBAGE\r\n\r\n", b"400"), (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n", b"431")],
)
async def test_few_connections_are_refused_in_one_round_of_the_loop(
    sent: bytes, status: bytes
) -> None:
    async with served(ConnectionLimits()) as server:
        with contextlib.ExitStack() as stack:
            clients = [
                stack.enter_context(socket.create_connection(server.address)) for _ in range(60)
            ]
            await sooner_or_later(lambda: len(server.state.connections) == len(clients))
            for client in clients:
                client.setblocking(False)  # noqa: FBT003 the socket's own
                client.send(sent)
            waiting, most = set(clients), 0
            async with asyncio.timeout(30):
                while waiting:
                    await asyncio.sleep(0)
                    answered_now = {each for each in waiting if has_come(each, status)}
                    waiting -= answered_now
                    most = max(most, len(answered_now))
            assert most <= 16, "hundreds of connections make a round take a third of a second"


def has_come(client: socket.socket, status: bytes) -> bool:
    """Whether an answer is here; it has that status."""
    try:
        answer = client.recv(65_536)
    except BlockingIOError:
        return False
    assert answer.startswith(b"HTTP/1.1 " + status)
    return True


async def most_in_a_round(parts: list[int], size: int) -> int:
    """How many parts of bodies come in one round of the loop at most, until all of ``size`` are there."""
    most = 0
    async with asyncio.timeout(30):
        while sum(parts) < size:
            before = len(parts)
            await asyncio.sleep(0)
            most = max(most, len(parts) - before)
    return most


@pytest.mark.anyio
async def test_chunks_of_few_connections_are_parsed_in_one_round_of_the_loop() -> None:
    chunks = b"1\r\na\r\n" * 400
    parts: list[int] = []
    async with served(ConnectionLimits(), parts) as server:
        with contextlib.ExitStack() as stack:
            clients = [
                stack.enter_context(socket.create_connection(server.address)) for _ in range(60)
            ]
            await sooner_or_later(lambda: len(server.state.connections) == len(clients))
            for client in clients:
                client.send(
                    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
                )
            most = await most_in_a_round(parts, 400 * len(clients))
            assert most <= 8, "hundreds of connections make a round take a second"


@pytest.mark.anyio
async def test_chunks_behind_a_body_that_was_answered_early_are_of_few_connections_in_a_round() -> (
    None
):
    parts: list[int] = []
    async with served(ConnectionLimits(), parts) as server:
        with contextlib.ExitStack() as stack:
            clients = [
                stack.enter_context(socket.create_connection(server.address)) for _ in range(40)
            ]
            await sooner_or_later(lambda: len(server.state.connections) == len(clients))
            for client in clients:
                client.send(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n")
                client.setblocking(False)  # noqa: FBT003 the socket's own
            waiting = set(clients)
            async with asyncio.timeout(30):
                while waiting:
                    await asyncio.sleep(0)
                    waiting -= {each for each in waiting if has_come(each, b"200")}
            for client in clients:
                client.send(
                    b"xPOST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                    + b"1\r\na\r\n" * 100
                )
            most = await most_in_a_round(parts, 100 * len(clients))
            assert most <= 8, "hundreds of connections make a round take a second"


@pytest.mark.anyio
async def test_who_is_gone_has_no_turn_for_which_others_wait() -> None:
    loop, done, few = asyncio.get_running_loop(), list[int](), FewARound(2)
    with contextlib.ExitStack() as stack:
        transports = []
        for _ in range(2):
            ours, _ = map(stack.enter_context, socket.socketpair())
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
            transports.append(transport)
        gone, here = transports
        gone.abort()
        for number in range(100):
            few.add(loop, gone, functools.partial(done.append, number))
        few.add(loop, here, functools.partial(done.append, -1))
        await asyncio.sleep(0)
        assert done == [-1]
        here.abort()
        await asyncio.sleep(0)


@pytest.mark.anyio
async def test_who_does_not_read_the_answer_is_let_go() -> None:
    async with served(ConnectionLimits(request_s=0.2)) as server:
        with socket.create_connection(server.address) as client:
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await sooner_or_later(lambda: bool(server.state.tasks))
            await sooner_or_later(lambda: not server.state.connections)


LEAVES_A_LITTLE = b"GET /until-some-waits HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.anyio
async def test_a_request_on_a_kept_connection_has_its_time_from_its_first_byte() -> None:
    async with served(ConnectionLimits()) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = server.state.connections
        assert isinstance(connection, BoundedProtocol)
        await sooner_or_later(lambda: connection._deadline)
        while_idle = connection._deadline
        writer.write(b"H")
        await sooner_or_later(lambda: connection.conn.trailing_data[0] == b"H")
        begun = connection._deadline
        assert begun is not None
        assert while_idle is not None
        assert begun.when() > while_idle.when()
        assert while_idle.cancelled()
        writer.write(b"E")
        await sooner_or_later(lambda: connection.conn.trailing_data[0] == b"HE")
        assert connection._deadline is begun
        writer.close()


@pytest.mark.anyio
async def test_who_leaves_the_last_of_an_answer_unread_is_let_go() -> None:
    async with served(ConnectionLimits(request_s=0.2)) as server:
        with socket.create_connection(server.address) as client:
            client.send(LEAVES_A_LITTLE)
            await sooner_or_later(lambda: bool(server.state.tasks))
            await sooner_or_later(lambda: not server.state.connections)


@pytest.mark.anyio
@pytest.mark.parametrize("asked", [LEAVES_A_LITTLE, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_who_does_not_read_shuts_nobody_out(asked: bytes) -> None:
    async with served(ConnectionLimits(open_at_once=1)) as server:
        with socket.create_connection(server.address) as client:
            client.send(asked)
            await sooner_or_later(lambda: bool(server.state.connections))
            (connection,) = server.state.connections
            await sooner_or_later(connection.transport.get_write_buffer_size)
            reader, writer = await asyncio.open_connection(*server.address, limit=1 << 20)
            writer.write(LEAVES_A_LITTLE)
            status = await reader.readline()
            writer.transport.abort()
            assert status == b"HTTP/1.1 200 OK\r\n"
            assert connection not in server.state.connections
            assert not connection.transport.get_write_buffer_size()


@pytest.mark.anyio
async def test_answers_that_nobody_reads_end_no_upload() -> None:
    async with served(ConnectionLimits(open_at_once=3), parts=[]) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                client = stack.enter_context(socket.create_connection(server.address))
                client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await sooner_or_later(lambda: len(server.state.connections) == 2)
            unread = set(server.state.connections)
            await sooner_or_later(
                lambda: all(each.transport.get_write_buffer_size() for each in unread)
            )
            reader, writer = await asyncio.open_connection(*server.address, limit=1 << 20)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n1")
            await sooner_or_later(lambda: len(server.state.connections) == 3)
            stack.enter_context(socket.create_connection(server.address))
            await sooner_or_later(lambda: len(unread & server.state.connections) < 2)
            writer.write(b"2")
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.transport.abort()


@pytest.mark.anyio
async def test_unread_answers_of_all_together_are_bounded_and_who_reads_gets_the_whole() -> None:
    most = 2 << 20
    async with served(ConnectionLimits(unread_bytes=most)) as server:

        def unread() -> int:
            kinds = server.state.connections
            return sum(each.transport.get_write_buffer_size() for each in kinds)

        with contextlib.ExitStack() as stack:
            for _ in range(40):
                client = stack.enter_context(socket.create_connection(server.address))
                client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await sooner_or_later(lambda: len(server.state.connections) == 40)
            await sooner_or_later(lambda: len(server.state.connections) < 40)
            reader, writer = await asyncio.open_connection(*server.address, limit=1 << 20)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            read = 0
            while part := await reader.read(1 << 20):
                read += len(part)
                assert unread() <= most + (1 << 20)
            assert read > 100 << 20
            writer.close()


@pytest.mark.anyio
async def test_who_reads_slowly_is_waited_for() -> None:
    async with served(ConnectionLimits(request_s=0.5)) as server:
        reader, writer = await asyncio.open_connection(*server.address, limit=1 << 16)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        read = 0
        while part := await reader.read(1 << 16):
            read += len(part)
        assert read > 100 << 20
        writer.close()


@pytest.fixture
def tls() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server, and of a client that trusts it."""
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client


@pytest.mark.anyio
async def test_answers_behind_tls_that_nobody_reads_are_counted_and_let_go(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    ours, theirs = tls
    request = b"GET /whole HTTP/1.1\r\nHost: x\r\n\r\n"
    writers: list[asyncio.StreamWriter] = []

    async def ask(server: Served) -> None:
        _, writer = await asyncio.open_connection(
            *server.address, ssl=theirs, server_hostname="localhost"
        )
        writer.write(request)
        writers.append(writer)

    async with served(ConnectionLimits(unread_bytes=6 << 20), tls=ours) as server:
        for _ in range(4):
            await ask(server)
        await sooner_or_later(lambda: len(server.state.connections) == 1)
    async with served(ConnectionLimits(request_s=1.0), tls=ours) as server:
        await ask(server)
        await sooner_or_later(lambda: bool(server.state.tasks))
        await sooner_or_later(lambda: not server.state.connections)
    for writer in writers:
        writer.transport.abort()


@pytest.mark.anyio
async def test_behind_tls_a_last_chunk_counts_though_the_client_ends_the_connection_with_it(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    ours, theirs = tls
    parts: list[int] = []
    async with served(ConnectionLimits(), parts, tls=ours) as server:
        _, writer = await asyncio.open_connection(
            *server.address, ssl=theirs, server_hostname="localhost"
        )
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await sooner_or_later(lambda: sum(parts) == 1)
        writer.write(b"1\r\nb\r\n0\r\n\r\n")
        writer.close()
        await sooner_or_later(lambda: not server.state.connections)
        assert sum(parts) == 2


@pytest.mark.anyio
async def test_who_is_refused_behind_tls_keeps_no_descriptor(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    ours, theirs = tls
    connect = functools.partial(asyncio.open_connection, ssl=theirs, server_hostname="localhost")
    async with served(ConnectionLimits(open_at_once=1), tls=ours) as server:
        reader, silent = await connect(*server.address)
        await sooner_or_later(lambda: bool(server.state.connections))
        (connection,) = server.state.connections
        accepted = connection.transport.get_extra_info("socket")
        silent.transport.pause_reading()  # type: ignore[attr-defined] # it does not answer the end of TLS
        _, other = await connect(*server.address)
        async with asyncio.timeout(10):
            while accepted.fileno() != -1:  # noqa: ASYNC110 a connection sets no event
                await asyncio.sleep(0)
        silent.transport.resume_reading()  # type: ignore[attr-defined]
        assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
        for writer in (silent, other):
            writer.transport.abort()


@pytest.mark.anyio
@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
async def test_a_body_whose_length_is_known_is_read_in_large_parts_and_nothing_behind_it(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
    is_tls: bool,  # noqa: FBT001 a parameter of pytest's
) -> None:
    ours, theirs = tls if is_tls else (None, None)
    sizes: list[int] = []
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n"
    in_chunks = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with served(ConnectionLimits(), sizes, ours) as server:
        reader, writer = await asyncio.open_connection(
            *server.address, ssl=theirs, server_hostname="localhost" if is_tls else None
        )
        writer.write(head + bytes(4_000_000) + in_chunks + b"1\r\na\r\n" * 5_000)
        await sooner_or_later(lambda: sum(sizes) >= 4_000_000)
        assert len(sizes) < 2_000
        before = len(sizes)
        reading = asyncio.create_task(
            reader.read()
        )  # of an answer of 100 MB, behind which no other comes
        await sooner_or_later(lambda: sum(sizes) >= 4_003_000)
        reading.cancel()
        assert max(sizes[before:]) < 1_000
        writer.transport.abort()


@pytest.mark.anyio
@pytest.mark.parametrize("is_tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("length", [b"", b"Content-Length: 100000\r\n"], ids=["alone", "two ends"])
async def test_chunks_of_a_byte_are_taken_a_few_at_a_time_and_not_for_long(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
    is_tls: bool,  # noqa: FBT001 a parameter of pytest's
    length: bytes,
) -> None:
    ours, theirs = tls if is_tls else (None, None)
    name = "localhost" if is_tls else None
    head = b"POST / HTTP/1.1\r\nHost: x\r\n%bTransfer-Encoding: chunked\r\n\r\n" % length
    sizes: list[int] = []
    async with served(ConnectionLimits(), sizes, ours) as server:
        reader, writer = await asyncio.open_connection(
            *server.address, ssl=theirs, server_hostname=name
        )
        writer.write(head + b"1\r\na\r\n" * 3_000 + b"0\r\n\r\n")
        await reader.readline()
        await sooner_or_later(lambda: sum(sizes) == 3_000)
        writer.close()
        # Each is parsed before anything else has its turn.
        assert max(sizes) < 1_000
        reader, writer = await asyncio.open_connection(
            *server.address, ssl=theirs, server_hostname=name
        )
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            writer.write(head + b"1\r\na\r\n" * 100_000)
            await reader.read()
        await sooner_or_later(lambda: not server.state.connections)
        assert sum(sizes) < 3_000 + 7_000
        writer.close()


@pytest.mark.anyio
async def test_a_body_in_large_chunks_is_taken_whole() -> None:
    sizes: list[int] = []
    async with served(ConnectionLimits(), sizes) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"400\r\n" + (b"a" * 1024 + b"\r\n400\r\n") * 7_999)
        writer.write(b"a" * 1024 + b"\r\n0\r\n\r\n")
        assert b"200" in await reader.readline()
        assert sum(sizes) == 8_192_000
        writer.close()


@pytest.mark.anyio
async def test_who_has_gone_from_a_body_that_nobody_takes_and_that_is_broken_is_let_go() -> None:
    """Nothing more was read, so that its end was not seen until its time was over."""
    sizes: list[int] = []
    async with served(ConnectionLimits(), sizes) as server:
        _, writer = await asyncio.open_connection(*server.address)
        head = b"POST /waits HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        # What is broken comes in one part with what is more than may wait.
        writer.write(head + b"10040\r\n" + bytes(0x10040) + b"\r\nno chunk\r\n")
        await sooner_or_later(lambda: any(each._is_refused for each in bounded(server.state)))
        writer.transport.abort()
        await sooner_or_later(lambda: not server.state.connections)
        assert not sizes


@pytest.mark.anyio
async def test_a_body_behind_another_request_is_read_in_large_parts_too() -> None:
    sizes: list[int] = []
    async with served(ConnectionLimits(), sizes) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        head = b"GET /early HTTP/1.1\r\nHost: x\r\n\r\n"
        whole = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
        writer.write(head + whole + bytes(1_000_000))
        await reader.readline()
        await sooner_or_later(lambda: sum(sizes) >= 1_000_000)
        assert len(sizes) < 500
        writer.transport.abort()


@pytest.mark.anyio
async def test_who_waits_to_be_asked_for_a_body_and_breaks_it_is_not_asked_any_more() -> None:
    """To ask is an error once it is refused, which was a traceback in the log for each."""
    sizes: list[int] = []
    async with served(ConnectionLimits(), sizes) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        head = b"POST /late HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"no chunk\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        await sooner_or_later(lambda: sizes)
        assert sizes == [0]
        writer.close()
