"""A job over two agents that share no folder: its checkpoints lie in a bucket, and so it goes on."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.contract.words.states import JobState
from tests.chaos import invariants
from tests.chaos.conftest import paced, set_pace
from tests.cluster import PATIENCE_S, Cluster
from tests.s3_server import BUCKET, Fault, S3Server, s3_server
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

STEPS = 24
JOB = {
    "train": {"steps": STEPS, "global_batch": 4, "seed": 7},
    "checkpoint": {"every_steps": 6},
    "resources": {"ranks": 2, "device": "cpu"},
}


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
    (tmp_path / "orders").mkdir()
    job = cluster.submit(**JOB, model=paced(tmp_path / "orders", 0.05))
    # Refused from the second checkpoint on: the job says so, and trains on.
    cluster.committed(job.id)
    server.fail(Fault(methods=("PUT",), within="shards"))
    waits = cluster.job_when(job.id, lambda job: "SlowDown" in (job.reason or ""))
    assert waits.attempt == 1
    server.mend()
    newest = until(lambda: _newest(server, job.id), timeout_s=PATIENCE_S)
    cluster.rank_pid(job.id, 1, attempt=1).kill()
    set_pace(tmp_path / "orders", 0.0)
    done = cluster.rested(job.id)
    assert done.state is JobState.SUCCEEDED, done.failure
    attempts = cluster.client.attempts(job.id).items
    assert len(attempts) == 2
    assert attempts[-1].resumed_from is not None
    assert attempts[-1].resumed_from >= newest
    losses = cluster.losses(undisturbed.id)
    invariants.check_losses(cluster.losses(job.id), losses, attempts, STEPS)
    # Each node has loaded what the other one's rank had written; nothing is shared but the bucket.
    for node in ("loom-1", "loom-2"):
        copies = cluster.folder / "homes" / node / "copies" / node / job.id / "shards"
        files = {path.name for path in (copies / attempts[-1].resumed_from).iterdir()}
        assert files == {"rank-00000.safetensors", "rank-00001.safetensors"}
    assert not cluster.storage.exists()
    _download(cluster, done.latest_checkpoint.id if done.latest_checkpoint else "", tmp_path)


def _newest(server: S3Server, job_id: str) -> str | None:
    """A committed checkpoint behind the first one."""
    keys = server.keys(f"cluster/{job_id}/chain/")
    if len([key for key in keys if key.endswith(".json")]) < 3:
        return None
    shards = {key.split("/")[-2] for key in server.keys(f"cluster/{job_id}/shards/")}
    return sorted(shards)[1]


def _download(cluster: Cluster, checkpoint: str, folder: Path) -> None:
    """The controller gives out an export that it reads from the bucket."""
    cluster.client.export(checkpoint)
    until(
        lambda: (view := cluster.client.checkpoint(checkpoint).export) and view.state == "DONE",
        timeout_s=PATIENCE_S,
    )
    manifest = cluster.client.exported(checkpoint)
    assert "model.safetensors" in {file.name for file in manifest.files}
    for file in manifest.files:
        path = folder / file.name
        cluster.client.download(checkpoint, file.name, path)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
