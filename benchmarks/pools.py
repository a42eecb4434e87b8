"""How long until the first step, and after a fault until the next one, on nodes that stay and on those of pools.

    python -m benchmarks.pools [--rounds 5] [--only static slurm ray kubernetes]

Nodes that joined by themselves (``static``), a real Slurm, a real Ray and the tests' stand-in for Kubernetes, each of
four nodes of one CPU slot on this machine; a scheduler that cannot run here is left out. In each round a job of two ranks with a checkpoint each 20
steps is submitted; then one of its ranks, the agent of one, and the node of one are killed with SIGKILL, each
once the attempt has committed a checkpoint. *Lost* is the time from the kill to the first step of the next attempt. Then
the job is killed, and its nodes go back after an idle time-out of one second. Figures are the median, the lowest and the
highest of the rounds.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil
import redis

from services.contract.redis import redis_keys as keys
from services.controller.domain.scheduling.reservations import Reservation
from tests.cluster import Cluster
from tests.pools import kube_cluster, ray_cluster, slurm_cluster
from tests.pools.kube_access import NAMESPACE
from tests.pools.kube_cluster import KubeCluster
from tests.pools.pooled import of_agents, pooled, reservations
from tests.pools.ray_cluster import RayCluster
from tests.pools.slurm_cluster import SlurmCluster
from tests.waiting import until

_NODES: Final = 4
_JOB: Final = {
    "train": {"steps": 10**6, "global_batch": 4, "seed": 7},
    "checkpoint": {"every_steps": 20},
}
_IDLE_S: Final = 1.0


@dataclass(frozen=True)
class Rig:
    """A cluster, and what can befall the node under a process.

    Attributes:
        cluster: With the controller.
        has_pool: Whether nodes come and go.
        kill_node: All that runs on the node of a victim.
        repair: Have all nodes again.
    """

    cluster: Cluster
    has_pool: bool
    kill_node: Callable[["_Victim"], None]
    repair: Callable[[], None]


def main() -> None:
    """Measures each in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=_RIGS, default=list(_RIGS), help="these")
    wanted = parser.parse_args()
    for name in wanted.only:
        rig, why_not = _RIGS[name]
        if (missing := why_not()) is not None:
            sys.stdout.write(f"{name}: {missing}\n")
            continue
        with tempfile.TemporaryDirectory(prefix="pools-") as folder, rig(Path(folder)) as made:
            # The first one finds no file of Python's in memory.
            _round(made, {})
            found: dict[str, list[float]] = {}
            load = os.getloadavg()[0]
            for _ in range(wanted.rounds):
                _round(made, found)
            sys.stdout.write(f"{name}, load {load:.1f} to {os.getloadavg()[0]:.1f}\n")
            for what, seconds in found.items():
                sys.stdout.write(f"  {what}: {_spread(seconds)} s\n")
            if made.has_pool:
                sys.stdout.write(f"  {_given_back(made.cluster)}\n")
        sys.stdout.flush()


def _round(rig: Rig, found: dict[str, list[float]]) -> None:
    """One job, its faults and its end."""

    def note(what: str, seconds: float) -> None:
        found.setdefault(what, []).append(seconds)

    cluster = rig.cluster
    job = cluster.submit(**_JOB)
    first_step_at = until(lambda: _first_step_at(cluster, job.id))
    note("submit to first step", (first_step_at - job.created_at).total_seconds())
    if rig.has_pool:
        (reserved,) = reservations(cluster)
        note("of which nodes come", _seconds(reserved.requested_at, reserved.ready_at))
    for what, kill in _FAULTS.items():
        note(f"lost by a killed {what}", _lost(rig, job.id, kill))
        rig.repair()
    used = {each.node_id for each in cluster.client.ranks(job.id).items}
    cluster.client.kill(job.id)
    cluster.rested(job.id)
    if rig.has_pool:
        began = datetime.now(UTC)
        # Not those of nodes that were killed: a scheduler ends them when it finds these dead.
        until(lambda: not any(used & set(each.node_ids) for each in reservations(cluster)))
        note("given back after", (datetime.now(UTC) - began).total_seconds())
        until(lambda: not (reservations(cluster) or of_agents(cluster)))


def _first_step_at(cluster: Cluster, job_id: str) -> datetime | None:
    """Of the first attempt that made one. A fact tells it, which may come after the first samples."""
    attempts = cluster.client.attempts(job_id).items
    return next((each.first_step_at for each in attempts if each.first_step_at), None)


