"""Slurm as the conformance suite sees it."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import psutil

from services.controller.adapters.pools.pools_file import SlurmPoolConfig
from services.controller.adapters.pools.slurm import SlurmPool
from services.controller.ports.pools import NodePool
from tests.pools.slurm_cluster import SlurmCluster
from tests.waiting import until

_NODES = 4


class SlurmWorld:
    """A cluster of four nodes, and pools that ask it."""

    busy = "Resources"
    impossible = frozenset({"PartitionNodeLimit", "PartitionConfig"})
    refusal = "invalid partition specified: nowhere"
    ended = "FAILED"
    ends_by_itself = True
    foreign = "SLURM_"

    def __init__(self) -> None:
        self._cluster = SlurmCluster(_NODES)

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.__exit__()

    @property
    def marks(self) -> Mapping[str, str]:
        return self._cluster.marks

    def pool(self, *, grace_s: float = 20, unknown_kind: bool = False) -> NodePool:
        options = ("--partition=nowhere",) if unknown_kind else ()
        config = SlurmPoolConfig(
            kind="slurm", name="hpc", cpu_slots=1, max_nodes=9, grace_s=grace_s, options=options
        )
        return SlurmPool(config, variables=self._cluster.variables)

    def close_pools(self) -> None:
        pass  # they keep nothing

    def requests(self, reservation_id: str) -> int:
        states = self._cluster.batch_jobs(f"meshloom-{reservation_id}")
        return len(states) - states.count("CANCELLED")

    def processes(self) -> Sequence[psutil.Process]:
        return self._cluster.processes()

    def kill_node_of(self, process: psutil.Process) -> None:
        self._cluster.kill_node_of(process)

    def freeze_node_of(self, process: psutil.Process) -> None:
        self._cluster.freeze_node_of(process)

    def repair_nodes(self) -> None:
        self._cluster.repair()
        until(lambda: len(self._cluster.idle_nodes()) == _NODES)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        with self._cluster.without_controller():
            yield

    @contextlib.contextmanager
    def imitated(self, reservation_id: str) -> Iterator[None]:
        """With our comment, and another name."""
        comment = "--comment=meshloom owner=meshloom pool=hpc nodes=1"
        job = ("--hold", f"--job-name={reservation_id}", comment, "--wrap=true")
        number = self._cluster.say("sbatch", "--parsable", *job).strip()
        try:
            yield
        finally:
            self._cluster.say("scancel", number)
