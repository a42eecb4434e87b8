"""A real Ray cluster of several nodes on one machine, in processes of its own.

``python -m tests.pools.ray_cluster`` starts it and prints its address; each line that it reads adds a node, whose
process it prints. It ends with its standard input. A head that runs nothing keeps the state; each further node offers one CPU.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Final, Self

import psutil

from services.local.settings import child_environment
from tests.parts import gone
from tests.waiting import until

_MARK: Final = "MARK_OF_RAY_CLUSTER"
_STORE_BYTES: Final = 80 << 20
# A node that stands still is given up after some seven seconds: by default it takes Ray twenty.
_HEALTH_CHECKS: Final = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 4,
}


def why_not_here() -> str | None:
    """Why no Ray can run here; None: one can."""
    return None if find_spec("ray") else "ray is not installed (extra `ray`)"


class RayCluster:
    """All daemons; use it as a context manager.

    Args:
        nodes: How many offer a CPU.

    Attributes:
        address: Of the cluster's state.
        nodes: The raylets.
    """

    def __init__(self, nodes: int) -> None:
        self._count = nodes
        self.mark = f"{os.getpid()}-{id(self)}"

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.pools.ray_cluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(**self.marks),
            text=True,
        )
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline())
        self.address: str = told["address"]
        self.head = psutil.Process(told["gcs"])
        self.nodes: list[psutil.Process] = []
        self.repair()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            with contextlib.suppress(psutil.Error):
                node.resume()
        assert self._process.stdin is not None
        with self._process:
            self._process.stdin.close()
        left = list(self.processes())
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        until(lambda: gone(left))

    def repair(self) -> None:
        """Have as many nodes as at first, in place of those that are lost or stand still."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        lost = [
            node for node in self.nodes if gone([node]) or node.status() == psutil.STATUS_STOPPED
        ]
        for node in [node for node in lost if not gone([node])]:
            for process in [*node.children(recursive=True), node]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.nodes = [node for node in self.nodes if node not in lost]
        while len(self.nodes) < self._count:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            told = json.loads(self._process.stdout.readline())
            self.nodes.append(psutil.Process(told["raylet"]))

    @property
    def marks(self) -> Mapping[str, str]:
        """Variables by which its processes, and theirs, are found."""
        return {_MARK: self.mark}

    def processes(self) -> Iterator[psutil.Process]:
        """All of them that live."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self.mark and not gone([process]):
                    yield process

    def node_of(self, process: psutil.Process) -> psutil.Process:
        """The raylet under which a process runs."""
        return next(node for node in self.nodes if node in process.parents())

    def kill(self, node: psutil.Process) -> None:
        """A machine burns: all that ran there goes with it."""
        for process in [node, *node.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def freeze(self, node: psutil.Process) -> None:
        """A machine stands still."""
        for process in [node, *node.children(recursive=True)]:
            process.send_signal(signal.SIGSTOP)


def main() -> None:
    """Hold a cluster until standard input ends."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 only this process loads it

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    head = {
        "num_cpus": 0,
        "include_dashboard": False,
        "object_store_memory": _STORE_BYTES,
        "_system_config": _HEALTH_CHECKS,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    assert cluster.head_node is not None
    gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
    print(json.dumps({"address": cluster.address, "gcs": gcs}), file=answers, flush=True)
    for _ in sys.stdin:
        node = cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
        raylet = node.all_processes["raylet"][0].process.pid
        print(json.dumps({"raylet": raylet}), file=answers, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
