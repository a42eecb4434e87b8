"""Ray as the conformance suite sees it."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Self

import psutil

from services.controller.adapters.pools.pools_file import RayPoolConfig
from services.controller.adapters.pools.ray import RayPool
from services.controller.ports.pools import NodePool
from services.local.settings import child_environment
from tests.pools.ray_cluster import AGENTS, RayCluster, marked

_NODES: Final = 4
_STRANGER: Final = """
import sys
import ray
from ray.util.placement_group import placement_group, remove_placement_group
ray.init(sys.argv[1], namespace="strangers", log_to_driver=False, logging_level="ERROR")
group = placement_group([{"CPU": 0.01}], name=sys.argv[2])
print("made", flush=True)
sys.stdin.read()
remove_placement_group(group)
"""


class RayWorld:
    """A cluster of four nodes, and pools that ask it."""

    busy = "not enough nodes of Ray are free"
    impossible = frozenset({"no cluster of Ray has so many nodes with these resources"})
    refusal = None
    ended = "has ended, or its node is gone"
    ends_by_itself = False
    foreign = "RAY_"

    def __init__(self) -> None:
        self._cluster = RayCluster(_NODES)
        self._pools: list[RayPool] = []

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.__exit__()

    @property
    def marks(self) -> Mapping[str, str]:
        return {AGENTS: self._cluster.mark}

    def pool(self, *, grace_s: float = 20, unknown_kind: bool = False) -> NodePool:
        config = RayPoolConfig(
            kind="ray",
            name="hpc",
            cpu_slots=1,
            max_nodes=9,
            grace_s=grace_s,
            address=self._cluster.address,
            resources={"nowhere": 1} if unknown_kind else {},
        )
        pool = RayPool(config, "meshloom", child_environment(), answer_s=15)
        self._pools.append(pool)
        return pool

    def close_pools(self) -> None:
        for pool in self._pools:
            asyncio.run(pool.close())
        self._pools.clear()

    def requests(self, reservation_id: str) -> int:
        told = asyncio.run(self.pool().sightings())
        return sum(each.id == reservation_id for each in told)

    def processes(self) -> Sequence[psutil.Process]:
        return marked(AGENTS, self._cluster.mark)

    def kill_node_of(self, process: psutil.Process) -> None:
        self._cluster.kill(self._cluster.node_of(process))

    def freeze_node_of(self, process: psutil.Process) -> None:
        self._cluster.freeze(self._cluster.node_of(process))

    def repair_nodes(self) -> None:
        self._cluster.repair()

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        self._cluster.head.suspend()
        try:
            yield
        finally:
            self._cluster.head.resume()

    @contextlib.contextmanager
    def imitated(self, reservation_id: str) -> Iterator[None]:
        """With our name, in another namespace."""
        title = f"meshloom.hpc.{reservation_id}.1"
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _STRANGER, self._cluster.address, title],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
            text=True,
        ) as stranger:
            assert stranger.stdin is not None
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "made\n"
            yield
            stranger.stdin.close()
