"""Whole jobs on the kind of device that the tests are run for; `--device cuda` needs one GPU."""

import psutil
import pytest

from services.contract.words.states import JobState
from tests.e2e.conftest import LONG, Stack
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]


def test_a_job_whose_rank_is_killed_has_the_losses_of_one_that_runs_through(
    stack: Stack, device: str
) -> None:
    train = {"steps": 80, "global_batch": 4, "seed": 7, "deterministic": True}
    spec = {**LONG, "train": train, "resources": {"ranks": 1, "device": device}}
    whole = stack.rested(stack.submit(**spec).id)
    assert whole.state is JobState.SUCCEEDED, (whole.reason, whole.failure)
    killed = stack.submit(**spec)
    stack.at_step(killed.id, 30)
    until(lambda: stack.job(killed.id).latest_checkpoint)
    (rank,) = stack.client.ranks(killed.id).items
    assert rank.pid is not None
    psutil.Process(rank.pid).kill()
    done = stack.rested(killed.id)
    assert done.state is JobState.SUCCEEDED, (done.reason, done.failure)
    assert done.restarts == 1
    assert stack.losses(killed.id) == stack.losses(whole.id)
