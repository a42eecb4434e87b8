"""``meshloom plan`` and ``submit --plan`` against a controller process, with an agent's double."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner, Result

from services.cli.app import app
from services.cli.errors import CliError
from services.cli.plan_command import show
from services.cli.terminal import console
from services.contract.api.plan_views import PlanView
from services.contract.messages.probing import ProbeFailure, ProbeModel
from tests.controller.agent_double import AgentDouble
from tests.controller.conftest import job_body
from tests.controller.profiles import ARGS
from tests.controller.test_process import started
from tests.waiting import until

pytestmark = pytest.mark.redis
Answer = Callable[[ProbeModel], None]


class Terminal:
    """The command line, and the agent's double that answers it."""

    def __init__(self, redis: Redis, folder: Path) -> None:
        self.agent = AgentDouble(redis)
        self._folder = folder

    def types(self, *words: str) -> Result:
        return CliRunner().invoke(app, words)

    def types_while(self, answer: Answer, *words: str) -> Result:
        """A command, while the next question to the agent is answered so."""
        asked = [c for c in self.agent.commands() if isinstance(c, ProbeModel)]
        number = len(asked) + 1
        answering = threading.Thread(target=lambda: answer(self.agent.is_asked(number)))
        answering.start()
        done = self.types(*words)
        answering.join()
        return done

    def profiles(self, question: ProbeModel) -> None:
        self.agent.profiles(question)
        self.agent.measures()

    def spec(self, **changes: object) -> str:
        path = self._folder / "spec.yaml"
        small = {"model": {"factory": "decoder", "args": ARGS}, "name": "typed", "plan": "auto"}
        path.write_text(json.dumps(job_body(**small | changes)))
        return str(path)


@pytest.fixture
def terminal(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setattr(console, "_width", 240)
    with (
        started(redis_url, plan_wait_s="0.2") as controller,
        Redis.from_url(redis_url, decode_responses=True) as redis,
    ):
        monkeypatch.setenv("MESHLOOM_URL", str(controller.client.base_url))
        terminal = Terminal(redis, tmp_path)
        terminal.agent.join()
        until(lambda: "loom-1" in terminal.types("nodes").stdout, timeout_s=60)
        yield terminal


def test_a_plan_is_shown_and_submitted_and_compared_with_what_was_measured(
    terminal: Terminal,
) -> None:
    spec = terminal.spec()
    shown = terminal.types_while(terminal.profiles, "plan", spec)
    assert shown.exit_code == 0, shown.output
    for words in (
        *("feasible", "dp_shard", "loom-1: ranks 0, 1", "units", "(root)", "optimizer"),
        *("traffic of a rank", "tokens/s", "what else was considered", "why not", "█"),
    ):
        assert words in shown.stdout, words
    measured = terminal.types("nodes", "loom-1").stdout
    for words in (
        *("loom-1 on loom", "0 of 4 taken", "loom-1, cpu: measured", "products in bf16"),
        *("50 GFLOP/s", "10 GB/s", "1 GB/s", "100 MB/s", "100 μs", "90%", "4 seated"),
    ):
        assert words in measured, (words, measured)
    assert "GFLOP/s" not in terminal.types("nodes").stdout
    terminal.agent.measures(None)
    busy = until(lambda: _without_figures(terminal.types("nodes", "--measured").stdout))
    assert "loom-1" in busy
    plan = json.loads(terminal.types("plan", spec, "--json").stdout)
    assert plan["probe"]["cached"]
    assert "fragments" not in printed(plan)
    left = printed(plan | {"memory_reserve_bytes": 8 << 30})
    assert "8.0 GiB of the GPU are left to the allocator's fragments" in left
    submitted = terminal.types("submit", "--plan-id", plan["id"])
    assert submitted.exit_code == 0, submitted.output
    job_id = submitted.stdout.split()[1]
    gang = terminal.agent.launches(job_id)
    assert gang.spec.train.micro_batch == plan["micro_batch"]
    assert "nothing measured yet" in terminal.types("status", job_id).stdout
    predicted = plan["memory"][0]["peak"]["total"]
    terminal.agent.samples(gang, [1, 1], peak_bytes=3 * predicted, fragments_bytes=5 << 20)
    compared = terminal.types("status", job_id).stdout
    assert "nothing measured yet" not in compared
    assert "times as much" not in compared  # less was estimated than other things take
    assert "and 5.0 MiB of fragments" in compared, "the most of any rank"
    directly = terminal.types("submit", spec, "--plan")
    assert directly.exit_code == 0, directly.output
    assert "plan_" in directly.stdout
    assert "submitted job_" in directly.stdout
    fresh = terminal.types_while(terminal.profiles, "plan", spec, "--fresh")
    assert fresh.exit_code == 0, fresh.output


def printed(plan: dict[str, Any]) -> str:
    with console.capture() as captured:
        show(PlanView.model_validate(plan))
    return captured.get()


def _without_figures(shown: str) -> str | None:
    return shown if "not measured" in shown and "GFLOP/s" not in shown else None


def test_a_plan_that_does_not_fit_ends_with_3_and_one_that_failed_with_1(
    terminal: Terminal,
) -> None:
    spec = terminal.spec(resources={"ranks": 8})
    tight = terminal.types_while(terminal.profiles, "submit", spec, "--plan")
    assert tight.exit_code == 3, tight.output
    assert "infeasible" in tight.stdout
    assert "fewer ranks" in tight.stdout
    failure = ProbeFailure(code="raised", reason="KeyError: 'dim'", traceback="File model.py")

    def fail(question: ProbeModel) -> None:
        terminal.agent.fails_to_profile(question, failure)

    failed = terminal.types_while(fail, "plan", terminal.spec(data={"factory": "a.b:c"}))
    assert failed.exit_code == 1, failed.output
    for words in ("KeyError: 'dim'", "may still train", "File model.py"):
        assert words in failed.stdout
    assert terminal.types("ls").stdout.count("job_") == 0
    listed = terminal.types("plans").stdout
    assert listed.index("KeyError: 'dim'") < listed.index("infeasible")
    only = terminal.types("plans", "--state", "failed", "--limit", "1").stdout
    assert "infeasible" not in only
    plan_id = next(word for word in only.split() if word.startswith("plan_"))
    for named in (plan_id, plan_id[:-1], plan_id.removeprefix("plan_")[:-1], "last", "typed"):
        assert json.loads(terminal.types("plans", named, "--json").stdout)["id"] == plan_id, named
    several = str(terminal.types("plans", "plan_0").exception)
    assert "begins the ids of 2 plans" in several
    assert plan_id in several
    assert "may still train" in terminal.types("plans", plan_id).stdout


@pytest.mark.parametrize(
    "words",
    [
        ("submit",),
        ("submit", "spec.yaml", "--plan-id", "x"),
        ("submit", "--plan-id", "x", "--plan"),
        ("nodes", "../jobs"),
        ("plans", "../jobs"),
    ],
)
def test_what_is_no_submission_is_refused_before_anything_is_asked(words: tuple[str, ...]) -> None:
    assert isinstance(CliRunner().invoke(app, words).exception, CliError)
