"""Scripts under the agent with the ranks that it really has: as torchrun would run them."""

import os
from pathlib import Path

import pytest

from services.contract.jobs.specs import JobSpec
from services.contract.messages.commands import LaunchGang
from services.contract.messages.facts import GangProgressed
from services.worker.rank.process.seat import DEFAULT_TRAINER
from tests.agent.conftest import Controller, StartAgent, ended, launch

pytestmark = [pytest.mark.ranks, pytest.mark.system]

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


ENDS = {
    "raise.py": "raise ValueError('the script has a fault')",
    "exit_3.py": "import sys; sys.exit(3)",
    "message.py": "import sys; sys.exit('no such data')",
    "exit_0.py": "import sys; sys.exit(0)",
    "hard_0.py": "import os; os._exit(0)",
    "hard_5.py": "import os; os._exit(5)",
    "abort.py": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "syntax.py": "def :",
    "at_exit.py": "import atexit; atexit.register(print, 'said at the end')",
    "workers.py": """
import torch
from torch.utils.data import DataLoader

def main():
    data = DataLoader(torch.arange(6), batch_size=2, num_workers=1)
    print([batch.tolist() for batch in data])

if __name__ == "__main__":
    main()
""",
}


def test_each_end_of_a_script_is_told_as_it_was(
    start_agent: StartAgent, controller: Controller, tmp_path: Path
) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name, text in ENDS.items():
        (folder / name).write_text(text)
    start(start_agent, controller, folder)
    found: dict[str, tuple[bool, int | None, str]] = {}
    for fence, name in enumerate([*ENDS, "missing.py"], start=1):
        controller.open_job(fence)
        controller.send(script(name, ranks=1).model_copy(update={"fence": fence}))
        (end,) = ended(controller, fence).exits
        found[name] = (end.finished, end.exit_code, end.error or "")
        assert (end.traceback is not None) == (
            name in {"raise.py", "exit_3.py", "message.py", "syntax.py", "missing.py"}
        )
    assert found["raise.py"] == (False, 1, "ValueError: the script has a fault")
    assert found["exit_3.py"] == (False, 3, "SystemExit: 3")
    assert found["message.py"] == (False, 1, "SystemExit: no such data")
    assert found["exit_0.py"] == found["hard_0.py"] == (True, 0, "")
    assert found["at_exit.py"] == found["workers.py"] == (True, 0, "")
    assert found["hard_5.py"] == (False, 5, "exited with code 5")
    assert found["abort.py"] == (False, None, "ended by SIGSEGV")
    assert found["syntax.py"][2].startswith("SyntaxError: ")
    assert found["missing.py"][2].startswith(
        f"ScriptNotFoundError: entrypoint.script: there is no missing.py below {folder}"
    )
    told = {line.text for line in controller.logs()}
    assert {"said at the end", "[[0, 1], [2, 3], [4, 5]]"} <= told
