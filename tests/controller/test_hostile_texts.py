"""What jobs, nodes and strangers write is shown by every command as it is, and does nothing else.

The controller is real; its data hold markup, sequences that terminals obey, and brackets of errors.
"""

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis import Redis
from rich.text import Text
from ruamel.yaml import YAML

import meshloom
from meshloom.client import RestClient as Client
from services.cli.__main__ import main
from services.cli.follow import follow
from services.cli.terminal import Terminal, console
from services.contract.messages.facts import CheckpointCorrupt, Inventory, NodeJoined
from services.contract.messages.probing import NodeMeasured, ProbeFailure
from services.contract.messages.telemetry import MetricRecord, RankSample
from services.contract.redis import redis_keys as keys
from services.contract.words.control_characters import harmless, one_line
from services.local.embedded_redis import EmbeddedRedis
from tests.cli.tree import GROUPS, leaves
from tests.controller.agent_double import AgentDouble
from tests.controller.conftest import job_body
from tests.controller.test_process import Controller, started
from tests.waiting import until

pytestmark = pytest.mark.redis
BOOTSTRAP = "the-operators-own-token"
EVIL = (
    "[/nope][link=https://evil.example]here[/link][black on black]gone[/] :smile:"
    "\x1b]0;title\x07\x9b31m\u202e\r\nFORGED by a further line"
)
SHOWN = "[/nope][link=https://evil.example]here[/link][black on black]gone[/] :smile:"


@dataclass(frozen=True)
class Place:
    """A controller full of hostile texts; the names are what commands are given."""

    controller: Controller
    names: dict[str, str]


def _hostile_rank(redis: Redis, job_id: str) -> None:
    sample = RankSample(
        rank=0, local_rank=0, fence=1, node_id="loom-1", device=EVIL, pid=1, phase=EVIL, unit=EVIL, step=3
    )  # fmt: skip
    redis.hset(keys.job_ranks(job_id), "0", sample.model_dump_json())


def _raised(controller: Controller, agent: AgentDouble, spec: dict[str, object]) -> str:
    """A job that failed with a hostile exception."""
    job_id = str(controller.client.post("/v1/jobs", json=spec).json()["id"])
    gang = agent.launches(job_id)
    agent.trains(gang, [1])
    agent.ends(gang, 1, exit_code=1, error=f"ValueError: {EVIL}", traceback=EVIL, phase="FORWARD")
    until(lambda: controller.state(job_id) == "FAILED")
    return job_id


