"""Webhooks: a real receiver that fails, a controller that is killed, and addresses that are refused."""

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import hmac
import itertools
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from pydantic import AnyHttpUrl
from redis import Redis

import meshloom
from meshloom.client import RefusedError
from services.contract.api.access import Scope
from services.contract.api.requests import JobPatch
from services.contract.api.webhooks import WebhookRequest
from services.contract.redis import redis_keys as keys
from services.contract.words.ids import new_job_id
from services.controller.adapters.http import webhooks as http_webhooks
from services.controller.adapters.http.webhooks import HttpWebhooks
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.adapters.redis import redis_ports
from services.controller.domain.access.token import LOCAL, Principal
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.errors import DeposedError, StateConflictError
from services.controller.domain.job.job import Job
from services.controller.loops import webhooks
from services.controller.ports.jobs import Actor
from services.controller.ports.webhooks import AddressRefusedError, DeliveryError
from services.controller.use_cases.webhooks import (
    MOST_OF_ONE,
    Delivery,
    create_webhook,
    remove_webhook,
)
from services.local.embedded_redis import EmbeddedRedis
from tests.controller.conftest import job_body
from tests.controller.histories import spec
from tests.dashboard.tabs import Controller
from tests.waiting import until

pytestmark = pytest.mark.redis
TOKEN = "an-operator-of-webhooks"  # noqa: S105 of this test's own controller


class Receiver(ThreadingHTTPServer):
    """Keeps what comes; answers with ``status``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.came: list[tuple[int, dict[str, str], bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/hook?key=secret"

    def taken(self) -> list[dict[str, Any]]:
        """The bodies that were answered with 200, in their order."""
        return [json.loads(body) for status, _, body in self.came if status == 200]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.server.status
        headers = {name.lower(): text for name, text in self.headers.items()}
        self.server.came.append((status, headers, body))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """On a Redis of its own: it lives between tests, and would take the lead in the others' Redis."""
    home = tmp_path_factory.mktemp("controller")
    settings = {"MESHLOOM_WEBHOOK_HOSTS": "127.0.0.1", "MESHLOOM_FACTORY_PREFIXES": "*"}
    with (
        EmbeddedRedis.start(home / "redis") as redis,
        Controller(redis.url, home, TOKEN, **settings) as controller,
    ):
        yield controller


def ask(controller: Controller, method: str, path: str, token: str = TOKEN, **rest: Any) -> Any:  # noqa: ANN401 JSON
    headers = {"Authorization": f"Bearer {token}"}
    answer = httpx.request(method, f"{controller.url}/v1{path}", headers=headers, **rest)
    return answer.raise_for_status().json() if answer.content else None


def hooked(controller: Controller, url: str, token: str = TOKEN, **more: object) -> dict[str, Any]:
    made = ask(controller, "POST", "/webhooks", token, json={"url": url, **more})
    assert isinstance(made, dict)
    return made


def submitted(controller: Controller, token: str = TOKEN, **changes: object) -> str:
    return str(ask(controller, "POST", "/jobs", token, json=job_body(**changes))["id"])


def test_an_event_is_signed_and_sent_again_until_it_is_taken(
    controller: Controller, receiver: Receiver
) -> None:
    receiver.status = 500
    made = hooked(controller, receiver.url, kinds=["job.queued"], labels=["hook=a"])
    jobs = [submitted(controller, labels={"hook": "a"}) for _ in range(2)]
    submitted(controller, labels={"hook": "other"})
    until(lambda: len(receiver.came) >= 3)
    (listed,) = ask(controller, "GET", "/webhooks")["items"]
    assert listed["last_error"] == "the receiver answered 500"
    assert "secret" not in json.dumps(listed)
    receiver.status = 200
    until(lambda: len(receiver.taken()) == 2)
    assert [body["data"]["job_id"] for body in receiver.taken()] == jobs
    assert receiver.taken()[0]["type"] == "job.queued"

    ids = Counter(headers["webhook-id"] for _, headers, _ in receiver.came)
    assert len(ids) == 2  # repeated tries have one id
    _, headers, body = receiver.came[-1]
    key = base64.b64decode(made["secret"].removeprefix("whsec_"))
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    signature = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    assert headers["webhook-signature"] == f"v1,{signature}"

    def view() -> dict[str, Any] | None:
        (found,) = ask(controller, "GET", "/webhooks")["items"]
        return dict(found) if found["delivered"] == 2 else None

    assert until(view)["last_error"] is None
    ask(controller, "DELETE", f"/webhooks/{made['id']}")
    assert ask(controller, "GET", "/webhooks")["items"] == []


