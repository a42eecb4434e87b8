"""A job over two agents that share no folder: its checkpoints lie in a bucket, and so it goes on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshloom.client.downloads import PartialFile
from services.contract.jobs.traces import TraceRequest, TraceView
from services.contract.words.ids import checkpoint_id
from services.contract.words.states import JobState, TraceState
from tests.chaos import invariants
from tests.chaos.conftest import paced
from tests.cluster import PATIENCE_S, Cluster
from tests.s3_server import BUCKET, Fault, S3Server, s3_server
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

STEPS, EVERY, HELD_AT = 12, 3, 8
JOB = {
    "train": {"steps": STEPS, "global_batch": 4, "seed": 7},
    "checkpoint": {"every_steps": EVERY},
    "resources": {"ranks": 2, "device": "cpu"},
    "faults": {"hang_timeout_s": 600},
}
RANKS = 2


@pytest.fixture
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def cluster(server: S3Server, tmp_path: Path) -> Iterator[Cluster]:
    stored = {**server.environment, "MESHLOOM_CHECKPOINT_ROOT": f"s3://{BUCKET}/cluster"}
    with Cluster(tmp_path, {"loom-1": 1, "loom-2": 1}, stored, **stored) as cluster:
        yield cluster


def test_a_job_over_two_nodes_without_shared_storage_goes_on_from_the_bucket(
    cluster: Cluster, server: S3Server, tmp_path: Path
) -> None:
    undisturbed = cluster.submit(**JOB, model=paced(tmp_path / "no-orders", 0.0))
    assert cluster.rested(undisturbed.id).state is JobState.SUCCEEDED
    orders = tmp_path / "orders"
    orders.mkdir()
    hold = orders / "hold"
    hold.write_text(str(HELD_AT))
    # Each rank's first shard is taken. From then on the job says what it waits for, and trains on.
    server.fail(Fault(methods=("PUT",), within="/shards/", after=RANKS))
    job = cluster.submit(**JOB, model=paced(orders, 0.0))
    waits = cluster.job_when(job.id, lambda job: "SlowDown" in (job.reason or ""))
    assert "s3://checkpoints/cluster answers SlowDown (HTTP 503)" in (waits.reason or "")
    cluster.at_step(job.id, HELD_AT)
    until(lambda: _commits(server, job.id) >= 1, timeout_s=PATIENCE_S)
    assert _commits(server, job.id) == 1
    server.repair()
    until(lambda: _commits(server, job.id) > 1, timeout_s=PATIENCE_S)
    cluster.rank_pid(job.id, 1, attempt=1).kill()
    cluster.job_when(job.id, lambda job: job.attempt > 1)
    hold.unlink()
    done = cluster.rested(job.id)
    assert done.state is JobState.SUCCEEDED, done.failure
    attempts = cluster.client.attempts(job.id).items
    assert len(attempts) == 2
    resumed = attempts[-1].resumed_from
    assert resumed is not None
    assert resumed == checkpoint_id(job.id, 2 * EVERY, 1)
    losses = cluster.losses(undisturbed.id)
    invariants.check_losses(cluster.losses(job.id), losses, attempts, STEPS)
    assert not cluster.storage.exists()
    assert done.latest_checkpoint is not None
    _download(cluster, done.latest_checkpoint, tmp_path)
    _record(cluster, server, tmp_path)


def _record(cluster: Cluster, server: S3Server, folder: Path) -> None:
    """The traces of both ranks are in the bucket, whichever node they were recorded on."""
    job = cluster.submit(**JOB, model=paced(folder / "traced", 0.3))
    cluster.at_step(job.id, 1)
    trace = cluster.client.record_trace(job.id, TraceRequest(steps=1, ranks="all")).id

    def done() -> TraceView | None:
        view = cluster.client.trace(job.id, trace)
        assert view.state is not TraceState.FAILED, view.reason
        return view if view.state is TraceState.DONE else None

    paths = {file.path for file in until(done, timeout_s=PATIENCE_S).files}
    stored = {f"s3://{BUCKET}/{key}" for key in server.keys(f"cluster/{job.id}/traces/")}
    assert paths == stored
    assert len(paths) == RANKS


def _commits(server: S3Server, job_id: str) -> int:
    """How many records the chain has behind that of the attempt."""
    keys = server.keys(f"cluster/{job_id}/chain/")
    return len([key for key in keys if key.endswith(".json")]) - 1


def _download(cluster: Cluster, checkpoint: str, folder: Path) -> None:
    """The controller gives out an export that it reads from the bucket."""
    cluster.client.export(checkpoint)
    until(
        lambda: (view := cluster.client.checkpoint(checkpoint).export) and view.state == "DONE",
        timeout_s=PATIENCE_S,
    )
    manifest = cluster.client.export_files(checkpoint)
    assert "model.safetensors" in {file.name for file in manifest.files}
    for file in manifest.files:
        partial = PartialFile(folder, file)
        cluster.client.download(checkpoint, file.name, partial)
        partial.finish()  # it compares the digest