def _fill(controller: Controller, redis: Redis, folder: Path) -> dict[str, str]:
    client = controller.client
    agent = AgentDouble(redis)
    agent.join()
    until(lambda: client.get("/v1/nodes").json()["items"])
    once = job_body(name="once", resources={"ranks": 1}, faults={"max_restarts": 0})

    failed = str(client.post("/v1/jobs", json=once).json()["id"])
    gang = agent.launches(failed)
    agent.trains(gang, [1, 2, 3])
    checkpoint = agent.saves(gang, 3)
    _hostile_rank(redis, failed)
    agent.tells_metrics(gang, MetricRecord(step=2, fence=1, values={EVIL: 1.0, "[/nope]": 2.0}))
    agent.writes(gang, 0, f"{EVIL}\n[1] not of rank 1")
    agent.tell(
        CheckpointCorrupt(
            job_id=failed, fence=1, node_id="loom-1", checkpoint_id=checkpoint, file=EVIL, reason=EVIL
        )
    )  # fmt: skip
    agent.ends(
        gang, 3, exit_code=1, error=f"ValueError: {EVIL}", traceback=f"a line\n{EVIL}", phase="FORWARD"
    )  # fmt: skip
    until(lambda: controller.state(failed) == "FAILED")

    raised = _raised(controller, agent, once)
    spec = job_body(plan="auto")
    (folder / "[spec].yaml").write_text(json.dumps(spec))
    (folder / "script.py").write_text(f"parser.add_argument({EVIL!r})")
    (folder / "bad.yaml").write_text(json.dumps(spec | {EVIL: 1}))
    drawn = client.post("/v1/plans", json=spec).json()
    failure = ProbeFailure(code="raised", reason=EVIL, traceback=EVIL)
    agent.fails_to_profile(agent.is_asked(), failure)
    plan = str(drawn["id"])
    until(lambda: client.get(f"/v1/plans/{plan}").json()["state"] == "FAILED")

    running = str(client.post("/v1/jobs", json=once).json()["id"])
    agent.trains(agent.launches(running), [1])
    _hostile_rank(redis, running)
    until(lambda: controller.state(running) == "RUNNING")
    waiting = str(client.post("/v1/jobs", json=job_body(resources={"ranks": 4})).json()["id"])

    inventory = Inventory(
        hostname=EVIL, cpu_slots=4, cpu_count=8, memory_bytes=1 << 34, versions={EVIL: EVIL}
    )
    agent.tell(NodeJoined(node_id="loom-1", incarnation="life-1", number=1, inventory=inventory))
    agent.tell(
        NodeMeasured(node_id="loom-1", incarnation="life-1", device_type="cpu", failure=EVIL)
    )
    until(lambda: EVIL in client.get("/v1/nodes/loom-1").json()["inventory"]["hostname"])
    until(lambda: client.get("/v1/nodes/loom-1").json()["measured"])
    label = f"{SHOWN}\x9b31m\u202e"
    client.post("/v1/tokens", json={"subject": "sam", "scope": "viewer", "label": label})
    stranger = {"Authorization": ""}
    path = "/v1/%5B/nope%5D%5Blink=x%5D%1b%5D0;title%07%0a2026-01-01 00:00:00  boss"
    assert client.get(path, headers=stranger).status_code == 401
    return {
        "failed": failed,
        "raised": raised,
        "running": running,
        "waiting": waiting,
        "ckpt": checkpoint,
        "plan": plan,
        "spec": str(folder / "[spec].yaml"),
        "bad": str(folder / "bad.yaml"),
        "script": str(folder / "script.py"),
    }


