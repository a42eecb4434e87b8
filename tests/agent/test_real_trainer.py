"""The agent with the trainer that it really has: torch is imported once, in the warm process."""

from collections import Counter
from pathlib import Path

import psutil
import pytest

from services.contract.jobs.specs import JobSpec
from services.contract.messages.commands import LaunchGang, StopGang, TakeCheckpoint
from services.contract.messages.facts import CheckpointVoted, Evaluated, GangProgressed, NodeJoined
from services.worker.rank.process.seat import DEFAULT_TRAINER
from tests.agent.conftest import JOB, Controller, StartAgent, ended, launch, launched
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.system]


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
    assert controller.metrics() == []


def test_what_a_users_loss_gives_beside_reaches_redis_with_the_units_of_the_job(
    start_agent: StartAgent, controller: Controller
) -> None:
    controller.open_job()
    start_agent(MESHLOOM_TRAINER=DEFAULT_TRAINER, MESHLOOM_USER_PATH=str(Path(__file__).parents[2]))
    user = "tests.rank.user_vision"
    pictures = {
        "model": {"factory": f"{user}:Classifier"},
        "data": {"factory": f"{user}:Pictures"},
        "loss": {"factory": f"{user}:smoothed"},
        "optimizer": {"factory": "sgd", "args": {"lr": 0.1}},
    }
    spec = tiny(steps=6).spec.model_dump() | pictures
    controller.send(tiny(6).model_copy(update={"spec": JobSpec.model_validate(spec)}))
    assert [e.error for e in ended(controller).exits] == [None] * 2
    training, (passed,) = controller.metrics()[:6], controller.metrics()[6:]
    assert [record.step for record in training] == list(range(1, 7))
    assert all(record.values.keys() == {"hits", "largest"} for record in training)
    assert passed.values.keys() == {"validation/hits", "validation/largest"}
    assert controller.all_of(Evaluated)[0].metrics["hits"] == passed.values["validation/hits"]
    units = [(f.throughput_unit, f.loss_unit) for f in controller.all_of(GangProgressed)]
    assert units[-1] == ("samples", "")


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
