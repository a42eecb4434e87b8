"""Jobs on nodes that Ray brings: a real Ray of four nodes, controller, Redis, agents and ranks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.contract.words.states import JobState
from tests.chaos.conftest import paced
from tests.cluster import Cluster
from tests.parts import gone
from tests.pools.pooled import (
    CHECKPOINTS,
    again_gave_up,
    launch_again,
    lost_by,
    of_agents,
    only_ready_one,
    pooled,
    reservations,
)
from tests.pools.ray_cluster import AGENTS, RayCluster, marked, why_not_here
from tests.waiting import until

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.redis,
    pytest.mark.timeout(900),  # a scheduler and six agents: long on a busy machine
    pytest.mark.skipif(why_not_here() is not None, reason=why_not_here() or ""),
]


@pytest.fixture
def ray() -> Iterator[RayCluster]:
    with RayCluster(4) as cluster:
        yield cluster


@contextlib.contextmanager
def pooled_by(ray: RayCluster, folder: Path, **settings: str) -> Iterator[Cluster]:
    """Without any node; its pool may have more than Ray has."""
    pool = {"kind": "ray", "address": ray.address, "max_nodes": 9}
    with pooled(folder, pool, {AGENTS: ray.mark}, **settings) as cluster:
        yield cluster


@pytest.fixture
def cluster(ray: RayCluster, tmp_path: Path) -> Iterator[Cluster]:
    with pooled_by(ray, tmp_path) as cluster:
        yield cluster


def test_three_nodes_train_on_while_the_head_restarts_four_wait_and_a_lost_one_costs_no_committed_step(
    ray: RayCluster, cluster: Cluster, tmp_path: Path
) -> None:
    endless = {"train": {"steps": 100_000, "global_batch": 12, "seed": 7}, **CHECKPOINTS}
    job = cluster.submit(**endless, model=paced(tmp_path, 0.3), resources={"ranks": 3})
    first = only_ready_one(cluster)
    assert len(first.node_ids) == 3
    cluster.at_step(job.id, 1)
    cluster.committed(job.id)
    launch_again(cluster, first)

    larger = cluster.submit(**endless, model=paced(tmp_path, 0.3), resources={"ranks": 4})
    waiting = "waiting for 4 nodes of pool hpc: not enough nodes of Ray are free"
    cluster.job_when(larger.id, lambda now: now.state is JobState.QUEUED and now.reason == waiting)
    cluster.client.kill(larger.id)
    cluster.rested(larger.id)

    ray.kill_head()
    ray.start_head()
    after = cluster.job(job.id).progress.step + 2
    cluster.at_step(job.id, after)
    again_gave_up(cluster)
    rank = cluster.rank_pid(job.id, 1, attempt=1)
    assert rank in of_agents(cluster)
    assert first in reservations(cluster)

    ray.kill(ray.node_of(rank))
    cluster.at_step(job.id, 0, attempt=2)
    _, last = cluster.client.attempts(job.id).items
    assert last.resumed_from is not None
    cluster.at_step(job.id, cluster.job(job.id).progress.step + 1, attempt=2)
    cluster.client.kill(job.id)
    cluster.rested(job.id)
    lost_by(cluster, "some of its nodes ended: the agent of hpc-")

    until(lambda: not reservations(cluster))
    until(lambda: not cluster.client.nodes().items)
    until(lambda: not marked(AGENTS, ray.mark) and not of_agents(cluster))


def test_a_head_that_kept_no_state_costs_its_nodes_and_no_committed_step(tmp_path: Path) -> None:
    soon = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}  # by default a minute
    with (
        RayCluster(2, keeps_state=False, variables=soon) as ray,
        pooled_by(ray, tmp_path, **soon) as cluster,
    ):
        endless = {"train": {"steps": 100_000, "global_batch": 12, "seed": 7}, **CHECKPOINTS}
        job = cluster.submit(**endless, model=paced(tmp_path, 0.3))
        cluster.committed(job.id)
        (first,) = reservations(cluster)

        ray.kill_head()
        until(lambda: gone(ray.nodes))
        until(lambda: not marked(AGENTS, ray.mark) and not of_agents(cluster))
        cluster.job_when(job.id, lambda now: now.state is not JobState.RUNNING)
        until(lambda: cluster.ready() == set())  # their leases end one by one
        kept = cluster.job(job.id).latest_checkpoint
        assert kept is not None

        ray.start_head()
        ray.repair()
        cluster.at_step(job.id, 1, attempt=2)
        _, *_, last = cluster.client.attempts(job.id).items
        assert last.resumed_from == kept
        assert first not in reservations(cluster)
        lost_by(cluster)
        cluster.client.kill(job.id)
        cluster.rested(job.id)
        until(lambda: not reservations(cluster))
        until(lambda: not marked(AGENTS, ray.mark) and not of_agents(cluster))