@pytest.fixture(scope="module")
def place(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    redis_server.flush()
    with (
        started(redis_server.url, token=BOOTSTRAP) as controller,
        Redis.from_url(redis_server.url, decode_responses=True) as redis,
    ):
        controller.client.headers["Authorization"] = f"Bearer {BOOTSTRAP}"
        yield Place(controller, _fill(controller, redis, tmp_path_factory.mktemp("specs")))


Typed = Callable[..., tuple[int, str]]


@pytest.fixture
def typed(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Typed]:
    """A command as a person types it: its exit code, and all that it wrote."""
    before = signal.getsignal(signal.SIGTERM)

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["meshloom", *(w.format(**place.names) for w in words)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + said.err

    monkeypatch.setenv("MESHLOOM_URL", str(place.controller.client.base_url))
    monkeypatch.setenv("MESHLOOM_TOKEN", BOOTSTRAP)
    monkeypatch.setattr(console, "_width", 1000)
    yield call
    signal.signal(signal.SIGTERM, before)


# What is typed, how it ends, and whether it shows the hostile text; in this order, for some change what others need.
READING = [
    ("status {failed}", 0, True),
    ("ls", 0, False),
    ("ranks {running}", 0, True),
    ("events {failed}", 0, True),
    ("logs {failed}", 0, True),
    ("logs --timestamps --tail 3 --grep nope {failed}", 0, True),
    ("metrics {failed}", 0, True),
    ("metrics --name [/nope] {failed}", 0, True),
    ("compare {failed} {running}", 0, True),
    ("attempts {failed}", 0, False),
    ("diagnose --last {failed}", 0, True),
    ("checkpoints {failed}", 0, False),
    ("plans", 0, True),
    ("plans {plan}", 0, True),
    ("nodes", 0, False),
    ("nodes loom-1", 0, True),
    ("top --once", 0, False),
    ("queue", 0, False),
    ("capacity", 0, False),
    ("pools", 0, False),
    ("doctor", 0, False),
    ("tokens ls", 0, True),
    ("audit", 0, True),
    ("wait {failed}", 1, False),
    ("watch {failed}", 1, True),
    ("submit --dry-run {spec}", 0, False),
]
CHANGING = [
    ("status -f {failed}", 1, True),
    ("logs -f {failed}", 0, True),
    ("logs -f --tail 1 {failed}", 0, True),
    ("metrics --csv {failed}", 0, True),
    ("diagnose {failed}", 0, True),
    ("diagnose --last --stacks {failed}", 0, True),
    ("nodes --measured", 0, True),
    ("verify --no-wait {ckpt}", 1, True),
    ("export --no-wait {ckpt}", 2, False),
    ("pin {ckpt}", 0, True),
    ("unpin {ckpt}", 0, True),
    ("rm-checkpoint {ckpt}", 0, True),
    ("plan {bad}", 2, False),
    ("submit {bad}", 2, False),
    ("submit --plan-id {plan}", 2, True),
    ("submit {spec}", 0, False),
    ("init [/nope]/job.yaml --yes", 2, True),
    ("init {spec}.new --yes", 0, False),
    ("init {spec}.newer --from-script {script} --name a", 0, False),
    ("patch {waiting} --label a=[/nope]", 0, False),
    ("clone {failed} --set name=[/nope]", 2, False),
    ("clone {failed}", 0, False),
    ("profile {waiting}", 2, False),
    ("wait {running} --timeout 0", 124, False),
    ("pause {waiting}", 0, False),
    ("wait {waiting}", 5, False),
    ("resume {waiting}", 0, False),
    ("cancel {waiting}", 0, False),
    ("wait {waiting}", 4, False),
    ("drain loom-1", 0, False),
    ("undrain loom-1", 0, False),
    ("forget loom-1", 2, False),
    ("forget [/nope]", 2, False),
    ("tokens create al --label [/nope]", 0, False),
    ("tokens revoke [/nope]", 2, False),
    ("webhooks add https://example.org/[/nope]", 0, False),
    ("webhooks ls", 0, False),
    ("webhooks remove [/nope]", 2, False),
    ("kill {running}", 0, False),
    ("delete {waiting}", 0, False),
    ("data tokenize [/nope] --out x", 2, True),
]


@pytest.mark.parametrize(("words", "code", "shows"), [*READING, *CHANGING])
def test_a_command_shows_hostile_texts_and_obeys_none(
    typed: Typed,
    words: str,
    code: int,
    shows: bool,  # noqa: FBT001 a case's expectation
) -> None:
    ended, said = typed(*words.split())
    _is_harmless(said)
    assert ended == code, said
    assert ("[/nope]" in said) or not shows, said


@pytest.mark.parametrize(("words", "code", "_shows"), READING)
def test_every_answer_is_json_and_yaml_too_and_fits_a_terminal(
    typed: Typed,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    code: int,
    _shows: bool,  # noqa: FBT001 a case's expectation, of the other test
) -> None:
    ended, as_json = typed(*words.split(), "--json")
    assert ended == code, as_json
    if words.startswith("logs"):
        documents = [json.loads(line) for line in as_json.splitlines()]
    else:
        documents = [json.loads(as_json)]
    assert documents
    assert as_json.isascii()
    ended, as_yaml = typed(*words.split(), "-o", "yaml")
    _is_harmless(as_yaml)
    read = list(YAML(typ="safe").load_all(as_yaml))
    assert list(map(_shape, read)) == list(map(_shape, documents))
    monkeypatch.setattr(console, "_width", 60)
    _is_harmless(typed(*words.split())[1])


def test_every_command_is_tried() -> None:
    tried = {tuple(words.split()[: 1 + (words.split()[0] in GROUPS)]) for words, *_ in [*READING, *CHANGING]}  # fmt: skip
    assert tried == {leaf.words for leaf in leaves()}


def _is_harmless(said: str) -> None:
    assert said == harmless(said).replace("\r", ""), "a control character reached the terminal"
    assert said.isascii() or "\u202e" not in said
    assert not re.search("^FORGED", said, re.MULTILINE), "a text poses as what the command says"


def _shape(answer: object) -> object:
    """An answer without its numbers and times, which differ from one request to the next."""
    if isinstance(answer, dict):
        return {name: _shape(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [_shape(each) for each in answer]
    return EVIL in answer if isinstance(answer, str) else None


def test_a_line_cannot_pose_as_another_ranks_nor_an_entry_as_another(typed: Typed) -> None:
    _, said = typed("logs", "{failed}")
    assert [line[:4] for line in said.splitlines()] == ["[0] "]
    assert r"\n[1] not of rank 1" in said
    _, trail = typed("audit")
    assert not any(
        line.startswith("2026-01-01") or "  boss" in line[:40] for line in trail.splitlines()
    )
    assert r"\n2026-01-01 00:00:00  boss" in trail


def test_what_the_terminals_encoding_lacks_is_shown_as_an_escape(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.controller.client.get("/v1/jobs/\u6f22", headers={"Authorization": ""})
    url = str(place.controller.client.base_url)
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("MESHLOOM_URL", url)
    monkeypatch.setenv("MESHLOOM_TOKEN", BOOTSTRAP)
    words = [sys.executable, "-m", "services.cli", "audit"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"GET /v1/jobs/\u6f22" in done.stdout


@pytest.mark.parametrize("every_rank", [False, True])
def test_the_live_view_obeys_nothing_either(place: Place, every_rank: bool) -> None:  # noqa: FBT001 a case
    screen = io.StringIO()
    console = Terminal(file=screen, force_terminal=True, width=1000)
    url = str(place.controller.client.base_url)
    with Client(url, BOOTSTRAP) as client:
        follow(client, place.names["failed"], console, every_rank=every_rank)
    assert SHOWN in screen.getvalue()
    assert "\x1b]" not in screen.getvalue()
    assert not set("\x07\x9b\u202e") & set(screen.getvalue())


def test_a_client_that_watches_a_job_shows_hostile_texts_and_obeys_none(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    with meshloom.Client(str(place.controller.client.base_url), BOOTSTRAP) as client:
        job = client.jobs.get(place.names["raised"]).watch()
    said = capsys.readouterr().out
    assert "\x1b]0;title\x07" in str(job.reason)
    assert said.count("\n") == 1
    assert f"{SHOWN}\\x1b]0;title\\x07" in said
    assert not set("\x1b\x07\x9b\u202e\r") & set(said)


def test_a_text_keeps_its_styles_where_characters_are_replaced() -> None:
    screen = io.StringIO()
    console = Terminal(file=screen, width=80, force_terminal=True, color_system="standard")
    console.print(Text.assemble("a\x1b", ("b\u202ec", "red"), "d"))
    assert screen.getvalue() == "a\\x1b\x1b[31mb\\u202ec\x1b[0md\n"


@pytest.mark.parametrize(
    ("text", "kept", "in_a_line"),
    [
        ("plain [x] \u00e9\u4e2d\U0001f600", None, None),
        ("a\tb\nc", None, r"a\tb\nc"),
        ("\x00\x7f\x85\u2028\u2066\ud800", r"\x00\x7f\x85\u2028\u2066\ud800", None),
    ],
)
def test_only_control_characters_are_escaped(
    text: str, kept: str | None, in_a_line: str | None
) -> None:
    assert harmless(text) == (kept or text)
    assert one_line(text) == (in_a_line or kept or text)
