"""Every example continues, whatever happens to it, with the losses of a run that is left alone.

That of a script, which makes its data by itself, does so in ``test_scripts``.
"""

import functools
import os
import signal
from pathlib import Path
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

from fsdp_core.plan.model import UnitPlan
from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import RankVote
from tests.forking import HUGGING_FACE
from tests.rank.gang import Attempt, Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.system]

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
BYTES: Final = "stdlib-gpt"
STEPS: Final = 6
# What their code imports; each of a dozen ranks would take seconds for it.
LIBRARIES: Final = {
    "digits": ("sklearn.datasets",),
    "llama": HUGGING_FACE,
    "trainer": HUGGING_FACE,
}


def short(name: str) -> JobSpec:
    """The example with fewer steps and samples, and a checkpoint at every second step."""
    file = EXAMPLES / f"{name}.yaml" if name == BYTES else EXAMPLES / name / "job.yaml"
    body: dict[str, Any] = YAML(typ="safe").load(file)
    if "entrypoint" in body:
        body["entrypoint"]["args"] = ["--steps", str(STEPS), "--every", "2", "--batch", "12"]
        return JobSpec.model_validate(body)
    if name == BYTES:
        body["data"]["args"] |= {"seq_len": 128, "validation_sequences": 4}
    body["train"] |= {"steps": STEPS, "global_batch": 12, "eval_every": 0}
    body.pop("mesh", None)  # the test says how many ranks there are
    if shape := body.get("schedule", {}).get("args"):
        shape["warmup_steps"] = 2
    return JobSpec.model_validate(body | {"checkpoint": {"every_steps": 2}})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        # What the others show of models of one's own, of a built-in one and of a library, these show again.
        again = ("llama",) if metafunc.config.getoption("--grid") == "full" else ()
        metafunc.parametrize("name", [BYTES, "digits", "regression", "gan", "trainer", *again])


def test_a_killed_rank_a_pause_and_another_world_size_do_not_show_in_the_losses(
    ranks: Ranks, name: str
) -> None:
    spec = short(name)
    said = spec.plan["units"] if isinstance(spec.plan, dict) else ()
    units = tuple(UnitPlan(tuple(unit["modules"])) for unit in said)
    start = functools.partial(
        ranks.start,
        spec,
        units=units,
        code=None if name == BYTES else EXAMPLES / name,
        libraries=LIBRARIES.get(name, ()),
    )
    whole = start().succeeded().losses()
    assert sorted(whole) == list(range(1, STEPS + 1))

    killed = start(fence=2)
    killed.until(lambda: all(_voted(killed, rank, 2) for rank in range(2)))
    pid = killed.processes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert killed.ended()[1] == -signal.SIGKILL
    source = killed.committed(2).checkpoint_id

    paused = start(fence=3, resume_from=source)
    paused.order(0, checkpoint=True, stop=True)
    paused.succeeded()
    step = max(paused.losses())
    assert step < STEPS
    source = paused.committed(step).checkpoint_id
    resumed = start(fence=4, resume_from=source).succeeded()
    seen = killed.losses() | paused.losses() | resumed.losses()
    assert seen == whole

    for fence, world in enumerate((1, 3), start=5):
        other = start(world, fence=fence, resume_from=source).succeeded()
        assert other.losses() == pytest.approx(_after(whole, step), abs=1e-5)


def _voted(attempt: Attempt, rank: int, step: int) -> bool:
    return any(vote.step == step for vote in attempt.of_kind(rank, RankVote))


def _after(losses: dict[int, float], step: int) -> dict[int, float]:
    return {number: loss for number, loss in losses.items() if number > step}
