"""Requests on a real connection to a server that answers as it is told."""

import gzip
import hashlib
import json
import pickle
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

import meshloom
from meshloom.client import ClientError, RefusedError, RestClient, UnreachableError, answers
from meshloom.client.downloads import PartialFile
from meshloom.client.settings import ClientSettings
from services.cli.app import app
from services.contract.api.queue import DrainRequest
from services.contract.api.views import Health, NodeList
from services.contract.storage.exports import ExportedFile
from services.contract.words.control_characters import harmless
from services.contract.words.problems import Problem
from tests.cli import views
from tests.e2e.conftest import free_port

Reply = tuple[int, dict[str, str], bytes]
VERSION = json.dumps({"version": "1", "api": "v1"}).encode()
BUSY: Reply = (503, {"Retry-After": "0"}, b"")


class _Server(ThreadingHTTPServer):
    """Answers with ``replies``, one after another, the last one again and again."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies: list[Reply] = []
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))
        replies = self.server.replies
        status, headers, body = replies.pop(0) if len(replies) > 1 else replies[0]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 named by the standard library

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[_Server]:
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_busy_controller_is_asked_again_until_patience_ends(server: _Server) -> None:
    server.replies = [BUSY, BUSY, (200, {}, VERSION)]
    with RestClient(server.url, patience_s=30) as client:
        assert client.version().version == "1"
    assert len(server.asked) == 3
    server.replies = [BUSY]
    with RestClient(server.url, patience_s=0) as client, pytest.raises(RefusedError, match="503"):
        client.version()
    assert len(server.asked) == 4


@pytest.mark.parametrize("words", ["tokens create al", "webhooks add https://example.org"])
def test_a_secret_that_is_no_controllers_moves_no_cursor(
    server: _Server, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    (token,), hook = views.tokens().items, views.webhooks().items[0]
    made = {**token.model_dump(mode="json"), "token": "a\x1b]0;b\x07"}
    if words.startswith("webhooks"):
        made = {**hook.model_dump(mode="json"), "secret": "a\x1b]0;b\x07"}
    server.replies = [(201, {}, json.dumps(made).encode())]
    monkeypatch.setenv("MESHLOOM_URL", server.url)
    said = CliRunner().invoke(app, words.split())
    assert (said.exit_code, said.stdout) == (0, "a\\x1b]0;b\\x07\n"), said.output


def test_nodes_are_those_of_all_pages(server: _Server) -> None:
    first, second = every = views.nodes().items
    pages = [
        NodeList(items=(first,), next_cursor="behind="),
        NodeList(items=(second,)),
    ]
    server.replies = [(200, {}, page.model_dump_json().encode()) for page in pages]
    with RestClient(server.url) as client:
        assert client.nodes() == NodeList(items=every)
    paths = [path for path, _ in server.asked]
    assert paths == ["/v1/nodes?limit=1000", "/v1/nodes?limit=1000&cursor=behind%3D"]


def test_an_answer_that_did_not_change_is_not_sent_again(server: _Server) -> None:
    server.replies = [(200, {"ETag": '"a"'}, VERSION), (304, {"ETag": '"a"'}, b"")]
    with RestClient(server.url) as client:
        first = client.version()
        assert client.version() is first
    assert "If-None-Match" not in server.asked[0][1]
    assert server.asked[1][1]["If-None-Match"] == '"a"'


def test_a_stream_that_breaks_goes_on_behind_the_last_entry(server: _Server) -> None:
    def frame(number: int) -> bytes:
        event = {
            "id": f"{number}-0",
            "at": "2026-01-01T00:00:00Z",
            "job_id": "job_00000000000000000000000000",
            "kind": "job.queued",
            "message": "",
            "actor": "local",
        }
        return f"id: {number}-0\ndata: {json.dumps(event)}\n\n".encode()

    stream = {"Content-Type": "text/event-stream"}
    end = b"event: end\ndata: {}\n\n"
    server.replies = [(200, stream, frame(1)), (200, stream, frame(2) + end)]
    with RestClient(server.url) as client:
        seen = [event.id for event in client.follow_events("job_00000000000000000000000000")]
    assert seen == ["1-0", "2-0"]
    assert [headers.get("Last-Event-ID") for _, headers in server.asked] == [None, "1-0"]


def test_a_stream_that_ends_at_once_is_asked_for_again_after_ever_longer_pauses(
    server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    stream = {"Content-Type": "text/event-stream"}
    server.replies = [(200, stream, b"")] * 7 + [(200, stream, b"event: end\ndata: {}\n\n")]
    with RestClient(server.url) as client:
        assert list(client.follow_events("job_00000000000000000000000000")) == []
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_a_stream_goes_on_once_the_store_of_the_controller_is_back(server: _Server) -> None:
    away = Problem(type="x", title="", status=503, code="store_unavailable", detail="")
    ready = Health(status="ok").model_dump_json().encode()
    stream = {"Content-Type": "text/event-stream"}
    end = b"event: end\ndata: {}\n\n"
    server.replies = [
        (200, stream, b""),
        (503, {}, away.model_dump_json().encode()),
        BUSY,
        (200, {}, ready),
        (200, stream, end),
    ]
    with RestClient(server.url, patience_s=30) as client:
        assert list(client.follow_events("job_00000000000000000000000000")) == []
    path = "/v1/jobs/job_00000000000000000000000000/events"
    assert [asked for asked, _ in server.asked] == [path, path, "/readyz", "/readyz", path]


@pytest.mark.parametrize(
    "reply",
    [
        (200, {}, b" " * 70_000),
        (500, {}, b" " * 70_000),
        (200, {"Content-Type": "text/event-stream"}, b"data: 1\n" * 9_000),
        (200, {"Content-Type": "text/event-stream"}, b"x" * 70_000),
    ],
)
def test_an_answer_longer_than_any_controllers_is_not_held(
    server: _Server, reply: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MOST_ANSWER_BYTES", 1 << 16)
    server.replies = [reply]
    with RestClient(server.url) as client:
        ask = (lambda: list(client.follow_all_events())) if reply[1] else client.nodes
        with pytest.raises(UnreachableError, match="which no controller does"):
            ask()
    assert len(server.asked) == 1


def test_a_packed_answer_that_nobody_asked_for_is_not_unpacked(server: _Server) -> None:
    server.replies = [(200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(1 << 26)))]
    tracemalloc.start()
    try:
        with RestClient(server.url) as client, pytest.raises(UnreachableError, match="no JSON"):
            client.nodes()
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()
    assert server.asked[0][1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("charset", ["idna", "undefined", "punycode", "utf-16", "hex"])
def test_a_stream_is_in_utf_8_whatever_it_says_of_itself(server: _Server, charset: str) -> None:
    stream = {"Content-Type": f"text/event-stream; charset={charset}"}
    server.replies = [(200, stream, ": \u00e9\n\nevent: end\ndata: {}\n\n".encode())]
    with RestClient(server.url) as client:
        assert list(client.follow_all_events()) == []


@pytest.mark.parametrize("said", ["t\u00e9", "\x01", "1 "])
def test_what_no_header_carries_is_not_sent_back_to_who_said_it(server: _Server, said: str) -> None:
    stream = {"Content-Type": "text/event-stream"}
    server.replies = [
        (200, stream, f"id: {said}\n\n".encode()),
        (200, stream, b"event: end\ndata: {}\n\n"),
    ]
    with RestClient(server.url) as client:
        assert list(client.follow_all_events()) == []
    assert ["Last-Event-ID" in headers for _, headers in server.asked] == [False, False]
    nodes = NodeList(items=()).model_dump_json().encode()
    server.replies = [(200, {"ETag": '"t\u00e9"'}, nodes)]
    with RestClient(server.url) as client:
        assert client.nodes() == client.nodes()


def test_what_is_no_stream_of_events_is_told_and_not_asked_for_again(server: _Server) -> None:
    server.replies = [(200, {"Content-Type": "text/html; charset=utf-8"}, b"<h1>Log in</h1>")]
    with (
        RestClient(server.url) as client,
        pytest.raises(UnreachableError, match=r"answered 200 with text/html.*MESHLOOM_URL"),
    ):
        next(client.follow_events("job_00000000000000000000000000"))
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ((302, {"Location": "/login"}, b""), "answered 302 Found"),
        ((304, {}, b""), "answered 304 Not Modified"),
        ((200, {"Content-Encoding": "gzip"}, b"no gzip"), "which is no JSON; set"),
        (
            (200, {"Content-Type": "text/html"}, b"<h1>Log in</h1>"),
            "with text/html, which is no JSON; set",
        ),
        ((200, {}, b'{"status": "ok"}'), r"cannot read as NodeList \(items: "),
    ],
)
def test_what_no_controller_answers_is_one_sentence(
    server: _Server, reply: Reply, told: str
) -> None:
    server.replies = [reply]
    with RestClient(server.url) as client, pytest.raises(ClientError, match=told):
        client.nodes()


@pytest.mark.parametrize("token", ["a phrase of words", " word"])
def test_a_token_may_have_blanks_as_the_controllers_may(server: _Server, token: str) -> None:
    server.replies = [(200, {}, NodeList(items=()).model_dump_json().encode())]
    with RestClient(server.url, token) as client:
        client.nodes()
    assert server.asked[0][1]["Authorization"] == f"Bearer {token}"


@pytest.mark.parametrize("token", ["hidden\n", "hidden ", "hidden\x01", "hidden\u00e9"])
def test_a_token_that_no_header_carries_is_refused_and_not_shown(
    server: _Server, token: str
) -> None:
    with pytest.raises(ClientError, match="look at MESHLOOM_TOKEN") as refused:
        RestClient(server.url, token)
    assert "hid" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "variables"),
    [
        ("http://\x1b", {}),
        ("http://[::1", {}),
        (f"http://{'a' * 70}.example", {}),
        ("http://127.0.0.1:1", {"ALL_PROXY": "socks9://x:y"}),
        ("http://127.0.0.1:1", {"ALL_PROXY": "socks9://x"}),
        ("http://127.0.0.1:1", {"ALL_PROXY": "http://127.0.0.1:1", "NO_PROXY": "[::1"}),
        ("http://127.0.0.1:1", {"SSL_CERT_FILE": "/nonexistent"}),
        ("http://127.0.0.1:1", {"SSL_CERT_FILE": "/etc/passwd"}),
    ],
)
def test_an_address_a_proxy_or_certificates_of_no_use_are_one_sentence(
    url: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(ClientError, match="look at MESHLOOM_URL"),
        RestClient(url, patience_s=0) as client,
    ):
        client.version()


def test_what_ranks_of_others_say_reaches_no_terminal_by_a_traceback(server: _Server) -> None:
    """Why a plan failed, a checkpoint is corrupt or a job ended stands in refusals."""
    said = "plan_1 failed: ValueError: \x1b]0;title\x07\x1b[2J\x9b31m\u202e\x7f; look there"
    problem = Problem(type="about:blank", title="", status=409, code="plan_failed", detail=said)
    server.replies = [(409, {}, problem.model_dump_json().encode())]
    with RestClient(server.url) as client, pytest.raises(RefusedError) as refused:
        client.nodes()
    shown = "".join(traceback.format_exception(refused.value))
    assert (
        r"plan_1 failed: ValueError: \x1b]0;title\x07\x1b[2J\x9b31m\u202e\x7f; look there" in shown
    )
    assert shown == harmless(shown)
    assert refused.value.problem.detail == said


def test_a_refusal_comes_out_of_another_process_as_it_was() -> None:
    """It was made again of its text, which failed: ``multiprocessing.Pool`` waited for its answer for ever."""
    problem = Problem(type="about:blank", title="x", status=409, code="state_conflict", detail="no")
    refused = pickle.loads(pickle.dumps(RefusedError(problem)))  # noqa: S301 our own
    assert (refused.problem, str(refused)) == (problem, "no")


def test_a_name_that_no_address_can_have_is_one_sentence(server: _Server) -> None:
    with RestClient(server.url) as client, pytest.raises(ClientError, match=r"x1b\[31m/drain"):
        client.drain("\x1b[31m", DrainRequest())
    assert server.asked == []


@pytest.mark.parametrize(
    "told", [b"data: {}\n\n", b"data: no JSON\n\n", b"event: refused\ndata: {}\n\n"]
)
def test_an_entry_of_a_stream_that_this_version_cannot_read_is_one_sentence(
    server: _Server, told: bytes
) -> None:
    server.replies = [(200, {"Content-Type": "text/event-stream"}, told)]
    with RestClient(server.url) as client, pytest.raises(ClientError, match="use the controller's"):
        list(client.follow_all_events())


def test_a_download_that_breaks_off_goes_on_where_it_stopped(
    server: _Server, tmp_path: Path
) -> None:
    content = bytes(range(256)) * 100
    digest = hashlib.sha256(content).hexdigest()
    file = PartialFile(
        tmp_path, ExportedFile(name="model.safetensors", bytes=len(content), sha256=digest)
    )
    # The server announces all of it, and ends the connection in the middle.
    server.replies = [
        (200, {"Content-Length": str(len(content))}, content[:10_000]),
        (200, {}, VERSION),
        (206, {}, content[10_000:]),
    ]
    with RestClient(server.url) as client:
        client.download("ckpt_x", "model.safetensors", file)
    assert file.finish().read_bytes() == content
    first, _, second = (headers for _, headers in server.asked)
    assert "Range" not in first
    assert (second["Range"], second["If-Range"]) == ("bytes=10000-", f'"{digest}"')


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ((200, {}, b"x" * 999), "shorter than the 1000 bytes"),
        ((200, {}, b"x" * 1_001), "longer than the 1000 bytes"),
        ((206, {}, b"x" * 600), "longer than the 1000 bytes"),
        ((200, {}, b""), "shorter than the 1000 bytes"),
        ((204, {}, b""), "answered 204"),
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), "answered 302"),
    ],
)
def test_a_download_of_another_length_ends_and_is_asked_for_twice_at_most(
    server: _Server, tmp_path: Path, reply: Reply, told: str
) -> None:
    server.replies = [reply]
    file = PartialFile(
        tmp_path, ExportedFile(name="model.safetensors", bytes=1_000, sha256="0" * 64)
    )
    with RestClient(server.url) as client, pytest.raises(ClientError, match=told):
        client.download("ckpt_x", "model.safetensors", file)
    assert len(server.asked) <= 2
    assert list(tmp_path.iterdir()) == []


def test_nobody_at_the_address_is_one_sentence_with_the_remedy() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with RestClient(url, patience_s=0) as client, pytest.raises(UnreachableError) as error:
        client.version()
    assert url in str(error.value)
    assert "MESHLOOM_URL" in str(error.value)


def test_where_the_controller_is_has_one_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "PORT", "TOKEN"):
        monkeypatch.delenv(f"MESHLOOM_{name}", raising=False)
    assert ClientSettings.from_environment().base_url == "http://127.0.0.1:8400"
    monkeypatch.setenv("MESHLOOM_PORT", "8401")
    monkeypatch.setenv("MESHLOOM_TOKEN", "")
    settings = ClientSettings.from_environment()
    assert (settings.base_url, settings.token) == ("http://127.0.0.1:8401", None)
    monkeypatch.setenv("MESHLOOM_URL", "https://controller.example.org/")
    assert ClientSettings.from_environment().base_url == "https://controller.example.org"
    for wrong in ("abc", "70000"):
        monkeypatch.setenv("MESHLOOM_PORT", wrong)
        with pytest.raises(ClientError, match=f"MESHLOOM_PORT: .*{wrong}"):
            meshloom.Client()


def test_the_token_of_the_environment_is_sent_to_the_controller_of_the_environment_alone(
    server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLOOM_TOKEN", "a-secret")
    monkeypatch.setenv("MESHLOOM_URL", server.url)
    server.replies = [(200, {}, VERSION)]
    makers: list[Callable[[], meshloom.Client]] = [
        meshloom.Client,
        lambda: meshloom.Client(server.url),
    ]
    for make in makers:
        with make() as client:
            client.version()
            assert "a-secret" not in repr(client)
    assert [headers.get("Authorization") for _, headers in server.asked] == [
        "Bearer a-secret",
        None,
    ]
