"""The controller as a process: how it starts, how it ends, and what a kill costs."""

import contextlib
import json
import os
import resource
import secrets
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from pydantic import ValidationError
from redis import Redis

from services.contract.redis import redis_keys as keys
from services.contract.words.error_values import setting_faults
from services.controller.settings import Settings
from services.local.embedded_redis import EmbeddedRedis
from services.local.settings import child_environment
from tests.controller.agent_double import AgentDouble
from tests.controller.conftest import job_body
from tests.waiting import until

pytestmark = [pytest.mark.redis, pytest.mark.system]
COMMAND = [sys.executable, "-m", "services.controller"]


def environment(redis_url: str | None, **settings: str) -> dict[str, str]:
    bare = {k: v for k, v in child_environment().items() if not k.startswith("MESHLOOM_")}
    given = {} if redis_url is None else {"MESHLOOM_REDIS_URL": redis_url}
    return bare | given | {f"MESHLOOM_{name.upper()}": text for name, text in settings.items()}


@dataclass
class Controller:
    """A controller process and its log so far."""

    process: subprocess.Popen[str]
    lines: list[dict[str, object]]
    client: httpx2.Client

    def said(self, event: str) -> bool:
        return any(line["event"] == event for line in self.lines)

    def state(self, job_id: str) -> str:
        return str(self.client.get(f"/v1/jobs/{job_id}").json()["state"])


@contextlib.contextmanager
def started(redis_url: str, **settings: str) -> Iterator[Controller]:
    """A controller on any free port, until the block ends."""
    process = subprocess.Popen(
        COMMAND, env=environment(redis_url, port="0", **settings), stderr=subprocess.PIPE, text=True
    )
    lines: list[dict[str, object]] = []

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(json.loads(line))  # noqa: PERF401 each line is seen as it comes

    def url_said() -> str | None:
        assert process.poll() is None, lines
        return next((str(line["url"]) for line in lines if line["event"] == "listening"), None)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        url = until(url_said)
        with httpx2.Client(base_url=url, timeout=10) as client:
            yield Controller(process, lines, client)
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