def test_what_a_killed_controller_owed_the_next_one_sends(
    controller: Controller, receiver: Receiver
) -> None:
    receiver.status = 503
    with meshloom.Client(controller.url, TOKEN) as client:
        made = client.webhooks.create(receiver.url, kinds=["job.queued"], format="slack")
    first = submitted(controller, name="a-job")
    until(lambda: receiver.came)
    controller.kill()
    receiver.status = 200
    controller.start()
    controller.wait_until_ready()
    second = submitted(controller)
    until(lambda: len(receiver.taken()) >= 2)
    texts = [body["text"] for body in receiver.taken()]
    assert texts[0].startswith(f"*a-job* job.queued (`{first}`)\n")
    assert second in texts[1]
    with meshloom.Client(controller.url, TOKEN) as client:
        assert [webhook.id for webhook in client.webhooks.list()] == [made.id]
        client.webhooks.delete(made.id)
        assert client.webhooks.list() == ()


def test_no_line_of_a_message_for_slack_poses_as_another_event(
    controller: Controller, receiver: Receiver
) -> None:
    made = hooked(controller, receiver.url, kinds=["job.patched"], format="slack")
    job_id = submitted(controller, name="a-job")
    posing = "x\n*another-job* job.failed (`job_1`)\r\x1b[2J\u202e <!channel>"
    controller.client.patch(job_id, JobPatch(labels={"team": posing}))
    until(lambda: receiver.came)
    (text,) = [body["text"] for body in receiver.taken()]
    first, message = text.split("\n")
    assert first == f"*a-job* job.patched (`{job_id}`)"
    assert r"x\n*another-job* job.failed (`job_1`)\r\x1b[2J\u202e &lt;!channel&gt;" in message
    ask(controller, "DELETE", f"/webhooks/{made['id']}")


def test_a_receiver_that_is_gone_gets_nothing_more(
    controller: Controller, receiver: Receiver
) -> None:
    receiver.status = 410
    made = hooked(controller, receiver.url, kinds=["job.queued"])
    submitted(controller)

    def disabled() -> bool:
        (found,) = ask(controller, "GET", "/webhooks")["items"]
        return bool(found["disabled"])

    until(disabled)
    # Another webhook shows when the next event has been through.
    receiver.status = 200
    witness = hooked(controller, receiver.url, kinds=["job.queued"])
    submitted(controller)
    until(receiver.taken)
    owners = [headers["webhook-id"].split("_")[1] for _, headers, _ in receiver.came]
    assert owners == [hook["id"].partition("_")[2] for hook in (made, witness)]
    for hook in (made, witness):
        ask(controller, "DELETE", f"/webhooks/{hook['id']}")


def test_a_submitter_gets_events_of_own_jobs_and_sees_own_webhooks_alone(
    controller: Controller, receiver: Receiver
) -> None:
    tokens = {
        name: str(
            ask(controller, "POST", "/tokens", json={"subject": name, "scope": "submitter"})[
                "token"
            ]
        )
        for name in ("sam", "sue")
    }
    of_sam = hooked(controller, receiver.url, tokens["sam"], kinds=["job.queued"])
    assert of_sam["owner"] == "sam"
    submitted(controller, tokens["sue"])
    own = submitted(controller, tokens["sam"])
    until(receiver.taken)
    assert [body["data"]["job_id"] for body in receiver.taken()] == [own]
    assert ask(controller, "GET", "/webhooks", tokens["sue"])["items"] == []
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        ask(controller, "DELETE", f"/webhooks/{of_sam['id']}", tokens["sue"])
    for _ in range(9):
        hooked(controller, receiver.url, tokens["sam"])
    with pytest.raises(httpx.HTTPStatusError, match="409"):
        hooked(controller, receiver.url, tokens["sam"])
    for found in ask(controller, "GET", "/webhooks")["items"]:
        ask(controller, "DELETE", f"/webhooks/{found['id']}")


