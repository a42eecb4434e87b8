"""What the browser is shown: a node on which jobs trained, train, wait and failed, as a real agent would tell it."""

import threading
from dataclasses import dataclass
from typing import Final

from services.cli.plan_command import planned
from services.contract.api.plan_views import PlanView
from services.contract.api.views import JobView
from services.contract.messages.commands import LaunchGang
from services.contract.words.states import JobState
from tests.dashboard.scripted_agent import ScriptedAgent
from tests.dashboard.tabs import Controller
from tests.waiting import until

STEPS: Final = 120
TRACEBACK: Final = (
    "Traceback (most recent call last):\n"
    '  File "/opt/meshloom/services/worker/rank/loop/step.py", line 61, in forward\n'
    "    loss = model(tokens)\n"
    '  File "/home/ada/model.py", line 88, in forward\n'
    "    return x @ self.weight\n"
    '  File "/usr/lib/python3.12/site-packages/torch/_ops.py", line 12, in __call__\n'
    "    return self._op(*args)\n"
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied"
)


def spec(name: str, *, ranks: int = 2, priority: int = 0) -> dict[str, object]:
    """A job spec that trains without a plan."""
    return {
        "name": name,
        "model": {"factory": "decoder", "args": {"dim": 32, "layers": 2, "heads": 2}},
        "data": {"factory": "stdlib_bytes", "args": {"seq_len": 32}},
        "train": {"steps": 600, "global_batch": 8},
        "resources": {"ranks": ranks, "device": "cpu"},
        "plan": "default",
        "faults": {"max_restarts": 0},
        "priority": priority,
        "labels": {"team": "demo"},
    }


@dataclass(frozen=True)
class Scene:
    """A node on which one job trains and one failed, while another waits for slots."""

    controller: Controller
    agent: ScriptedAgent
    running: JobView
    gang: LaunchGang
    failed: JobView
    waiting: JobView
    checkpoint: str


def set_scene(controller: Controller, agent: ScriptedAgent) -> Scene:
    """Submit the jobs, and have the agent tell what became of them."""
    client = controller.client
    running = client.submit(spec("stdlib-gpt"))
    gang = agent.launch(running.id)
    agent.train(gang, range(1, STEPS + 1))
    agent.beat(gang, STEPS)
    agent.measure(gang, range(1, STEPS + 1))
    agent.evaluate(gang, 100, 2.1)
    for step in (1, 60, STEPS):
        agent.write(gang, 0, f"rank 0 made step {step}")
    agent.write(gang, 1, "rank 1 warns of a slow disk", is_error=True)
    checkpoint = agent.checkpoint(gang, 100)
    failed = client.submit(spec("broken-shapes") | {"train": {"steps": 900, "global_batch": 16}})
    broken = agent.launch(failed.id)
    agent.train(broken, range(1, 61))
    agent.crash(broken, 60, TRACEBACK.splitlines()[-1], TRACEBACK)
    waiting = client.submit(spec("four-ranks", ranks=4, priority=-1))
    until(lambda: client.job(running.id).latest_checkpoint)
    until(lambda: client.job(running.id).state == JobState.RUNNING)
    until(lambda: client.job(failed.id).state == JobState.FAILED)
    return Scene(controller, agent, running, gang, failed, waiting, checkpoint)


def plan_in(scene: Scene) -> PlanView:
    """What four ranks would need; the node answers once it is asked."""
    answers = threading.Thread(target=scene.agent.profile)
    answers.start()
    wanted = spec("to-be-planned", ranks=4) | {"plan": "auto"}
    made = planned(scene.controller.client, wanted)
    answers.join()
    return made
