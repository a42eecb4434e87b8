"""Scripts under the agent with the ranks that it really has: as torchrun would run them."""

import os
from pathlib import Path

import pytest

from services.contract.messages.commands import LaunchGang
from services.contract.messages.facts import GangProgressed
from services.contract.specs import JobSpec
from services.worker.rank.process.seat import DEFAULT_TRAINER
from tests.agent.conftest import Controller, StartAgent, ended, launch

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def script(name: str, *args: str, ranks: int = 2) -> LaunchGang:
    spec = JobSpec.model_validate(
        {
            "entrypoint": {"script": name, "args": args},
            "resources": {"ranks": ranks, "device": "cpu"},
        }
    )
    return launch(ranks=ranks).model_copy(update={"spec": spec})


def start(start_agent: StartAgent, controller: Controller, *folders: Path) -> None:
    controller.open_job()
    start_agent(
        MESHLOOM_TRAINER=DEFAULT_TRAINER,
        MESHLOOM_USER_PATH=os.pathsep.join(map(str, folders)),
    )


def test_a_torchrun_script_runs_unchanged_to_its_end(
    start_agent: StartAgent, controller: Controller
) -> None:
    start(start_agent, controller, EXAMPLES)
    controller.send(script("script/train.py", "--steps", "3", "--dim", "16"))
    end = ended(controller)
    assert [(e.exit_code, e.finished, e.error) for e in end.exits] == [(0, True, None)] * 2
    told = [line.text for line in controller.logs() if line.rank == 0]
    assert [line.split()[:2] for line in told if line.startswith("step")] == [
        ["step", str(step)] for step in (1, 2, 3)
    ]
    assert [fact.step for fact in controller.all_of(GangProgressed)] == [0]