class _Stubborn:
    """A receiver that never takes one job's events, and keeps the ids of all others."""

    def __init__(self, refused: str) -> None:
        self.refused = refused
        self.taken: list[str] = []

    def check(self, url: str) -> None:
        """Any URL will do."""

    async def send(self, _url: str, _headers: Mapping[str, str], body: bytes) -> None:
        job_id = json.loads(body)["data"]["job_id"]
        if job_id == self.refused:
            raise DeliveryError("never")
        self.taken.append(job_id)


@pytest.mark.anyio
async def test_an_event_that_is_never_taken_is_given_up_and_the_next_ones_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhooks, "_GIVEN_UP_AFTER_S", 0)
    ticks = itertools.count(1_000)
    ports = memory_ports(MemoryServer(lambda: next(ticks), epoch=1))
    sender = _Stubborn("")
    made = await create_webhook(
        ports, sender, WebhookRequest(url=AnyHttpUrl("https://example.org")), LOCAL
    )
    jobs = [_job(1), _job(2)]
    for job in jobs:
        await ports.jobs.create(first_decision(job), Actor("test"), None)
    sender.refused = jobs[0].id
    loop = asyncio.create_task(webhooks.deliver_webhooks(ports, 1, sender))
    async with asyncio.timeout(60):
        while (await ports.webhooks.deliveries())[made.id].delivered < 1:  # noqa: ASYNC110 no event tells
            await asyncio.sleep(0.01)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    assert sender.taken == [jobs[1].id]
    known = (await ports.webhooks.deliveries())[made.id]
    assert (known.delivered, known.dropped, known.last_error) == (1, 1, None)


@pytest.mark.anyio
async def test_events_that_were_trimmed_before_they_were_sent_are_counted(redis_url: str) -> None:
    async with redis_ports(redis_url) as ports:
        epoch = await ports.leadership.take("a")
        assert epoch is not None
        sender = _Stubborn("")
        wanted = WebhookRequest(url=AnyHttpUrl("https://example.org"))
        await ports.jobs.create(first_decision(_job(1)), Actor("test"), None)
        made = await create_webhook(ports, sender, wanted, LOCAL)
        for number in (2, 3):
            await ports.jobs.create(first_decision(_job(number)), Actor("test"), None)
        with Redis.from_url(redis_url) as redis:
            redis.xtrim(keys.EVENT_FEED, maxlen=1, approximate=False)
        (webhook,) = await ports.webhooks.every()
        known = (await ports.webhooks.deliveries())[made.id]
        delivery = Delivery(ports, sender, epoch, webhook, known)
        ((entry, event),) = await delivery.batch()
        assert event is not None
        assert (event.job_id, entry.id) == (_job(3).id, await ports.events.newest())
        assert (await ports.webhooks.deliveries())[made.id].dropped == 1
        with pytest.raises(DeposedError):
            await Delivery(ports, sender, epoch + 1, webhook, known).delivered(entry)
        assert await ports.webhooks.remove(made.id)
        assert not await delivery.delivered(entry)


def _job(number: int) -> Job:
    return Job(id=new_job_id(number, bytes(10)), spec=spec(), created_ms=number, updated_ms=number)


def test_a_refused_address_is_a_fault_of_the_url(controller: Controller) -> None:
    with pytest.raises(RefusedError) as refused:
        controller.client.create_webhook(
            WebhookRequest(url=AnyHttpUrl("https://169.254.169.254/latest"))
        )
    (fault,) = refused.value.problem.errors
    assert (fault.pointer, fault.code) == ("/url", "address_refused")


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/hook",
        "https://user:word@example.org/hook",
        "https://example.org:0/",
        "https://127.0.0.1/",
        "https://10.0.0.8/",
        "https://[::1]/",
        "https://[::ffff:10.0.0.8]/",
        "https://[fe80::1]/",
        "https://100.64.0.1/",
        "https://[64:ff9b::a9fe:a9fe]/",
        "https://[::127.0.0.1]/",
        "https://168.63.129.16/",
        "https://192.88.99.1/",
        "https://[3fff::1]/",
        "https://[fec0::1]/",
        "https://[200::1]/",
        "https://[4000::1]/",
        "ftp://example.org/",
    ],
)
@pytest.mark.anyio
async def test_a_webhook_leads_to_public_addresses_over_tls_alone(url: str) -> None:
    async with HttpWebhooks() as sender:
        with pytest.raises(AddressRefusedError):
            sender.check(url)