def test_a_controller_that_others_can_reach_wants_a_token() -> None:
    ended = subprocess.run(
        COMMAND,
        env=environment("redis://127.0.0.1:1", host="0.0.0.0"),  # noqa: S104 that is refused
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "MESHLOOM_TOKEN" in line


@pytest.mark.parametrize("make", [secrets.token_hex, secrets.token_urlsafe])
def test_128_random_bits_are_enough_of_a_token(make: Callable[[int], str]) -> None:
    token = make(16)
    settings = {"redis_url": "redis://x", "host": "meshloom.example", "token": token + token[:1]}
    assert Settings.model_validate(settings).token is not None
    assert Settings.model_validate(settings | {"host": "127.0.0.1", "token": "a"}).is_loopback


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"host": "meshloom.example", "token": None}, "MESHLOOM_TOKEN"),
        ({"token": ""}, "MESHLOOM_TOKEN"),
        ({"host": "0.0.0.0", "token": "a"}, "128 bits"),  # noqa: S104 refused
        ({"host": "::", "token": "0123456789abcdef" + "0123456789abcd"}, "128 bits"),
        ({"host": "0.0.0.0", "token": "a" * 100}, "openssl"),  # noqa: S104 refused
        ({"host": "0.0.0.0", "token": "0123456789" * 8}, "repeat the first 10, at most 33"),  # noqa: S104 refused
        ({"host": "::", "token": ("correct-horse" * 4)[:-3]}, "repeat the first 13, at most 78"),
        ({"host": "::", "token": "0123456789abcdef" * 2}, "repeat the first 16, at most 64"),
        ({"telemetry_secret": "abcdefghij" * 9}, "MESHLOOM_TELEMETRY_SECRET can be guessed"),
        ({"telemetry_secret": "0" * 64}, "MESHLOOM_TELEMETRY_SECRET can be guessed"),
        ({"telemetry_secret": ""}, "MESHLOOM_TELEMETRY_SECRET"),
        ({"port": "high"}, "MESHLOOM_PORT"),
        ({"log_level": "loud"}, "MESHLOOM_LOG_LEVEL"),
    ],
)
def test_wrong_settings_are_told_in_one_line(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings.model_validate({"redis_url": "redis://x", **settings})
    told = "; ".join(setting_faults(refused.value))
    assert word in told
    assert "\n" not in told
    for host in ("::1", "localhost", "127.0.0.2"):
        assert Settings.model_validate({"redis_url": "redis://x", "host": host}).is_loopback


def test_a_missing_redis_url_is_named() -> None:
    ended = subprocess.run(
        COMMAND, env=environment(None), capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 2
    assert "MESHLOOM_REDIS_URL" in ended.stderr


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            COMMAND,
            env=environment("redis://127.0.0.1:1", port=port),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert port in line
    assert "MESHLOOM_PORT" in line


def test_a_controller_ends_at_once_although_streams_are_open(redis_url: str) -> None:
    with started(redis_url) as controller, Redis.from_url(redis_url) as redis:
        until(lambda: redis.exists(keys.LEADER))
        job_id = controller.client.post("/v1/jobs", json=job_body()).json()["id"]
        headers = {"Accept": "text/event-stream"}
        with controller.client.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as sse:
            told = sse.iter_lines()
            assert next(line for line in told if line.startswith("data:"))
            controller.process.send_signal(signal.SIGTERM)
            assert controller.process.wait(20) == 0
        assert not redis.exists(keys.LEADER)


def test_a_stream_tells_what_happens_as_it_happens(redis_url: str) -> None:
    with started(redis_url) as controller, Redis.from_url(redis_url, decode_responses=True) as r:
        job_id = controller.client.post("/v1/jobs", json=job_body()).json()["id"]
        headers = {"Accept": "text/event-stream"}
        path = f"/v1/jobs/{job_id}/events"
        with controller.client.stream("GET", path, headers=headers) as sse:
            told = (json.loads(x[5:]) for x in sse.iter_lines() if x.startswith("data:"))
            assert next(told)["kind"] == "job.queued"
            AgentDouble(r).join()
            assert next(told)["kind"] == "job.placing"
            controller.client.post(f"/v1/jobs/{job_id}/kill")
            assert next(told)["kind"] == "job.cancelling"


def test_connections_that_come_at_one_moment_take_no_descriptors_but_their_own(
    redis_url: str,
) -> None:
    with started(redis_url, max_connections="8") as controller, contextlib.ExitStack() as stack:
        pid, address = controller.process.pid, controller.client.base_url
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (300, 300))
        until(lambda: controller.said("leading"))
        os.kill(pid, signal.SIGSTOP)  # all of them wait for it
        place = address.host, address.port or 0
        for _ in range(400):
            stack.enter_context(socket.create_connection(place, timeout=10))
        os.kill(pid, signal.SIGCONT)
        assert controller.client.get("/v1/jobs").is_success
        assert [line["event"] for line in controller.lines if line["level"] == "error"] == []


def test_a_controller_uses_as_many_descriptors_as_it_may_have(redis_url: str) -> None:
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (few, most))
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, most))
        controller = stack.enter_context(started(redis_url))
        assert resource.prlimit(controller.process.pid, resource.RLIMIT_NOFILE) == (most, most)


def test_a_killed_controller_loses_nothing(redis_url: str) -> None:
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        agent = AgentDouble(redis)
        agent.join()
        with started(redis_url) as first:
            job_id = first.client.post("/v1/jobs", json=job_body()).json()["id"]
            gang = agent.launches(job_id)
            agent.trains(gang, range(1, 6))
            until(lambda: first.state(job_id) == "RUNNING", every_s=0.01)
            os.kill(first.process.pid, signal.SIGKILL)
            first.process.wait()
        name = agent.votes(gang, 10)
        with started(redis_url) as second:
            assert second.state(job_id) == "RUNNING"
            waiting = second.client.post("/v1/jobs", json=job_body(resources={"ranks": 4}))
            assert agent.saves(gang, 10) == name
            agent.ends(gang, 10)
            until(lambda: second.state(job_id) == "SUCCEEDED")
            assert second.client.get(f"/v1/jobs/{job_id}").json()["attempt"] == 1
            agent.launches(waiting.json()["id"])
            launches = [c.kind for c in agent.commands()].count("launch_gang")
            assert launches == 2