def _lost(rig: Rig, job_id: str, kill: Callable[[Rig, "_Victim"], None]) -> float:
    client = rig.cluster.client

    def committed() -> int | None:
        newest = client.attempts(job_id).items[-1].fence
        checkpoints = client.checkpoints(job_id).items
        is_committed = any(c.fence == newest and c.committed_at for c in checkpoints)
        return newest if is_committed else None

    before = until(committed)
    victim = _Victim(
        rank=rig.cluster.rank_pid(job_id, 1, attempt=before),
        node_id=next(each.node_id for each in client.ranks(job_id).items if each.rank == 1),
    )
    killed_at = datetime.now(UTC)
    kill(rig, victim)

    def restarted() -> float | None:
        last = client.attempts(job_id).items[-1]
        if last.fence == before or last.first_step_at is None:
            return None
        return (last.first_step_at - killed_at).total_seconds()

    return until(restarted)


@dataclass(frozen=True)
class _Victim:
    """A rank, and the agent of its node."""

    rank: psutil.Process
    node_id: str

    def agent(self, cluster: Cluster) -> psutil.Process:
        home = cluster.folder / "homes" / self.node_id
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_agent = "services.worker.agent" in process.cmdline()
                if is_agent and process.environ().get("MESHLOOM_HOME") == str(home):
                    return process
        raise LookupError(f"no agent of {self.node_id}")


_FAULTS: Final[Mapping[str, Callable[[Rig, _Victim], None]]] = {
    "rank": lambda _, victim: victim.rank.kill(),
    "agent": lambda rig, victim: victim.agent(rig.cluster).kill(),
    "node": lambda rig, victim: rig.kill_node(victim),
}


def _given_back(cluster: Cluster) -> str:
    with redis.Redis.from_url(cluster.redis_url) as server:
        rows = server.lrange(keys.ENDED_RESERVATIONS, 0, -1)
    ended = [Reservation.model_validate_json(row) for row in rows]
    nodes = sum(len(each.node_ids) for each in ended)
    lost = sum(each.is_lost for each in ended)
    return f"{nodes} nodes in {len(ended)} reservations, of which {lost} were lost; none is left"


def _seconds(begin: datetime, end: datetime | None) -> float:
    if end is None:
        raise ValueError("it has not happened")
    return (end - begin).total_seconds()


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


@contextlib.contextmanager
def _static(folder: Path) -> Iterator[Rig]:
    with Cluster(folder, {f"loom-{number}": 1 for number in range(1, _NODES + 1)}) as cluster:

        def kill_node(victim: _Victim) -> None:
            node = cluster.nodes[victim.node_id]
            family = node.family()
            node.kill()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

        def repair() -> None:
            for node in cluster.nodes.values():
                if not node.is_running:
                    node.start()
            until(lambda: cluster.ready() == set(cluster.nodes))

        yield Rig(cluster, has_pool=False, kill_node=kill_node, repair=repair)


@contextlib.contextmanager
def _slurm(folder: Path) -> Iterator[Rig]:
    pool = {"kind": "slurm", "max_nodes": 2 * _NODES, "idle_timeout_s": _IDLE_S}
    with (
        SlurmCluster(_NODES) as slurm,
        pooled(folder, pool, slurm.marks, **slurm.variables) as cluster,
    ):

        def kill_node(victim: _Victim) -> None:
            # The agent, for a rank's parents may have ended.
            slurm.kill_node_of(victim.agent(cluster))

        yield Rig(cluster, has_pool=True, kill_node=kill_node, repair=slurm.repair)


@contextlib.contextmanager
def _kubernetes(folder: Path) -> Iterator[Rig]:
    with KubeCluster(_NODES) as kubernetes:
        pool = {
            "kind": "kubernetes",
            "max_nodes": 2 * _NODES,
            "idle_timeout_s": _IDLE_S,
            "namespace": NAMESPACE,
            "image": "meshloom-worker",
            "queue": "agents",
            "kubeconfig": str(kubernetes.kubeconfig),
        }
        with pooled(folder, pool, kubernetes.marks) as cluster:

            def kill_node(victim: _Victim) -> None:
                kubernetes.kill_node_of(victim.agent(cluster))

            yield Rig(cluster, has_pool=True, kill_node=kill_node, repair=kubernetes.repair)


@contextlib.contextmanager
def _ray(folder: Path) -> Iterator[Rig]:
    with RayCluster(_NODES) as ray:
        pool = {
            "kind": "ray",
            "address": ray.address,
            "max_nodes": 2 * _NODES,
            "idle_timeout_s": _IDLE_S,
        }

        def kill_node(victim: _Victim) -> None:
            ray.kill(ray.node_of(victim.agent(cluster)))

        with pooled(folder, pool, {}) as cluster:
            yield Rig(cluster, has_pool=True, kill_node=kill_node, repair=ray.repair)


_RIGS: Final[
    Mapping[str, tuple[Callable[[Path], AbstractContextManager[Rig]], Callable[[], str | None]]]
] = {
    "static": (_static, lambda: None),
    "slurm": (_slurm, slurm_cluster.why_not_here),
    "ray": (_ray, ray_cluster.why_not_here),
    "kubernetes": (_kubernetes, kube_cluster.why_not_here),
}


if __name__ == "__main__":
    main()