@pytest.mark.anyio
async def test_a_name_that_resolves_to_a_private_address_is_refused_when_it_is_sent_to(
    receiver: Receiver,
) -> None:
    port = receiver.server_address[1]
    async with HttpWebhooks() as sender:
        sender.check(f"https://localhost:{port}/")  # a name, so far
        with pytest.raises(AddressRefusedError):
            await sender.send(f"https://localhost:{port}/", {}, b"{}")
    assert receiver.came == []
    async with HttpWebhooks(frozenset({"localhost"})) as sender:
        await sender.send(f"http://localhost:{port}/", {}, b"{}")
    assert receiver.came[0][1]["host"] == f"localhost:{port}"


@pytest.mark.anyio
async def test_names_whose_servers_do_not_answer_leave_the_threads_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()

    def look_up(*_: object, **__: object) -> object:
        over.wait()
        raise socket.gaierror("no server answered")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(http_webhooks, "_LOOK_UP_S", 0.01)
    monkeypatch.setattr(http_webhooks, "_LOOK_UPS_AT_ONCE", 40)
    try:
        async with HttpWebhooks() as sender, asyncio.timeout(60):
            for _ in range(40):
                with pytest.raises(DeliveryError, match=r"within 0\.01 s"):
                    await sender.send("https://slow.example/", {}, b"{}")
            # So are plans computed, archives checked and files read.
            assert await asyncio.to_thread(lambda: "done") == "done"
            with pytest.raises(DeliveryError, match="40 names"):
                await sender.send("https://slow.example/", {}, b"{}")
    finally:
        over.set()


@pytest.mark.anyio
async def test_a_url_that_cannot_be_sent_to_fails_its_own_deliveries_and_ends_no_term() -> None:
    ticks = itertools.count(1_000)
    ports = memory_ports(MemoryServer(lambda: next(ticks), epoch=1))
    async with HttpWebhooks() as sender:
        # A letter of which IDNA 2008 knows no name; browsers and the model of the URL do.
        wanted = WebhookRequest(url=AnyHttpUrl("https://\N{PILE OF POO}.invalid/"))
        made = await create_webhook(ports, sender, wanted, LOCAL)
        await ports.jobs.create(first_decision(_job(1)), Actor("test"), None)
        loop = asyncio.create_task(webhooks.deliver_webhooks(ports, 1, sender))
        async with asyncio.timeout(60):
            while (await ports.webhooks.deliveries())[made.id].last_error is None:
                await asyncio.sleep(0.01)
                assert not loop.done(), loop.exception()
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)


class _Broken(_Stubborn):
    """Raises what no sender may."""

    async def send(self, url: str, headers: Mapping[str, str], body: bytes) -> None:
        if json.loads(body)["data"]["job_id"] == self.refused:
            raise UnicodeError("no such letter")
        await super().send(url, headers, body)


@pytest.mark.anyio
async def test_a_fault_of_one_webhook_is_its_error_and_leaves_others_theirs() -> None:
    ticks = itertools.count(1_000)
    ports = memory_ports(MemoryServer(lambda: next(ticks), epoch=1))
    job = _job(1)
    sender = _Broken(job.id)
    wanted = WebhookRequest(url=AnyHttpUrl("https://example.org"))
    await create_webhook(ports, sender, wanted, LOCAL)
    await ports.jobs.create(first_decision(job), Actor("test"), None)
    (webhook,) = await ports.webhooks.every()
    known = (await ports.webhooks.deliveries())[webhook.id]
    delivery = Delivery(ports, sender, 1, webhook, known)
    ((_, event),) = await delivery.batch()
    assert event is not None
    with pytest.raises(DeliveryError, match="UnicodeError: no such letter"):
        await delivery.send(event)


