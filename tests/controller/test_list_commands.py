"""``meshloom ls`` and ``logs`` narrowed down, and moments as people type them."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
import typer
from redis import Redis
from typer.testing import CliRunner, Result

from services.cli import jobs
from services.cli.app import app
from services.cli.errors import CliError, RefusedError
from services.cli.terminal import console
from services.cli.times import moment
from services.contract.messages.commands import LaunchGang
from services.contract.messages.facts import GangProgressed
from services.contract.messages.telemetry import MetricRecord
from services.local.settings import child_environment
from tests.controller.agent_double import AgentDouble
from tests.controller.conftest import job_body
from tests.controller.test_process import Controller, started
from tests.waiting import until

HOUR_MS = 3_600_000


@pytest.mark.redis
def test_jobs_and_lines_are_sorted_and_narrowed(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_width", 200)

    def typed(*words: str) -> str:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        return done.stdout

    def order(*words: str) -> list[str]:
        table = typed("ls", *words)
        names = [name for name in ("slow", "fast", "other") if name in table]
        return sorted(names, key=table.index)

    with (
        started(redis_url) as controller,
        Redis.from_url(redis_url, decode_responses=True) as redis,
    ):
        monkeypatch.setenv("MESHLOOM_URL", str(controller.client.base_url))
        for name, priority in (("fast", 2), ("slow", 1), ("other", 3)):
            body = job_body(name=name, priority=priority, labels={"kind": name[-1]})
            controller.client.post("/v1/jobs", json=body).raise_for_status()
        assert order() == ["other", "slow", "fast"]
        assert order("--sort", "priority") == ["slow", "fast", "other"]
        assert order("--sort", "-priority", "--limit", "2") == ["other", "fast"]
        assert order("--label", "kind=t", "--owner", "local") == ["fast"]
        assert order("--q", "LOW") == ["slow"]
        assert order("--owner", "nobody") == []

        agent = AgentDouble(redis)
        agent.join()
        newest = controller.client.get("/v1/jobs?q=other").json()["items"][0]["id"]
        gang = agent.launches(newest)
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        for words, time_ms in (("before", now_ms - 3 * HOUR_MS), ("lately", now_ms)):
            agent.writes(gang, 0, words, time_ms=time_ms)
        _metrics_are_shown(agent, gang, typed)
        assert typed("logs", newest, "--since", "2h") == "[0] lately\n"
        assert typed("logs", newest, "--until", "2h") == "[0] before\n"
        since = datetime.fromtimestamp(now_ms / 1000 - 4 * 3600, tz=UTC).isoformat()
        assert typed("logs", newest, "--since", since, "--until", "1h") == "[0] before\n"
        _lines_are_narrowed(newest, typed)
        _things_are_named(controller, agent, gang, typed)
        _events_of_all_pages_are_listed(newest, typed, monkeypatch)
        _a_spec_is_read_from_standard_input()
        _top_is_live_until_ctrl_c(controller)


def _lines_are_narrowed(job_id: str, typed: Callable[..., str]) -> None:
    assert typed("logs", job_id, "--tail", "1") == "[0] lately\n"
    assert typed("logs", job_id, "--grep", "be.ore|nothing") == "[0] before\n"
    assert typed("logs", job_id, "--grep", "e", "--tail", "1", "--rank", "0") == "[0] lately\n"
    stamped = typed("logs", job_id, "--timestamps", "--tail", "1")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \[0\] lately\n", stamped)
    assert typed("logs", job_id, "--grep", "EFOR") == ""
    assert typed("logs", job_id, "--grep", "efor", "--tail", "5000") == "[0] before\n"
    assert typed("logs", job_id, "--tail", "5000").count("\n") == 2
    (line,) = typed("logs", job_id, "--tail", "1", "--json").splitlines()
    assert json.loads(line)["text"] == "lately"
    assert "its ranks are 0 to 1" in _refused("logs", job_id, "--rank", "9")
    assert typed("attempts", "slow") == "No attempts yet\n"
    assert typed("logs", job_id, "--tail", "9" * 20) == typed("logs", job_id)
    for pattern in ("(", "a{99999999999}", "(" * 3_000 + ")" * 3_000):
        assert "no regular expression" in _refused("logs", job_id, "--grep", pattern)


def _things_are_named(
    controller: Controller, agent: AgentDouble, gang: LaunchGang, typed: Callable[..., str]
) -> None:
    """Jobs and checkpoints by name, by the beginning of an id, and as the last one."""
    body = job_body(name="other", priority=9)
    again = str(controller.client.post("/v1/jobs", json=body).json()["id"])
    found = {
        name: str(controller.client.get(f"/v1/jobs?q={name}").json()["items"][0]["id"])
        for name in ("slow", "fast")
    }
    for said, meant in (
        ("other", again),  # the newest of the name
        ("last", again),
        ("slow", found["slow"]),
        (found["fast"][:-1], found["fast"]),
        (found["fast"].removeprefix("job_")[:-1], found["fast"]),
        (gang.job_id, gang.job_id),
    ):
        assert json.loads(typed("status", said, "--json"))["id"] == meant, said
    several = _refused("status", "job_0")
    assert "begins the ids of 4 jobs" in several
    for each in (*found.values(), gang.job_id, again):
        assert each in several
    assert "no job has the name 'nobody'" in _refused("status", "nobody")
    _a_patch_is_read_from_a_file(typed)
    first, second = agent.saves(gang, 2), agent.saves(gang, 3)
    until(lambda: typed("checkpoints", gang.job_id).count("COMMITTED") == 2)
    for said, meant in (
        (second, second),
        (gang.job_id, second),  # a job: its newest committed one
        (first.partition("-a")[0], first),
    ):
        assert json.loads(typed("pin", said, "--json"))["id"] == meant, said
    both = _refused("pin", first[:30])
    assert first in both
    assert second in both
    assert "has no committed checkpoint yet" in _refused("verify", "slow")
    assert "no checkpoint has an id that begins with 'x'" in _refused("verify", "x")
    wrong = _refused("status", first)
    assert wrong == f"{first} is the id of a checkpoint, not of a job; its job is {gang.job_id}"
    assert "give the id of the checkpoint" in _refused("rm-checkpoint", gang.job_id)


def _a_patch_is_read_from_a_file(typed: Callable[..., str]) -> None:
    def patched(text: str) -> Result:
        return CliRunner().invoke(app, ["patch", "slow", "--file", "-"], input=text)

    assert patched("labels:\n  team: vision\n  kind: null\n").exit_code == 0
    assert json.loads(typed("status", "slow", "--json"))["labels"] == {"team": "vision"}
    # The shape is wrong, which the command sees itself; then what only the controller knows.
    wrong = str(
        patched("labels:\n  team: vision\ncheckpoint:\n  keep_lost: 3\ntrain: {}\n").exception
    )
    assert wrong.startswith("standard input is not a valid patch: 2 errors\n  line 4, column 3, ")
    assert "did you mean 'keep_last'?" in wrong
    assert "\n  line 5, column 1, /train" in wrong
    refused = patched("priority: 1\nresources:\n  world:\n    min: 2\n").exception
    assert isinstance(refused, RefusedError)
    assert "is not a valid patch: 1 error\n  line 3, column 3, /resources/world: " in str(refused)
    assert "--file, alone" in _refused("patch", "slow", "--file", "-", "--priority", "1")


def _events_of_all_pages_are_listed(
    job_id: str, typed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = json.loads(typed("events", job_id, "--json"))["items"]
    assert len(whole) > 3
    monkeypatch.setattr(jobs, "_EVENTS_AT_ONCE", 2)
    assert json.loads(typed("events", job_id, "--json")) == {"items": whole, "next_cursor": None}


def _a_spec_is_read_from_standard_input() -> None:
    done = CliRunner().invoke(
        app, ["submit", "-", "--json"], input=json.dumps(job_body(name="piped"))
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["name"] == "piped"
    refused = CliRunner().invoke(app, ["submit", "-"], input="a: [")
    assert "standard input is not valid YAML: line 1" in str(refused.exception)


def _top_is_live_until_ctrl_c(controller: Controller) -> None:
    """On a terminal of its own, 30 lines of 100 columns."""
    url = str(controller.client.base_url)
    environment = child_environment(MESHLOOM_URL=url, TERM="xterm", COLUMNS="100", LINES="30")
    child, terminal = pty.fork()
    if child == 0:
        # A run in a shell's background ignores it, and so would all that it starts.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        words = [sys.executable, "-m", "services.cli", "top", "--every", "0.5"]
        os.execve(sys.executable, words, environment)  # noqa: S606 ourselves
    shown = bytearray()

    def shows(text: str) -> bool:
        if select.select([terminal], [], [], 0)[0]:
            with contextlib.suppress(OSError):  # nobody is at the other end any more
                shown.extend(os.read(terminal, 1 << 16))
        return text.encode() in shown

    try:
        until(lambda: shows("job on nodes"))
        until(lambda: shows("slow"))
        assert b"came-while-watched" not in shown
        body = job_body(name="came-while-watched", priority=9)
        controller.client.post("/v1/jobs", json=body).raise_for_status()
        until(lambda: shows("came-while-watched"))
        os.write(terminal, b"\x03")
        # The screen is given back, with its cursor, before the command ends.
        until(lambda: shows("\x1b[?1049l") and b"\x1b[?25h" in shown)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 130
        child = 0
    finally:
        os.close(terminal)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _refused(*words: str) -> str:
    refused = CliRunner().invoke(app, words).exception
    assert isinstance(refused, CliError), (words, refused)
    return str(refused)


def test_a_moment_is_a_time_or_an_age() -> None:
    assert moment("2026-11-21T18:00:00Z") == datetime(2026, 11, 21, 18, tzinfo=UTC)
    assert moment("2026-11-21T18:00:00+02:00") == datetime(2026, 11, 21, 16, tzinfo=UTC)
    local = datetime(2026, 11, 21, 18).astimezone()
    assert moment("2026-11-21T18:00:00") == local
    for age, seconds in {"90s": 90, "15m": 900, "2h": 7200, "1d": 86400}.items():
        earliest, found, latest = datetime.now(UTC), moment(age), datetime.now(UTC)
        assert earliest <= found + timedelta(seconds=seconds) <= latest


@pytest.mark.parametrize(
    "text", ["", "soon", "5", "5w", "999999999d", "-1h", "0001-01-01T00:00:00+12:00"]
)
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="neither a time"):
        moment(text)


def _metrics_are_shown(agent: AgentDouble, gang: LaunchGang, typed: Callable[..., str]) -> None:
    job_id = gang.job_id
    agent.trains(gang, [1, 2])
    told = GangProgressed(job_id=job_id, fence=1, node_id=agent.node_id, step=1)
    agent.tell(told.model_copy(update={"throughput_unit": "samples", "loss_unit": ""}))
    record = MetricRecord(
        step=2, fence=1, values={"hits": 0.75, "[red]x": None, "=1+1": 2}, left_out=3
    )
    agent.tells_metrics(gang, record, record.model_copy(update={"step": 3}))
    until(lambda: "samples/s" in typed("status", job_id), every_s=0.1)
    table = typed("status", job_id)
    assert re.search(r"^loss +2\.50000 *$", table, re.MULTILINE)
    assert re.search(r"^hits +0\.75 *$", table, re.MULTILINE)
    assert re.search(r"^\[red\]x +not finite *$", table, re.MULTILINE)
    assert "1,000 samples/s" in typed("ls")
    overview = typed("metrics", job_id)
    assert re.search(r"^hits +0\.75 +3 +0\.75 +0\.75 *$", overview, re.MULTILINE)
    assert "of 3 further names nothing is kept" in overview
    both = ("metrics", job_id, "--name", "hits", "--name", "loss")
    assert re.search(r"^1 +- +5 *$", typed(*both), re.MULTILINE)
    assert typed(*both, "--csv") == ("step,attempt,hits,loss\n1,1,,5.0\n2,1,0.75,2.5\n3,1,0.75,\n")
    header, *rows = typed("metrics", job_id, "--csv").splitlines()
    assert header.endswith(",'=1+1,[red]x,hits")  # a spreadsheet runs no formula
    assert len(rows) == 3
