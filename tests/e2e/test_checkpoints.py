"""Checkpoints in the hands of people, and what becomes of jobs whose checkpoints are damaged."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli.errors import RefusedError
from services.contract.api.requests import CloneRequest
from services.contract.api.views import (
    AttemptView,
    CheckpointView,
    JobView,
    ResumeRequest,
    StopRequest,
)
from services.contract.storage.commit_chain import CommitChain
from services.contract.words.states import CheckpointState, ExitReason, JobState
from tests.e2e.conftest import Stack
from tests.e2e.typed import typed
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

STEPS = {
    "train": {"steps": 240, "global_batch": 4, "seed": 7},
    "checkpoint": {"every_steps": 60, "keep_last": 5},
}


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> dict[int, float | None]:
    job = stack.rested(stack.submit(**STEPS).id)
    assert job.state is JobState.SUCCEEDED, job.failure
    return stack.losses(job.id)


def paused_behind(stack: Stack, step: int) -> JobView:
    """A job that stands, with a committed checkpoint at its last step."""
    job_id = stack.submit(**STEPS).id
    stack.at_step(job_id, step)
    stack.client.pause(job_id, StopRequest(checkpoint="required"))
    paused = stack.rested(job_id)
    assert paused.state is JobState.PAUSED, (paused.reason, paused.failure)
    return paused


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def shard_of(stack: Stack, checkpoint: str, rank: int = 1) -> Path:
    view = stack.client.checkpoint(checkpoint)
    folder = CommitChain(stack.home / "checkpoints", view.job_id).shard_folder(view.id)
    return folder / view.shards[rank].name


def resumed(stack: Stack, job_id: str) -> JobView:
    stack.client.resume(job_id, ResumeRequest())
    return stack.rested(job_id)


def kinds(stack: Stack, job_id: str) -> list[str]:
    return [event.kind for event in stack.client.events(job_id).items]


def test_a_job_goes_on_past_a_corrupt_checkpoint_and_says_so(
    stack: Stack, undisturbed: dict[int, float | None]
) -> None:
    job = paused_behind(stack, 70)
    latest = stack.client.checkpoint(str(job.latest_checkpoint))
    assert latest.step > 60
    path = shard_of(stack, latest.id)
    flip_a_bit(path)
    done = resumed(stack, job.id)
    assert done.state is JobState.SUCCEEDED, (done.reason, done.failure)
    assert done.restarts == 0, "the storage's fault costs no restart"
    assert stack.losses(job.id) == undisturbed
    events = stack.client.events(job.id).items
    (corrupt,) = (event for event in events if event.kind == "checkpoint.corrupt")
    assert corrupt.data["file"] == f"shards/{latest.id}/{path.name}"
    steps = [stack.client.checkpoint(str(a.resumed_from)).step for a in _later(stack, job.id)]
    # On a busy machine the pause comes late, after more than one commit.
    assert steps == [latest.step, (latest.step - 1) // 60 * 60]
    assert stack.client.checkpoint(latest.id).state is CheckpointState.CORRUPT

    # What people do about it, by the command line.
    refused = typed(stack.url, "verify", latest.id)
    assert (refused.returncode, "CORRUPT" in refused.stdout) == (1, True), refused.stderr
    flip_a_bit(path)
    restored = typed(stack.url, "verify", latest.id)
    assert (restored.returncode, "COMMITTED" in restored.stdout) == (0, True), restored.stderr
    exported = typed(stack.url, "export", latest.id)
    assert exported.returncode == 0, exported.stdout + exported.stderr
    view = stack.client.checkpoint(latest.id).export
    assert view is not None
    folder = stack.home / "checkpoints" / view.folder
    assert sum((folder / name).stat().st_size for name in view.files) == view.bytes
    assert typed(stack.url, "pin", latest.id).returncode == 0
    assert "pinned" in typed(stack.url, "checkpoints", job.id).stdout
    kept = typed(stack.url, "rm-checkpoint", latest.id)
    assert kept.returncode == 2
    assert "unpin" in kept.stderr
    assert typed(stack.url, "unpin", latest.id).returncode == 0
    assert typed(stack.url, "rm-checkpoint", latest.id).returncode == 0
    until(lambda: not path.parent.exists())
    until(lambda: _is_forgotten(stack, latest.id))


def test_a_checkpoint_that_could_not_be_read_does_not_pass_as_verified(stack: Stack) -> None:
    job = stack.rested(stack.submit().id)
    latest = str(job.latest_checkpoint)
    assert typed(stack.url, "verify", latest).returncode == 0
    path = shard_of(stack, latest, rank=0)
    aside = path.rename(path.with_suffix(".aside"))
    path.mkdir()
    unread = typed(stack.url, "verify", latest)
    assert unread.returncode == 2, unread.stdout
    assert f"could not read it; `meshloom events {job.id}` says why" in " ".join(
        unread.stderr.split()
    )
    assert kinds(stack, job.id)[-1] == "checkpoint.unread"
    assert stack.client.checkpoint(latest).state is CheckpointState.COMMITTED
    path.rmdir()
    aside.rename(path)
    assert typed(stack.url, "verify", latest).returncode == 0


def _later(stack: Stack, job_id: str) -> list[AttemptView]:
    return list(stack.client.attempts(job_id).items[1:])


def _is_forgotten(stack: Stack, checkpoint: str) -> bool:
    try:
        stack.client.checkpoint(checkpoint)
    except RefusedError as error:
        return error.problem.status == 404
    return False


def truncate(record: Path, _: int) -> None:
    record.write_bytes(record.read_bytes()[:100])


def flip_the_step(record: Path, step: int) -> None:
    content = record.read_bytes()
    record.write_bytes(
        content.replace(f'"step": {step},'.encode(), f'"step": {step ^ 1},'.encode())
    )


@pytest.mark.parametrize("damage", [truncate, flip_the_step])
def test_a_damaged_manifest_costs_its_checkpoint_and_no_other(
    stack: Stack, undisturbed: dict[int, float | None], damage: Callable[[Path, int], None]
) -> None:
    job = paused_behind(stack, 70)
    latest = stack.client.checkpoint(str(job.latest_checkpoint))
    record = _record_of(stack, latest)
    whole = record.read_bytes()
    damage(record, latest.step)
    damaged = record.read_bytes()
    assert damaged != whole
    done = resumed(stack, job.id)
    assert done.state is JobState.SUCCEEDED, (done.reason, done.failure)
    assert stack.losses(job.id) == undisturbed
    assert {"checkpoint.chain_damaged", "checkpoint.corrupt"} <= set(kinds(stack, job.id))
    assert record.read_bytes() == damaged, "nothing is ever written over a damaged record"


def _record_of(stack: Stack, checkpoint: CheckpointView) -> Path:
    chain = stack.home / "checkpoints" / checkpoint.job_id / "chain"
    (record,) = (
        path
        for path in chain.glob("*.json")
        if json.loads(path.read_bytes()).get("checkpoint_id") == checkpoint.id
    )
    return record


def test_a_job_whose_every_checkpoint_is_lost_fails_and_never_starts_over(stack: Stack) -> None:
    job = paused_behind(stack, 10)
    for each in stack.client.checkpoints(job.id).items:
        shard_of(stack, each.id).unlink()
    failed = resumed(stack, job.id)
    assert failed.state is JobState.FAILED
    assert failed.exit_reason is ExitReason.CHECKPOINT_FAILED
    assert "there is no other committed checkpoint" in str(failed.reason)
    with pytest.raises(RefusedError, match="every checkpoint"):
        stack.client.resume(job.id, ResumeRequest())


def test_the_best_checkpoint_is_kept_and_cloned_from_and_a_run_ends_early(stack: Stack) -> None:
    # By this metric and mode the first evaluation is the best one, and none gets better by so much.
    early = {"patience": 2, "min_delta": 100.0}
    job = stack.submit(
        train={"steps": 400, "global_batch": 4, "seed": 7, "eval_every": 5, "early_stop": early},
        checkpoint={"every_steps": 5, "keep_last": 1, "keep_best": {"mode": "max"}},
    )
    done = stack.rested(job.id)
    assert done.state is JobState.SUCCEEDED, (done.reason, done.failure)
    assert (done.reason or "").startswith("stopped early: validation loss did not improve in 2")
    assert done.progress.step == 15
    until(lambda: len(stack.client.checkpoints(job.id).items) == 2)  # the deletion of step 10
    last, best = stack.client.checkpoints(job.id).items
    assert [(each.step, each.best) for each in (last, best)] == [(15, False), (5, True)]
    assert (done.evaluation.loss if done.evaluation else None) == last.evaluation["loss"]
    shown = typed(stack.url, "checkpoints", job.id)
    assert (shown.returncode, "best" in shown.stdout) == (0, True), shown.stdout + shown.stderr
    overrides = {"train": {"steps": 10, "early_stop": None}}
    wanted = CloneRequest.model_validate({"overrides": overrides, "from_checkpoint": "best"})
    clone = stack.client.clone(job.id, wanted)
    assert clone.cloned_from is not None
    assert clone.cloned_from.checkpoint_id == best.id
    assert stack.rested(clone.id).state is JobState.SUCCEEDED