def test_requests_with_ever_so_many_faults_cost_the_controller_no_term(redis_url: str) -> None:
    """Its lease lasts four seconds; one request with 110 000 unknown fields took as long."""
    many = {f"{number:x}": 0 for number in range(110_000)}
    some = dict(list(many.items())[:6_000])
    labels = {f"[{number}]": "" for number in range(5_000)}
    bodies = [job_body(**many), job_body(**some), job_body(labels=labels), {"spec": some}]
    with started(redis_url) as controller:
        until(lambda: controller.said("leading"))

        def ask(number: int) -> int:
            body = bodies[number % len(bodies)]
            path = ("/v1/jobs", "/v1/plans")[number % 2]
            return httpx2.post(
                f"{controller.client.base_url}{path}", json=body, timeout=60
            ).status_code

        with ThreadPoolExecutor(16) as hands:
            answers = set(hands.map(ask, range(48)))
        assert answers <= {413, 422, 429}, answers
        assert not controller.said("no_longer_leading")
        with Redis.from_url(redis_url, decode_responses=True) as redis:
            assert redis.get(keys.EPOCH) == "1"
        assert controller.client.post("/v1/jobs", json=job_body()).status_code == 201


def test_the_loops_bear_redis_being_away(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with EmbeddedRedis.start(tmp_path) as server:
            url = server.url
            controller = stack.enter_context(started(url))
            job_id = controller.client.post("/v1/jobs", json=job_body()).json()["id"]
            until(lambda: controller.client.get("/readyz").status_code == 200)
        answer = until(lambda: unready(controller))
        assert answer.headers["retry-after"] == "1"
        refused = controller.client.get("/v1/jobs")
        assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
        assert controller.client.get("/healthz").status_code == 200
        address = urlsplit(url).path
        until(
            lambda: any(
                address in str(line["error"])
                for line in controller.lines
                if line["event"] == "store_unavailable"
            )
        )
        for path in ("/readyz", "/metrics", "/v1/jobs", "/v1/nodes"):
            told = controller.client.get(path)
            assert "Redis does not answer" in told.text
            assert address not in told.text
        with (
            EmbeddedRedis.start(tmp_path) as server,
            Redis.from_url(server.url, decode_responses=True) as redis,
        ):
            assert server.url == url
            agent = AgentDouble(redis)
            agent.join()
            agent.launches(job_id)
            until(lambda: controller.state(job_id) == "STARTING")
            until(lambda: controller.client.get("/readyz").status_code == 200)
            warnings = [line for line in controller.lines if line["event"] == "store_unavailable"]
            assert len(warnings) <= 4  # once a loop: leader, facts, reconciler, webhooks


class _NoRedis(socketserver.BaseRequestHandler):
    """Answers all as a proxy does that speaks HTTP and has lost its server."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while self.request.recv(65_536):
                self.request.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")


def test_a_controller_bears_what_answers_in_redis_place_and_is_no_redis() -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _NoRedis) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with started(f"redis://127.0.0.1:{server.server_address[1]}") as controller:
                answer = until(lambda: unready(controller))
                assert "Redis does not answer" in answer.text
                until(
                    lambda: any(
                        "protocol error" in str(x.get("error")).lower() for x in controller.lines
                    )
                )
                assert controller.client.get("/v1/jobs").status_code == 503
                assert controller.process.poll() is None
        finally:
            server.shutdown()


def _full(redis: Redis, _folder: Path) -> None:
    redis.config_set("maxmemory", "1")


def _forbidden(redis: Redis, _folder: Path) -> None:
    redis.acl_setuser("default", enabled=True, commands=["-@all", "+auth"])


def _replica(redis: Redis, _folder: Path) -> None:
    redis.replicaof("127.0.0.1", "1")


def _replica_without_primary(redis: Redis, _folder: Path) -> None:
    redis.config_set("replica-serve-stale-data", "no")
    redis.replicaof("127.0.0.1", "1")


def _unsaved(redis: Redis, folder: Path) -> None:
    (folder / "dump.rdb").mkdir()
    redis.config_set("save", "3600 1")
    redis.bgsave()


def _repair(redis: Redis) -> None:
    redis.acl_setuser("default", enabled=True, commands=["+@all"])
    redis.replicaof("NO", "ONE")
    redis.config_set("maxmemory", "0")
    redis.config_set("save", "")


@pytest.mark.parametrize(
    ("refuse", "words", "reads"),
    [
        (_full, "maxmemory", 503),
        (_forbidden, "ACL", 503),
        (_replica, "replica", 200),
        (_replica_without_primary, "replica", 503),
        (_unsaved, "free its disk", 200),
    ],
)
def test_a_redis_that_refuses_is_waited_for_and_the_reason_is_told(
    tmp_path: Path, refuse: Callable[[Redis, Path], None], words: str, reads: int
) -> None:
    with EmbeddedRedis.start(tmp_path) as server, started(server.url) as controller:
        with Redis.from_url(server.url) as owner:
            owner.execute_command("ACL", "SETUSER", "test", "on", ">test", "~*", "&*", "+@all")
        url = f"unix://test:test@{server.url.rpartition('@')[2]}"
        with Redis.from_url(url, decode_responses=True) as redis:
            agent = AgentDouble(redis)
            agent.join()
            job_id = controller.client.post("/v1/jobs", json=job_body()).json()["id"]
            agent.trains(agent.launches(job_id), [1])
            until(lambda: controller.state(job_id) == "RUNNING")
            refuse(redis, tmp_path)
            until(lambda: is_unready_for(words, controller))
            refused = controller.client.post("/v1/jobs", json=job_body())
            assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
            assert words in refused.json()["detail"]
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.headers["retry-after"] == "1"
            assert controller.client.get(f"/v1/jobs/{job_id}").status_code == reads
            until(lambda: controller.said("no_longer_leading"))
            _repair(redis)
            later = until(
                lambda: controller.client.post("/v1/jobs", json=job_body()).json().get("id")
            )
            agent.launches(later)
            until(lambda: controller.client.get("/readyz").status_code == 200)
            job = controller.client.get(f"/v1/jobs/{job_id}").json()
            assert (job["state"], job["attempt"]) == ("RUNNING", 1)
            failed = [line for line in controller.lines if line["event"] == "term_failed"]
            assert failed == []


def test_a_controller_whose_loops_have_died_ends_with_an_error(redis_url: str) -> None:
    with started(redis_url) as controller, Redis.from_url(redis_url) as redis:
        redis.set(keys.EPOCH, (1 << 63) - 1)  # no refusal that is known: it cannot be added to
        redis.delete(keys.LEADER)
        assert controller.process.wait(timeout=60) == 1
        until(lambda: controller.said("leader_died"))  # its last words are read as they come


def test_commands_that_redis_forbids_singly_are_told_and_end_no_term(redis_url: str) -> None:
    with (
        started(redis_url) as controller,
        Redis.from_url(redis_url, decode_responses=True) as owner,
    ):
        owner.execute_command("ACL", "SETUSER", "test", "on", ">test", "~*", "&*", "+@all")
        url = f"unix://test:test@{redis_url.rpartition('@')[2]}"
        until(lambda: owner.exists(keys.LEADER))
        with Redis.from_url(url, decode_responses=True) as redis:
            try:
                # Within scripts, within transactions, at the begin of both.
                for command in ("publish", "xadd", "time", "multi", "smembers", "evalsha"):
                    redis.acl_setuser("default", enabled=True, commands=[f"-{command}"])
                    refused = controller.client.post("/v1/jobs", json=job_body())
                    assert (refused.status_code, refused.json()["code"]) == (
                        503,
                        "store_unavailable",
                    ), command
                    assert "ACL" in refused.json()["detail"]
                    redis.acl_setuser("default", enabled=True, commands=["+@all"])
            finally:
                redis.acl_setuser("default", enabled=True, commands=["+@all"])
                redis.acl_deluser("test")
        until(lambda: controller.client.post("/v1/jobs", json=job_body()).status_code == 201)
        for word in ("request_failed", "term_failed", "leader_died"):
            assert not controller.said(word), word


@pytest.mark.parametrize(
    ("command", "path"),
    [("hmget", "/v1/jobs"), ("memory", "/v1/jobs"), ("exec", "/v1/capacity")],
)
def test_a_list_that_redis_forbids_in_part_is_refused_with_the_reason(
    redis_url: str, command: str, path: str
) -> None:
    with (
        started(redis_url) as controller,
        Redis.from_url(redis_url, decode_responses=True) as owner,
    ):
        agent = AgentDouble(owner)
        agent.join()
        job_id = controller.client.post("/v1/jobs", json=job_body()).json()["id"]
        agent.trains(agent.launches(job_id), [1])
        until(lambda: controller.state(job_id) == "RUNNING")
        owner.execute_command("ACL", "SETUSER", "default", f"-{command}")
        try:
            refused = controller.client.get(path)
        finally:
            owner.execute_command("ACL", "SETUSER", "default", "+@all")
        assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
        assert "ACL" in refused.json()["detail"]
        assert not controller.said("request_failed")


def test_what_a_loop_alone_is_forbidden_is_told_by_readyz(redis_url: str) -> None:
    with (
        started(redis_url) as controller,
        Redis.from_url(redis_url, decode_responses=True) as owner,
    ):
        owner.execute_command("ACL", "SETUSER", "test", "on", ">test", "~*", "&*", "+@all")
        url = f"unix://test:test@{redis_url.rpartition('@')[2]}"
        until(lambda: owner.exists(keys.LEADER))
        with Redis.from_url(url, decode_responses=True) as redis:
            try:
                for command in ("hgetall", "blmove", "zrangebyscore"):
                    redis.acl_setuser("default", enabled=True, commands=[f"-{command}"])
                    if command == "zrangebyscore":  # a new term looks for unused code at once
                        redis.delete(keys.LEADER)
                    until(lambda: is_unready_for("ACL", controller))
                    redis.acl_setuser("default", enabled=True, commands=["+@all"])
                    until(lambda: controller.client.get("/readyz").status_code == 200)
            finally:
                redis.acl_setuser("default", enabled=True, commands=["+@all"])
                redis.acl_deluser("test")


def test_the_loops_bear_a_disk_so_full_that_redis_ends(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with EmbeddedRedis.start(tmp_path) as server:
            controller = stack.enter_context(started(server.url))
            job_id = controller.client.post("/v1/jobs", json=job_body()).json()["id"]
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1, 1))
            answer = controller.client.post("/v1/jobs", json=job_body())
            assert answer.json()["code"] == "store_unavailable"
            assert server.process.wait(60) != 0
        with (
            EmbeddedRedis.start(tmp_path) as server,
            Redis.from_url(server.url, decode_responses=True) as redis,
        ):
            agent = AgentDouble(redis)
            agent.join()
            agent.launches(job_id)


def is_unready_for(words: str, controller: Controller) -> bool:
    """Whether it says so of Redis."""
    answer = unready(controller)
    return answer is not None and words in answer.json()["checks"]["redis"]


def unready(controller: Controller) -> httpx2.Response | None:
    answer = controller.client.get("/readyz")
    return answer if answer.status_code == 503 else None
