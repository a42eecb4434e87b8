"""A job on nodes that Kubernetes's stand-in brings: controller, Redis, agents and ranks are real."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.contract.words.states import JobState
from tests.chaos.conftest import paced, set_pace
from tests.cluster import Cluster
from tests.pools.kube_access import NAMESPACE
from tests.pools.kube_cluster import KubeCluster, why_not_here
from tests.pools.kube_control_plane import ControlledKubeCluster
from tests.pools.pooled import (
    LAST_CHECKPOINT,
    lost_by,
    of_agents,
    only_ready_one,
    pooled,
    reservations,
)
from tests.waiting import until

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.redis,
    pytest.mark.timeout(900),  # a scheduler and six agents: long on a busy machine
    pytest.mark.skipif(why_not_here() is not None, reason=why_not_here() or ""),
]

# No checkpoint but that of an agent which is asked to end.
SHORT = {"train": {"steps": 30, "global_batch": 12, "seed": 7}, **LAST_CHECKPOINT}


@pytest.fixture(
    params=["stand-in", pytest.param("control-plane", marks=pytest.mark.kubernetes)],
)
def kubernetes(request: pytest.FixtureRequest) -> Iterator[KubeCluster]:
    is_real = request.param == "control-plane"
    made = (
        ControlledKubeCluster(4, request.getfixturevalue("kube_programs"))
        if is_real
        else KubeCluster(4)
    )
    with made as cluster:
        yield cluster


@pytest.fixture
def cluster(kubernetes: KubeCluster, tmp_path: Path) -> Iterator[Cluster]:
    """Without any node; its pool may have more than Kubernetes has."""
    pool = {
        "kind": "kubernetes",
        "max_nodes": 9,
        "namespace": NAMESPACE,
        "image": "meshloom-worker",
        "queue": "agents",
        "kubeconfig": str(kubernetes.kubeconfig),
    }
    with pooled(tmp_path, pool, kubernetes.marks) as cluster:
        yield cluster


def test_a_job_waits_for_kueue_moves_when_a_pod_is_evicted_survives_a_lost_node_and_gives_all_nodes_back(
    kubernetes: KubeCluster, cluster: Cluster, tmp_path: Path
) -> None:
    larger = cluster.submit(**SHORT, model=paced(tmp_path, 0.3), resources={"ranks": 6})
    waiting = "waiting for 6 nodes of pool hpc: couldn't assign flavors to pod set main: insufficient quota for cpu"
    cluster.job_when(
        larger.id,
        lambda now: now.state is JobState.QUEUED and (now.reason or "").startswith(waiting),
    )
    assert not cluster.client.nodes().items
    cluster.client.kill(larger.id)
    cluster.rested(larger.id)

    job = cluster.submit(**SHORT, model=paced(tmp_path, 3.0))
    cluster.at_step(job.id, 1)
    first = only_ready_one(cluster)
    assert len(first.node_ids) == 2

    path = f"api/v1/namespaces/{NAMESPACE}/pods"
    pods = kubernetes.api.ask("GET", f"{path}?labelSelector=meshloom/reservation={first.id}")
    kubernetes.api.ask("DELETE", f"{path}/{pods['items'][0]['metadata']['name']}")
    cluster.at_step(job.id, 2, attempt=2)
    one, two = cluster.client.attempts(job.id).items
    assert (one.exit_reason, two.resumed_from is not None) == ("node_drained", True)

    rank = cluster.rank_pid(job.id, 1, attempt=2)
    assert rank in of_agents(cluster)
    kubernetes.kill_node_of(kubernetes.agent_of(rank))
    set_pace(tmp_path, 0.0)
    kubernetes.repair()
    done = cluster.rested(job.id)
    assert done.state is JobState.SUCCEEDED, done.failure
    *_, last = cluster.client.attempts(job.id).items
    assert last.resumed_from == two.resumed_from
    lost_by(cluster, "some of its nodes ended: ", "the pool took its nodes back: ")

    until(lambda: not reservations(cluster))
    until(lambda: not cluster.client.nodes().items)
    until(lambda: not kubernetes.processes() and not of_agents(cluster))
