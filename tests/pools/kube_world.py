"""Kubernetes, with Kueue, as the conformance suite sees it."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import psutil

from services.controller.adapters.pools.kubernetes import KubernetesPool
from services.controller.adapters.pools.kubernetes_job import (
    OWNER,
    POOL,
    RESERVATION,
    job_manifest,
)
from services.controller.adapters.pools.pools_file import KubernetesPoolConfig
from services.controller.ports.pools import NodePool
from tests.pools.kube_access import NAMESPACE
from tests.pools.kube_cluster import KubeCluster
from tests.pools.kube_control_plane import ControlledKubeCluster
from tests.waiting import until

_NODES: Final = 4
_NO_QUOTA: Final = "couldn't assign flavors to pod set main: insufficient"


class KubeWorld:
    """A cluster of four nodes, and pools that ask it by a queue of Kueue."""

    busy = f"{_NO_QUOTA} unused quota for cpu in flavor default-flavor, 1 more needed"
    impossible = frozenset(
        {
            f"{_NO_QUOTA} quota for cpu in flavor default-flavor, previously considered podsets requests (0) + current podset request (9) > maximum capacity (4)",
            "Unschedulable: 0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector.",
        }
    )
    refusal = None
    ended = "has ended: exit code 137"
    ends_by_itself = True
    foreign = "KUBERNETES_"

    def __init__(self) -> None:
        self.cluster = self.made()
        self._pools: list[KubernetesPool] = []

    def __enter__(self) -> Self:
        self.cluster.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.__exit__()

    def made(self) -> KubeCluster:
        """The cluster, not yet started."""
        return KubeCluster(_NODES)

    @property
    def marks(self) -> Mapping[str, str]:
        return self.cluster.marks

    def config(self, **fields: object) -> KubernetesPoolConfig:
        """Of a pool whose pods this cluster can have."""
        known = {
            "kind": "kubernetes",
            "name": "hpc",
            "cpu_slots": 1,
            "max_nodes": 9,
            "grace_s": 20,
            "namespace": NAMESPACE,
            "image": "meshloom-worker",
            "queue": "agents",
            "kubeconfig": self.cluster.kubeconfig,
        }
        return KubernetesPoolConfig.model_validate({**known, **fields})

    def open(self, config: KubernetesPoolConfig) -> KubernetesPool:
        """A pool that ``close_pools`` closes."""
        pool = KubernetesPool(config, "meshloom", answer_s=5)
        self._pools.append(pool)
        return pool

    def pool(self, *, grace_s: float = 20, unknown_kind: bool = False) -> NodePool:
        selector = {"kind": "nowhere"} if unknown_kind else {}
        return self.open(self.config(grace_s=grace_s, node_selector=selector))

    def close_pools(self) -> None:
        for pool in self._pools:
            asyncio.run(pool.close())
        self._pools.clear()

    def requests(self, reservation_id: str) -> int:
        """Pods are counted: of one name there is one Job at most."""
        listed = self.cluster.api.ask(
            "GET",
            f"api/v1/namespaces/{NAMESPACE}/pods?labelSelector=meshloom/reservation={reservation_id}",
        )
        return len(listed["items"])

    def processes(self) -> Sequence[psutil.Process]:
        return self.cluster.processes()

    def kill_node_of(self, process: psutil.Process) -> None:
        self.cluster.kill_node_of(process)

    def freeze_node_of(self, process: psutil.Process) -> None:
        self.cluster.freeze_node_of(process)

    def repair_nodes(self) -> None:
        self.cluster.repair()
        until(lambda: len(self._ready()) == _NODES)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        with self.cluster.silent():
            yield

    @contextlib.contextmanager
    def imitated(self, reservation_id: str) -> Iterator[None]:
        """With our labels, and another name."""
        labels = {OWNER: "meshloom", POOL: "hpc", RESERVATION: reservation_id}
        job = job_manifest(reservation_id, labels, ["hpc-1"], self.config(queue=None))
        jobs = f"apis/batch/v1/namespaces/{NAMESPACE}/jobs"
        self.cluster.api.ask("POST", jobs, job)
        try:
            yield
        finally:
            self.cluster.api.ask("DELETE", f"{jobs}/{reservation_id}")

    def _ready(self) -> list[str]:
        nodes = self.cluster.api.ask("GET", "api/v1/nodes")["items"]
        return [
            node["metadata"]["name"]
            for node in nodes
            if any(
                each["type"] == "Ready" and each["status"] == "True"
                for each in node["status"]["conditions"]
            )
        ]


class ControlledKubeWorld(KubeWorld):
    """The same with a real control plane.

    Args:
        programs: The folder with its programs.
    """

    # As of the release.
    impossible = KubeWorld.impossible | {
        "Unschedulable: 0/4 nodes are available: 4 node(s) didn't match Pod's node affinity."
    }

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        super().__init__()

    def made(self) -> KubeCluster:
        """See ``KubeWorld.made``."""
        return ControlledKubeCluster(_NODES, self._programs)
