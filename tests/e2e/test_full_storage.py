"""The disk of the checkpoints is full or gone under a whole stack: what training waits for, and what it costs."""

from pathlib import Path

import psutil
import pytest

from services.contract.api.views import JobView
from services.contract.words.states import JobState
from tests.disk import loose_disk, small_disk
from tests.e2e.conftest import LONG, REST, Stack, running_stack
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

ONE_RESTART = {"max_restarts": 1}
STEPS = 200


def test_a_killed_rank_and_a_full_disk_cost_what_the_kill_costs_and_the_end_waits_for_room(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with (
        small_disk(tmp_path / "disk", mebibytes=64) as disk,
        running_stack(home, MESHLOOM_CHECKPOINT_ROOT=str(disk.path)) as stack,
    ):
        job_id = stack.submit(
            model=LONG["model"],
            train={"steps": STEPS, "global_batch": 4, "seed": 7},
            checkpoint={"every_steps": 20, "keep_last": 1},
            faults=ONE_RESTART,
        ).id
        until(lambda: stack.job(job_id).latest_checkpoint)
        disk.fill()
        ranks = stack.client.ranks(job_id).items
        psutil.Process(next(rank.pid for rank in ranks if rank.pid)).kill()
        waiting = until(lambda: _waiting(stack, job_id), timeout_s=120)
        assert waiting.restarts == 1
        disk.free()
        until(lambda: stack.job(job_id).progress.step > waiting.progress.step)
        disk.fill()
        at_its_end = stack.at_step(job_id, STEPS)
        until(lambda: STEPS in _steps_that_wait(stack, job_id))
        disk.free()
        ended = stack.rested(job_id)
        assert (ended.state, ended.restarts) == (JobState.SUCCEEDED, 1), (
            ended.reason,
            ended.failure,
        )
        assert ended.attempt == at_its_end.attempt
        assert ended.latest_checkpoint != at_its_end.latest_checkpoint
        assert stack.client.checkpoint(str(ended.latest_checkpoint)).step == STEPS


def test_what_is_committed_is_there_when_a_disk_that_was_unmounted_is_back(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with (
        loose_disk(tmp_path / "disk") as disk,
        running_stack(home, MESHLOOM_CHECKPOINT_ROOT=str(disk.path)) as stack,
    ):
        spec = LONG | {"checkpoint": {"every_steps": 10, "keep_last": 1}, "faults": ONE_RESTART}
        undisturbed = stack.rested(stack.submit(**spec).id)
        job_id = stack.submit(**spec).id
        until(lambda: stack.job(job_id).latest_checkpoint)
        disk.unmount()
        until(lambda: _steps_that_wait(stack, job_id), timeout_s=120)
        ranks = stack.client.ranks(job_id).items
        psutil.Process(next(rank.pid for rank in ranks if rank.pid)).kill()
        assert list(disk.path.glob("job_*/chain/*")) == [], "a commit there is one that gets lost"
        disk.mount()
        ended = stack.rested(job_id)
        assert (ended.state, ended.restarts) == (JobState.SUCCEEDED, 1), (
            ended.reason,
            ended.failure,
        )
        assert stack.losses(job_id) == stack.losses(undisturbed.id)


def _steps_that_wait(stack: Stack, job_id: str) -> set[object]:
    """The steps of the checkpoints whose commit waits, or did."""
    events = stack.client.events(job_id).items
    return {event.data.get("step") for event in events if event.kind == "checkpoint.waits"}


def _waiting(stack: Stack, job_id: str) -> JobView | None:
    """The job once it says that it waits for the disk."""
    job = stack.job(job_id)
    assert job.state not in REST, f"{job.state}: {job.reason} {job.failure}"
    return job if "is full" in (job.reason or "") else None
