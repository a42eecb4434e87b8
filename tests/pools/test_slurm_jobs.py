"""Jobs on nodes that Slurm brings: a real Slurm, controller, Redis, agents and ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.contract.words.states import JobState
from tests.chaos.conftest import paced, set_pace
from tests.cluster import Cluster
from tests.pools.pooled import LAST_CHECKPOINT, lost_by, only_ready_one, pooled, reservations
from tests.pools.slurm_cluster import SlurmCluster, why_not_here
from tests.waiting import until

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.redis,
    pytest.mark.timeout(900),  # a scheduler and six agents: long on a busy machine
    pytest.mark.skipif(why_not_here() is not None, reason=why_not_here() or ""),
]


@pytest.fixture
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster(4) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Cluster]:
    """Without any node; its pool may have all of Slurm's."""
    pool = {"kind": "slurm", "max_nodes": 4, "options": [f"--output={tmp_path}/%x.log"]}
    with pooled(tmp_path, pool, slurm.marks, **slurm.variables) as cluster:
        yield cluster


def test_a_job_waits_trains_moves_before_a_time_limit_survives_a_lost_node_and_gives_all_nodes_back(
    slurm: SlurmCluster, cluster: Cluster, tmp_path: Path
) -> None:
    wrap = "--wrap=sleep 600"
    taken = slurm.say("sbatch", "--parsable", "--nodes=3", "-o", "/dev/null", wrap).strip()
    until(lambda: len(slurm.idle_nodes()) == 1)
    # No checkpoint but that of an agent which is told to end. The rests last longer than all that happens.
    long = {"train": {"steps": 30, "global_batch": 4, "seed": 7}, **LAST_CHECKPOINT}
    job = cluster.submit(**long, model=paced(tmp_path, 3.0))
    waiting = "waiting for 2 nodes of pool hpc: Resources"
    cluster.job_when(job.id, lambda now: now.state is JobState.QUEUED and now.reason == waiting)
    assert not cluster.client.nodes().items

    slurm.say("scancel", taken)
    cluster.at_step(job.id, 1)
    first = only_ready_one(cluster)
    assert len(first.node_ids) == 2

    # As Slurm does before a time limit, whose whole minutes would take too long here.
    slurm.say("scancel", "--batch", "--signal=USR1", f"--name=meshloom-{first.id}")
    cluster.at_step(job.id, 2, attempt=2)
    one, two = cluster.client.attempts(job.id).items
    assert (one.exit_reason, two.resumed_from is not None) == ("node_drained", True)

    slurm.kill_node_of(cluster.rank_pid(job.id, 1, attempt=2))
    cluster.at_step(job.id, 1, attempt=3)
    set_pace(tmp_path, 0.0)
    done = cluster.rested(job.id)
    assert done.state is JobState.SUCCEEDED, done.failure
    *_, last = cluster.client.attempts(job.id).items
    assert last.resumed_from == two.resumed_from
    names = slurm.say("squeue", "-h", "--states=all", "-o", "%j").split()
    assert len([name for name in names if name.startswith("meshloom-")]) == 3
    lost_by(cluster, "the pool took its nodes back: Slurm's job ")

    until(lambda: not reservations(cluster))
    until(lambda: not cluster.client.nodes().items)
    slurm.repair()
    until(lambda: len(slurm.idle_nodes()) == 4)
    until(lambda: not slurm.processes())
