"""The command line against a running stack, as a person types it."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from services.cli.follow import follow
from services.cli.spec_file import read_spec
from services.contract.words.states import JobState
from services.local.settings import child_environment
from tests.e2e.conftest import Stack, tiny_spec
from tests.e2e.typed import typed
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

Meshloom = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def meshloom(stack: Stack) -> Meshloom:
    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        return typed(stack.url, *arguments)

    return call


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    # JSON is YAML: what the API takes is what a file may hold.
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(tiny_spec(name="typed")))
    return path


def test_a_job_from_submission_to_its_checkpoints(meshloom: Meshloom, spec_file: Path) -> None:
    done = meshloom("submit", spec_file, "--follow")
    assert done.returncode == 0, done.stderr
    for shown in ("RUNNING", "SUCCEEDED", "validation", "bigram", "committed checkpoint ckpt_"):
        assert shown in done.stdout
    assert "/#/jobs/job_" in done.stdout

    listed = meshloom("ls")
    assert "typed" in listed.stdout
    status = meshloom("status", "last")
    assert "FINISHED" in status.stdout
    assert "waited for" in meshloom("ranks", "last", "-o", "wide").stdout
    ranks = json.loads(meshloom("ranks", "last", "--json").stdout)["items"]
    assert len(ranks) == 2
    assert all(0 < rank["data_wait_s"] < rank["step_time_s"] for rank in ranks)
    assert "was inspected" in meshloom("diagnose", "last").stderr
    as_json = json.loads(meshloom("status", "last", "--json").stdout)
    assert as_json["state"] == "SUCCEEDED"
    waited = meshloom("wait", "typed", "--timeout", 60)
    assert (waited.returncode, "SUCCEEDED at step 40/40" in waited.stdout) == (0, True)
    assert "COMMITTED" in meshloom("checkpoints", "last").stdout
    assert "job.succeeded" in meshloom("events", "last").stdout
    assert meshloom("logs", "-f", "last").stdout == meshloom("logs", "last").stdout != ""


def test_every_fault_of_a_spec_is_printed_and_the_exit_code_is_2(
    meshloom: Meshloom, tmp_path: Path
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(json.dumps(tiny_spec(colour="red", train={"steps": 0})))
    refused = meshloom("submit", path)
    assert refused.returncode == 2
    assert "/colour" in refused.stderr
    assert "/train/steps" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("model: {factory: decoder", "not valid YAML: line"),
        ("- a list", "must be a mapping"),
        ("a: 1\na: 2", "duplicate"),
        ("train: {steps: .nan}", "train.steps is nan"),
        ("labels: {day: 2026-01-01}", "labels.day is datetime.date"),
        ("labels: [!!binary aGVsbG8=]", "labels[0] is b'hello'"),
        ("{1: one}", "a key is 1"),
    ],
)
def test_a_file_that_is_no_spec_is_told_in_one_line(
    meshloom: Meshloom, tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    refused = meshloom("submit", path)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


def test_a_learning_rate_written_as_1e_3_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("optimizer: {factory: adamw, args: {lr: 1e-3}}")
    assert read_spec(path)["optimizer"]["args"]["lr"] == 0.001


def test_a_dry_run_submits_nothing(meshloom: Meshloom, stack: Stack, spec_file: Path) -> None:
    before = stack.client.jobs(limit=1).items
    assert "nothing was submitted" in meshloom("submit", spec_file, "--dry-run").stdout
    assert [job.id for job in stack.client.jobs(limit=1).items] == [job.id for job in before]


@pytest.mark.parametrize(
    "command",
    [
        ("status", "job_00000000000000000000000000"),
        ("status", ""),
        ("status", "../nodes"),
        ("submit", "/no/such.yaml"),
        ("resume", "job_00000000000000000000000000", "--from", "garbage"),
        ("cancel", "job_00000000000000000000000000", "--grace", "1000000"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    meshloom: Meshloom, command: tuple[str, ...]
) -> None:
    done = meshloom(*command)
    assert done.returncode == 2
    assert done.stderr.startswith("meshloom: ")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("bad", [{"MESHLOOM_PORT": "abc"}, {"MESHLOOM_TOKEN": "\u00fc"}])
def test_a_bad_environment_is_one_line_and_exit_code_2(stack: Stack, bad: dict[str, str]) -> None:
    done = _call(stack.url, "ls", **bad)
    assert done.returncode == 2
    assert (
        "MESHLOOM_PORT" not in bad
        or "MESHLOOM_PORT: must be a whole number, not 'abc'" in done.stderr
    )
    assert len(done.stderr.strip().splitlines()) == 1


def test_without_a_controller_it_says_how_to_start_one() -> None:
    done = typed("http://127.0.0.1:9", "ls")
    assert done.returncode == 2
    assert "make up" in done.stderr


def test_doctor_finds_a_healthy_stack_well(meshloom: Meshloom) -> None:
    done = meshloom("doctor")
    assert done.returncode == 0, done.stdout
    assert "FAIL" not in done.stdout
    assert "CPU slots" in done.stdout
    unreachable = typed("http://127.0.0.1:9", "doctor")
    assert unreachable.returncode == 1
    assert "FAIL" in unreachable.stdout


def test_the_live_view_shows_bar_loss_and_ranks(stack: Stack) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    job = follow(stack.client, stack.submit(name="live").id, console)
    assert job.state is JobState.SUCCEEDED
    for shown in ("live", "40/40", "loss", "tokens/s", "rank 0", "rank 1", "FINISHED"):
        assert shown in screen.getvalue()


def test_nodes_lists_this_machine(meshloom: Meshloom) -> None:
    assert "READY" in meshloom("nodes").stdout


def _call(url: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *map(str, arguments)],
        env=child_environment(MESHLOOM_URL=url, COLUMNS="200", **environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_job_is_changed_cloned_and_forgotten(meshloom: Meshloom, spec_file: Path) -> None:
    assert meshloom("submit", spec_file, "--follow").returncode == 0
    source = json.loads(meshloom("status", "last", "--json").stdout)["id"]
    changed = meshloom("patch", source, "--priority", 3, "--label", "team=demo", "--keep-last", 1)
    assert changed.stdout == f"{source} has revision 1\n", changed.stderr
    tries = meshloom("attempts", source).stdout
    assert "dp_shard 2" in tries
    assert "1 to 40" in tries
    assert "completed" in tries
    nothing = meshloom("patch", source)
    assert (nothing.returncode, "--priority" in nothing.stderr) == (2, True)
    for bounds, words in (("1:2", "clone it with"), ("2", "--world is MIN:MAX")):
        refused = meshloom("patch", source, "--world", bounds)
        assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
    clone = ("clone", source, "--from", "latest", "--set", "train.steps=50", "--set", "name=more")
    done = meshloom(*clone, "--follow")
    assert done.returncode == 0, done.stderr
    view = json.loads(meshloom("status", "last", "--json").stdout)
    assert (view["name"], view["cloned_from"]["step"], view["priority"]) == ("more", 40, 3)
    refused = meshloom("clone", source, "--from", "latest")
    assert (refused.returncode, "/overrides/train/steps" in refused.stderr) == (2, True)
    removed = meshloom("delete", view["id"], "--purge-checkpoints")
    assert "is deleted once its checkpoints are removed" in removed.stdout
    until(lambda: meshloom("status", view["id"]).returncode == 2)
    assert meshloom("delete", source).stdout == f"{source} is deleted\n"


def _shown(text: str, word: str) -> str:
    return text if word in text else ""


def test_queue_room_and_drains_are_shown(meshloom: Meshloom, stack: Stack) -> None:
    (node,) = stack.client.nodes().items
    assert "DRAINING" in meshloom("drain", node.id, "--grace", 5).stdout
    job = stack.submit()
    queue = until(lambda: _shown(meshloom("queue").stdout, "draining"))
    assert job.id in queue
    room = meshloom("capacity").stdout
    assert "0 of 4" in room
    assert "the largest gang that fits now: 0 CPU ranks" in room
    assert meshloom("undrain", node.id).stdout == f"{node.id} is READY\n"
    assert stack.rested(job.id).state is JobState.SUCCEEDED
