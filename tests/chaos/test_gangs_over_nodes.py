"""A gang on several nodes starts, fails, moves and goes on as one: real agents, real ranks."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.contract.api.queue import DrainRequest
from services.contract.api.views import JobView, ResumeRequest, StopRequest
from services.contract.jobs.traces import TraceRequest
from services.contract.words.states import ExitReason, FailureClass, JobState, NodeState, TraceState
from tests.chaos.conftest import LONG, check, eventually, finish, paced, set_pace
from tests.chaos.invariants import Losses
from tests.cluster import Cluster
from tests.parts import gone

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

HEAD, OTHER, LARGE = "loom-1", "loom-2", "loom-3"
STEPS = 60
WIDE = {
    **LONG,
    "train": {"steps": STEPS, "global_batch": 4, "seed": 7},
    "checkpoint": {"every_steps": 10},
    "resources": {"ranks": 4, "device": "cpu"},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two small nodes, and one that is as large as both."""
    with Cluster(tmp_path_factory.mktemp("cluster"), {HEAD: 2, OTHER: 2, LARGE: 4}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> Losses:
    """The losses of the same job on one node, which nobody disturbs."""
    job = cluster.submit(**WIDE, model=paced(cluster.folder / "no-orders", 0.0))
    done = cluster.rested(job.id)
    assert done.state is JobState.SUCCEEDED, done.failure
    assert nodes_of(done) == [LARGE] * 4
    check(cluster, job.id)
    return cluster.losses(job.id)


@pytest.fixture
def over_two(cluster: Cluster, undisturbed: Losses, tmp_path: Path) -> JobView:
    """The job on the two small nodes, once it has committed a checkpoint."""
    assert len(undisturbed) == STEPS
    cluster.client.drain(LARGE, DrainRequest())
    job = cluster.submit(**WIDE, model=paced(tmp_path, 0.1))
    running = cluster.committed(job.id)
    assert nodes_of(running) == [HEAD, HEAD, OTHER, OTHER]
    return running


def test_a_rank_that_is_frozen_or_killed_is_named_whichever_node_told_first(
    cluster: Cluster, over_two: JobView, undisturbed: Losses
) -> None:
    job_id = over_two.id
    ranks = [cluster.rank_pid(job_id, rank, attempt=1) for rank in range(4)]
    ranks[3].suspend()
    cluster.at_step(job_id, 1, attempt=2)
    assert gone(ranks)
    cluster.rank_pid(job_id, 2, attempt=2).kill()
    done = finish(cluster, job_id, undisturbed)
    assert done.restarts == 2
    (frozen, killed, last) = cluster.client.attempts(job_id).items
    assert frozen.exit_reason is ExitReason.HANG
    assert frozen.failure is not None
    assert (frozen.failure.rank, frozen.failure.node_id) == (3, OTHER)
    assert killed.failure is not None
    assert (killed.failure.rank, killed.failure.node_id) == (2, OTHER)
    assert killed.failure.signal == "SIGKILL"
    assert last.resumed_from is not None


def test_ranks_of_both_nodes_are_recorded_and_those_that_wait_for_a_slow_one_do_not_hang(
    cluster: Cluster, over_two: JobView, undisturbed: Losses, tmp_path: Path
) -> None:
    job_id = over_two.id
    (tmp_path / "rank-0").write_text("take long over traces")
    wanted = TraceRequest(steps=2, ranks=(3, 0))
    asked = cluster.client.record_trace(job_id, wanted)
    eventually(lambda: cluster.client.trace(job_id, asked.id).ended_at)
    trace = cluster.client.trace(job_id, asked.id)
    assert trace.state is TraceState.DONE, trace.reason
    assert [(file.rank, file.node_id) for file in trace.files] == [(0, HEAD), (3, OTHER)]
    assert all(Path(file.path).stat().st_size == file.bytes for file in trace.files)
    assert finish(cluster, job_id, undisturbed).attempt == 1


@pytest.mark.parametrize("victim", [OTHER, HEAD])
def test_a_killed_agent_ends_the_ranks_of_both_nodes_and_the_job_goes_on_from_its_commit(
    cluster: Cluster, over_two: JobView, undisturbed: Losses, victim: str
) -> None:
    job_id = over_two.id
    node = cluster.nodes[victim]
    ranks = [cluster.rank_pid(job_id, rank, attempt=1) for rank in range(4)]
    family = node.family()
    node.kill()
    eventually(lambda: gone([*ranks, *family]))
    eventually(lambda: node.left_over() == [])
    waiting = cluster.in_state(job_id, JobState.RESTARTING)
    assert waiting.attempt == 1
    node.start()
    done = finish(cluster, job_id, undisturbed)
    (first, second) = cluster.client.attempts(job_id).items
    assert first.exit_reason is ExitReason.NODE_LOST
    assert cluster.client.diagnosis(job_id).verdict is FailureClass.NODE_LOST
    assert second.resumed_from is not None
    assert done.attempt == 2


def test_a_frozen_node_is_left_and_finds_nothing_to_do_when_it_wakes(
    cluster: Cluster, over_two: JobView, undisturbed: Losses
) -> None:
    job_id = over_two.id
    node = cluster.nodes[OTHER]
    zombies = [cluster.rank_pid(job_id, rank, attempt=1) for rank in (2, 3)]
    peers = [cluster.rank_pid(job_id, rank, attempt=1) for rank in (0, 1)]
    node.freeze()
    cluster.client.undrain(LARGE)
    moved = cluster.at_step(job_id, 1, attempt=2)
    assert nodes_of(moved) == [LARGE] * 4
    assert gone(peers)
    (first, _) = cluster.client.attempts(job_id).items
    assert first.exit_reason is ExitReason.NODE_LOST
    assert all(zombie.status() == psutil.STATUS_STOPPED for zombie in zombies)
    assert cluster.node_view(OTHER).state is NodeState.LOST
    node.thaw()
    eventually(lambda: gone(zombies))
    eventually(lambda: cluster.node_view(OTHER).state is NodeState.READY)
    done = finish(cluster, job_id, undisturbed)
    assert done.attempt == 2
    eventually(lambda: node.left_over() == [])


def test_a_pause_and_a_drain_take_a_checkpoint_across_nodes_and_lose_no_step(
    cluster: Cluster, over_two: JobView, undisturbed: Losses
) -> None:
    job_id = over_two.id
    cluster.client.pause(job_id, StopRequest(checkpoint="required"))
    paused = cluster.in_state(job_id, JobState.PAUSED)
    newest = cluster.client.checkpoint(str(paused.latest_checkpoint))
    (first,) = cluster.client.attempts(job_id).items
    assert (newest.step, newest.world_size) == (first.last_step, 4)
    assert {shard.rank for shard in newest.shards} == {0, 1, 2, 3}
    cluster.client.resume(job_id, ResumeRequest())
    again = cluster.at_step(job_id, newest.step + 1, attempt=2)
    assert nodes_of(again) == [HEAD, HEAD, OTHER, OTHER]
    cluster.client.undrain(LARGE)
    cluster.client.drain(HEAD, DrainRequest())
    moved = cluster.at_step(job_id, 1, attempt=3)
    assert nodes_of(moved) == [LARGE] * 4
    cluster.client.undrain(HEAD)
    done = finish(cluster, job_id, undisturbed)
    assert done.restarts == 0
    assert [a.lost_steps for a in cluster.client.attempts(job_id).items] == [0, 0, 0]


def test_an_elastic_job_goes_on_without_a_lost_node_and_grows_when_it_is_back(
    cluster: Cluster, undisturbed: Losses, tmp_path: Path
) -> None:
    cluster.client.drain(LARGE, DrainRequest())
    asked = {
        "resources": {"world": {"min": 2, "max": 4}, "device": "cpu"},
        # The pace changes, and that is no hang.
        "faults": {"hang_timeout_s": 100, "max_restarts": 1},
        "model": paced(tmp_path, 0.1),
    }
    job_id = cluster.submit(**WIDE | asked).id
    assert nodes_of(cluster.committed(job_id)) == [HEAD, HEAD, OTHER, OTHER]
    set_pace(tmp_path, 3.0)  # until the node is back
    cluster.nodes[OTHER].kill()
    smaller = cluster.at_step(job_id, 1, attempt=2)
    assert nodes_of(smaller) == [HEAD, HEAD]
    assert (smaller.world_size, smaller.restarts) == (2, 1)
    assert cluster.node_view(OTHER).state is NodeState.LOST
    cluster.nodes[OTHER].start()
    eventually(lambda: OTHER in cluster.ready())
    set_pace(tmp_path, 0.6)
    whole = cluster.at_step(job_id, 1, attempt=3)
    assert nodes_of(whole) == [HEAD, HEAD, OTHER, OTHER]
    done = finish(cluster, job_id, undisturbed, tolerance=1e-5)
    assert done.restarts == 1
    (first, second, last) = cluster.client.attempts(job_id).items
    assert [a.world_size for a in (first, second, last)] == [4, 2, 4]
    assert first.exit_reason is ExitReason.NODE_LOST
    assert (second.exit_reason, second.lost_steps) == (ExitReason.RESIZED, 0)
    assert last.resumed_from is not None


def nodes_of(job: JobView) -> list[str]:
    assert job.plan is not None
    return [rank.node_id for rank in job.plan.ranks]
