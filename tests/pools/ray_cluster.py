"""A real Ray cluster of several nodes on one machine, in processes of its own.

``python -m tests.pools.ray_cluster [FOLDER]`` starts it and prints its address. It reads orders, one a line: ``node`` adds
a node, whose process it prints, ``kill`` kills the head, and ``head`` starts another in its place. It ends with its
standard input. The head runs nothing and keeps its state in a Redis of its own, in FOLDER; without FOLDER it keeps
none. Each further node offers one CPU.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import psutil

from services.local.children import die_with_parent
from services.local.embedded_redis import find_redis_server, wait_for_redis
from services.local.settings import child_environment
from tests.e2e.conftest import free_port
from tests.parts import gone
from tests.waiting import until

_MARK: Final = "MARK_OF_RAY_CLUSTER"
AGENTS: Final = "MARK_OF_AGENTS_BY_RAY"
"""Marks agents and what they start, with the cluster's ``mark``: Ray keeps idle workers of its own."""
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
        keeps_state: Whether a head that is restarted knows what the last one knew.
        variables: More ones of all of Ray's processes.

    Attributes:
        address: Of the cluster's state.
        nodes: The raylets.
    """

    def __init__(
        self,
        nodes: int,
        *,
        keeps_state: bool = True,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._count = nodes
        self._keeps_state = keeps_state
        self._variables = variables
        self.mark = f"{os.getpid()}-{id(self)}"

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="ray-state-")
        state = [self._folder.name] if self._keeps_state else []
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.pools.ray_cluster", *state],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(**self.marks, **self._variables),
            text=True,
        )
        self._read_head()
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
        self._folder.cleanup()
        left = marked(_MARK, self.mark)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        until(lambda: gone(left))

    def kill_head(self) -> None:
        """Kill all of the head."""
        self._order("kill")
        until(lambda: gone([self.head]))

    def start_head(self) -> None:
        """Have another head on the address of the one that was killed; it reads the state if that was kept."""
        self._order("head")
        self._read_head()

    def repair(self) -> None:
        """Have as many nodes as at first, in place of those that are lost or stand still."""
        lost = [
            node for node in self.nodes if gone([node]) or node.status() == psutil.STATUS_STOPPED
        ]
        for node in [node for node in lost if not gone([node])]:
            for process in [*node.children(recursive=True), node]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.nodes = [node for node in self.nodes if node not in lost]
        while len(self.nodes) < self._count:
            self._order("node")
            self.nodes.append(psutil.Process(self._told()["raylet"]))

    def _order(self, what: str) -> None:
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)

    def _told(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        return told

    def _read_head(self) -> None:
        told = self._told()
        self.address: str = told["address"]
        self.head = psutil.Process(told["gcs"])

    @property
    def marks(self) -> Mapping[str, str]:
        """Variables by which its processes, and theirs, are found."""
        return {_MARK: self.mark}

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
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Live processes with this variable."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(variable) == value and not gone([process]):
                found.append(process)
    return found


def main() -> None:
    """Hold a cluster until standard input ends."""
    with contextlib.ExitStack() as stack:
        for folder in sys.argv[1:]:
            port = stack.enter_context(_redis(Path(folder)))
            os.environ["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{port}"  # noqa: TID251 Ray reads it there
        _hold()


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[int]:
    port = free_port()
    words = (f"--port {port} --bind 127.0.0.1 --dir {folder} --appendonly yes --save").split()
    server = subprocess.Popen(
        [find_redis_server(), *words, ""],
        stdout=subprocess.DEVNULL,
        preexec_fn=die_with_parent,  # noqa: PLW1509 prctl is one call and takes no lock
    )
    wait_for_redis(f"redis://127.0.0.1:{port}")
    yield port
    server.kill()
    server.wait()


def _hold() -> None:
    from ray.cluster_utils import Cluster  # noqa: PLC0415 only this process loads it

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cluster = Cluster()

    def start_head() -> None:
        head = cluster.add_node(
            num_cpus=0,
            include_dashboard=False,
            gcs_server_port=port,
            object_store_memory=_STORE_BYTES,
            _system_config=_HEALTH_CHECKS,
        )
        gcs = head.all_processes["gcs_server"][0].process.pid
        print(json.dumps({"address": cluster.address, "gcs": gcs}), file=answers, flush=True)

    port = free_port()
    start_head()
    for order in map(str.strip, sys.stdin):
        if order == "kill":
            cluster.remove_node(cluster.head_node, allow_graceful=False)  # type: ignore[no-untyped-call] # Ray's
            continue
        if order == "head":
            start_head()
            continue
        node = cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
        raylet = node.all_processes["raylet"][0].process.pid
        print(json.dumps({"raylet": raylet}), file=answers, flush=True)
    cluster.shutdown()  # type: ignore[no-untyped-call] # Ray's


if __name__ == "__main__":
    main()
