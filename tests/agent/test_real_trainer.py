"""The agent with the trainer that it really has: torch is imported once, in the warm process."""

from collections import Counter

import psutil
import pytest

from services.contract.messages.commands import LaunchGang, StopGang, TakeCheckpoint
from services.contract.messages.facts import CheckpointVoted, Evaluated, GangProgressed, NodeJoined
from services.contract.specs import JobSpec
from services.worker.rank.process.seat import DEFAULT_TRAINER
from tests.agent.conftest import JOB, Controller, StartAgent, ended, launch, launched
from tests.waiting import until

pytestmark = pytest.mark.ranks


def tiny(steps: int) -> LaunchGang:
    spec = JobSpec.model_validate(
        {
            "model": {"factory": "decoder", "args": {"dim": 16, "layers": 2, "heads": 2}},
            "data": {"factory": "stdlib_bytes", "args": {"seq_len": 16}},
            "train": {"steps": steps, "global_batch": 4, "seed": 7},
            "resources": {"ranks": 2, "device": "cpu"},
        }
    )
    return launch().model_copy(update={"spec": spec})


def test_forked_ranks_train_to_the_end(start_agent: StartAgent, controller: Controller) -> None:
    controller.open_job()
    start_agent(MESHLOOM_TRAINER=DEFAULT_TRAINER)
    controller.send(tiny(steps=6))
    end = ended(controller)
    assert [(e.exit_code, e.finished, e.error) for e in end.exits] == [(0, True, None)] * 2
    assert [record.step for record in controller.steps()] == list(range(1, 7))
    assert controller.all_of(Evaluated)[0].step == 6


def test_a_checkpoint_on_demand_is_taken_once_by_all_ranks_at_one_step(
    start_agent: StartAgent, controller: Controller
) -> None:
    controller.open_job()
    start_agent(MESHLOOM_TRAINER=DEFAULT_TRAINER)
    controller.send(tiny(steps=100_000))
    controller.fact(GangProgressed)
    for taken in range(1, 6):
        controller.send(TakeCheckpoint(job_id=JOB, fence=1))
        until(lambda: len(controller.all_of(CheckpointVoted)) >= 2 * taken)  # noqa: B023 at once
    controller.send(StopGang(job_id=JOB, fence=1, mode="drain", checkpoint="none"))
    assert all(e.drained for e in ended(controller).exits)
    votes = controller.all_of(CheckpointVoted)
    assert len(votes) == 10
    ranks_by_step = Counter(vote.step for vote in votes)
    assert list(ranks_by_step.values()) == [2] * 5


def test_a_warm_process_with_torch_has_one_thread_and_its_ranks_drain(
    start_agent: StartAgent, controller: Controller
) -> None:
    controller.open_job()
    agent = start_agent(MESHLOOM_TRAINER=DEFAULT_TRAINER)
    controller.fact(NodeJoined)
    controller.send(tiny(steps=100_000))
    controller.fact(GangProgressed)
    warm = agent.warm()
    assert warm.num_threads() == 1
    assert all(psutil.Process(pid).ppid() == warm.pid for pid in launched(controller).pids.values())
    controller.send(StopGang(job_id=JOB, fence=1, mode="drain"))
    assert all(e.drained and e.exit_code == 0 for e in ended(controller).exits)