@pytest.mark.anyio
async def test_an_answer_that_comes_byte_by_byte_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_webhooks, "_ANSWERED_WITHIN_S", 0.3)
    over = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        with contextlib.suppress(OSError):
            for letter in itertools.chain(b"HTTP/1.1 200 OK\r\n", itertools.repeat(ord("x"))):
                writer.write(bytes([letter]))
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        over.set()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with HttpWebhooks(frozenset({"127.0.0.1"})) as sender, asyncio.timeout(60):
        with pytest.raises(DeliveryError, match=r"no answer within 0\.3 s"):
            await sender.send(f"http://127.0.0.1:{port}/", {}, b"{}")
        await over.wait()
    server.close()


@pytest.mark.parametrize(
    "answer",
    [
        itertools.repeat(b"HTTP/1.1 100 \r\n\r\n" * 1000),
        itertools.repeat(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000),
        [b"SSH-2.0-OpenSSH_9 hunter2\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nhunter2 hunter2\r\n\r\n"],
        [b"HTTP/1.1 200 hunter2"],
    ],
    ids=["informational", "endless", "banner", "header", "half"],
)
@pytest.mark.anyio
async def test_of_an_answer_little_is_read_and_nothing_but_its_status_is_told(
    answer: Iterable[bytes],
) -> None:
    sent = 0

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readline()
        with contextlib.suppress(OSError):
            for part in answer:
                writer.write(part)
                await writer.drain()
                sent += len(part)
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, HttpWebhooks(frozenset({"127.0.0.1"})) as sender, asyncio.timeout(60):
        with pytest.raises(DeliveryError, match=r"did not answer in HTTP/1\.1") as failed:
            await sender.send(f"http://127.0.0.1:{port}/", {}, b"{}")
    assert "hunter2" not in str(failed.value)
    assert sent < 64 << 20  # what buffers of sockets take


class _Slow(_Stubborn):
    """Never answers one subject's webhooks."""

    def __init__(self) -> None:
        super().__init__("")
        self.asked = 0

    async def send(self, url: str, headers: Mapping[str, str], body: bytes) -> None:
        if "slow" in url:
            self.asked += 1
            await asyncio.Event().wait()
        await super().send(url, headers, body)


@pytest.mark.anyio
async def test_slow_receivers_of_some_subjects_leave_turns_to_others() -> None:
    ticks = itertools.count(1_000)
    ports = memory_ports(MemoryServer(lambda: next(ticks), epoch=1))
    sender = _Slow()
    for number in range(20):
        url = AnyHttpUrl(f"https://slow.example.org/{number}")
        subject = Principal(f"s{number // 10}", Scope.OPERATOR)
        await create_webhook(ports, sender, WebhookRequest(url=url), subject)
    wanted = WebhookRequest(url=AnyHttpUrl("https://example.org"))
    await create_webhook(ports, sender, wanted, LOCAL)
    await ports.jobs.create(first_decision(_job(1)), Actor("test"), None)
    loop = asyncio.create_task(webhooks.deliver_webhooks(ports, 1, sender))
    async with asyncio.timeout(60):
        while not sender.taken:  # noqa: ASYNC110 no event tells
            await asyncio.sleep(0.01)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    assert sender.asked == 8


@pytest.mark.anyio
async def test_a_redis_that_was_away_does_not_count_as_away_until_a_long_wait_is_over(
    redis_url: str,
) -> None:
    """Without webhooks and events the first wait after it came back held `/readyz` at 503 for ten seconds."""
    async with redis_ports(redis_url) as ports:
        feed, waits = ports.events, list[float]()

        class Watched:  # what is asked of the feed is noted
            read, newest = feed.read, feed.newest

            async def wait(self, after: str, timeout_s: float) -> None:
                waits.append(timeout_s)
                await feed.wait(after, timeout_s)

        troubles: dict[str, str] = {}
        watched = dataclasses.replace(ports, events=Watched())
        loop = asyncio.create_task(webhooks.deliver_webhooks(watched, 1, _Stubborn(""), troubles))
        try:
            with Redis.from_url(redis_url) as redis:
                async with asyncio.timeout(60):
                    while not waits:  # noqa: ASYNC110 no event tells
                        await asyncio.sleep(0.01)
                    while not troubles:
                        redis.client_kill_filter(_type="normal", skipme=True)
                        await asyncio.sleep(0.01)
                    away = len(waits)
                    while troubles:  # noqa: ASYNC110 as above
                        await asyncio.sleep(0.01)
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
    assert waits[0] == 10.0
    assert waits[away] < 1.0


class _Deaf(_Stubborn):
    """Passes over the word to end, as libraries do that wait for what is done in the same moment."""

    def __init__(self, *, takes: bool) -> None:
        super().__init__("")
        self.takes = takes
        self.asked = 0
        self.is_asked = asyncio.Event()
        self.is_asked_again = asyncio.Event()

    async def send(self, _url: str, _headers: Mapping[str, str], _body: bytes) -> None:
        self.asked += 1
        self.is_asked.set()
        if self.asked > 1:
            self.is_asked_again.set()
            await asyncio.Event().wait()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if not self.takes:
            raise DeliveryError("the receiver answered 500")


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.anyio
async def test_a_delivery_that_misses_the_word_to_end_is_not_waited_for_by_its_term(
    *, takes: bool
) -> None:
    """It went on for a day, and as long the controller whose term had ended took the lead no more."""
    ticks = itertools.count(1_000)
    ports = memory_ports(MemoryServer(lambda: next(ticks), epoch=1))
    wanted = WebhookRequest(url=AnyHttpUrl("https://example.org/a"))
    sender = _Deaf(takes=takes)
    await create_webhook(ports, sender, wanted, LOCAL)
    for number in range(2):
        await ports.jobs.create(first_decision(_job(number)), Actor("test"), None)
    loop = asyncio.create_task(webhooks.deliver_webhooks(ports, 1, sender))
    await sender.is_asked.wait()
    loop.cancel()
    again = asyncio.create_task(sender.is_asked_again.wait())
    await asyncio.wait([loop, again], return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    assert sender.asked == 1
    assert loop.cancelled()


@pytest.mark.anyio
async def test_one_that_is_removed_while_it_is_sent_stops_no_other() -> None:
    ticks = itertools.count(1_000)
    ports = memory_ports(MemoryServer(lambda: next(ticks), epoch=1))
    sender = _Slow()
    wanted = WebhookRequest(url=AnyHttpUrl("https://slow.example.org"))
    removed = await create_webhook(ports, sender, wanted, LOCAL)
    wanted = WebhookRequest(url=AnyHttpUrl("https://example.org"))
    await create_webhook(ports, sender, wanted, LOCAL)
    loop = asyncio.create_task(webhooks.deliver_webhooks(ports, 1, sender))
    async with asyncio.timeout(60):
        for number in range(1, 5):
            await ports.jobs.create(first_decision(_job(number)), Actor("test"), None)
            while len(sender.taken) < number or not sender.asked:
                await asyncio.sleep(0.01)
                assert not loop.done()
            if number == 1:
                await remove_webhook(ports, removed.id, LOCAL)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


@pytest.mark.anyio
async def test_of_webhooks_that_are_registered_at_once_no_more_are_kept_than_one_may_have(
    redis_url: str,
) -> None:
    server = MemoryServer(lambda: 1)
    async with redis_ports(redis_url) as kept:
        for ports in (kept, memory_ports(server)):
            wanted = WebhookRequest(url=AnyHttpUrl("https://example.org"))
            sender, sue = _Stubborn(""), Principal("sue", Scope.SUBMITTER)
            made = [create_webhook(ports, sender, wanted, sue) for _ in range(MOST_OF_ONE + 5)]
            answers = await asyncio.gather(*made, return_exceptions=True)
            assert sum(isinstance(one, StateConflictError) for one in answers) == 5
            assert len(await ports.webhooks.every()) == MOST_OF_ONE
            await create_webhook(ports, sender, wanted, LOCAL)
            assert len(await ports.webhooks.every()) == MOST_OF_ONE + 1
