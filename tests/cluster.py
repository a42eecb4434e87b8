"""A cluster on one machine: a real Redis, a controller and agents, each to be killed or frozen.

Nothing is started again by itself, so that a test says what comes back, and when. Everything dies
with the test; what the processes wrote stays in the cluster's folder::

    <folder>/<part>.log        controller, loom-1, loom-2, …
    <folder>/homes/<node>/     the node's home: logs of ranks, records of attempts
    <folder>/checkpoints/      the storage that all nodes share
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self
from urllib.parse import urlsplit

import psutil

from meshloom.client import RestClient as Client
from services.cli.errors import CliError
from services.contract.api.views import JobView, NodeView
from services.contract.storage.commit_chain import CommitChain
from services.contract.words.states import JobState, NodeState
from services.local.embedded_redis import redis_program, wait_for_redis
from services.local.settings import child_environment
from tests.chaos.proxy import ChaosProxy
from tests.e2e.conftest import REST, free_port, tiny_spec
from tests.parts import ROOT, Node, Part
from tests.waiting import until

PATIENCE_S: Final = 120.0


class Cluster:
    """All parts; use it as a context manager in the main thread, with which the parts die.

    Args:
        folder: Empty, for all files.
        slots: The nodes and how many CPU ranks each takes.
        node_settings: More variables of the agents.
        settings: More variables of the controller.

    Attributes:
        redis: The server.
        controller: The only one.
        nodes: By name.
        links: The proxies between Redis and its clients, by the client's name.
        client: Speaks to the controller.
    """

    def __init__(
        self,
        folder: Path,
        slots: Mapping[str, int],
        node_settings: Mapping[str, str] = MappingProxyType({}),
        **settings: str,
    ) -> None:
        self.folder = folder
        self.links: dict[str, ChaosProxy] = {}
        self.nodes: dict[str, Node] = {}
        self._slots = slots
        self._settings = settings
        self._node_settings = node_settings
        self._environment = {
            name: value
            for name, value in child_environment().items()
            if not name.startswith("MESHLOOM_")
        }

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            program = stack.enter_context(redis_program(self.folder / "redis"))
            self.redis_url = program.url
            self.redis = Part("redis", program.command, self._environment, program.log)
            self._start(self.redis, stack)
            wait_for_redis(program.url)
            self._add_controller(stack)
            for place, (name, slots) in enumerate(self._slots.items(), start=1):
                self._add_node(name, slots, f"127.0.0.{place}", stack)
            self.client = stack.enter_context(Client(self.url, patience_s=60))
            until(lambda: self.ready() == set(self._slots), timeout_s=PATIENCE_S)
            self._parts = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    @property
    def storage(self) -> Path:
        """Where the checkpoints of all jobs lie."""
        return self.folder / "checkpoints"

    def chain(self, job_id: str) -> CommitChain:
        """The job's commit chain."""
        return CommitChain(self.storage, job_id)

    def ready(self) -> set[str]:
        """The nodes that the controller calls ready and whose lease lives."""
        with contextlib.suppress(CliError):
            nodes = self.client.nodes().items
            return {node.id for node in nodes if node.state is NodeState.READY and node.lease_s}
        return set()

    def node_view(self, name: str) -> NodeView:
        """A node as the controller sees it."""
        return next(node for node in self.client.nodes().items if node.id == name)

    def submit(self, **changes: object) -> JobView:
        """Submit the tiny job of two ranks, with changes."""
        return self.client.submit(tiny_spec(**changes))

    def job(self, job_id: str) -> JobView:
        """The job now."""
        return self.client.job(job_id)

    def at_step(self, job_id: str, step: int, *, attempt: int = 1) -> JobView:
        """The job once its attempt, or a later one, has made ``step`` steps."""

        def reached(job: JobView) -> bool:
            return job.attempt >= attempt and job.progress.step >= step

        return self.job_when(job_id, reached)

    def committed(self, job_id: str) -> JobView:
        """The job once it has a committed checkpoint."""
        return self.job_when(job_id, lambda job: job.latest_checkpoint is not None)

    def in_state(self, job_id: str, *states: JobState) -> JobView:
        """The job once it is in one of these states."""
        return self.job_when(job_id, lambda job: job.state in states)

    def job_when(self, job_id: str, condition: Callable[[JobView], bool]) -> JobView:
        """The job once it fulfils ``condition``; one that has come to rest never will."""

        def look() -> JobView | None:
            job = self.job(job_id)
            if condition(job):
                return job
            assert job.state not in REST, f"{job.state}: {job.reason} {job.failure}"
            return None

        return until(look, timeout_s=PATIENCE_S)

    def rested(self, job_id: str) -> JobView:
        """The job once it has ended or is paused."""
        return self.job_when(job_id, lambda job: job.state in REST)

    def losses(self, job_id: str) -> dict[int, float | None]:
        """The loss of each step; of one that was made twice, the last one's."""
        ask, most = self.client.metrics, 10_000
        steps = [record.step for record in ask(job_id, max_points=2).items]
        parts = (
            ask(job_id, max_points=most, from_step=first, to_step=first + most - 1).items
            for first in range(0, max(steps, default=-1) + 1, most)
        )
        return {record.step: record.loss for part in parts for record in part}

    def rank_pid(self, job_id: str, rank: int, *, attempt: int) -> psutil.Process:
        """The process of a rank of this attempt."""

        def look() -> psutil.Process | None:
            ranks = self.client.ranks(job_id)
            pids = [r.pid for r in ranks.items if r.rank == rank and r.pid is not None]
            return psutil.Process(pids[0]) if pids and ranks.attempt == attempt else None

        return until(look, timeout_s=PATIENCE_S)

    def _start(self, part: Part, stack: contextlib.ExitStack) -> None:
        stack.callback(part.stop)
        part.start()

    def _link(self, name: str, stack: contextlib.ExitStack) -> str:
        """A proxy of this client's own; answers the URL through it."""
        parts = urlsplit(self.redis_url)
        proxy = stack.enter_context(ChaosProxy.to(Path(parts.path)))
        self.links[name] = proxy
        return f"redis://:{parts.password}@127.0.0.1:{proxy.port}"

    def _add_controller(self, stack: contextlib.ExitStack) -> None:
        port = free_port()
        environment = self._environment | {
            "MESHLOOM_REDIS_URL": self._link("controller", stack),
            "MESHLOOM_HOST": "127.0.0.1",
            "MESHLOOM_PORT": str(port),
            "MESHLOOM_GROW_AFTER_S": "1",
            **self._settings,
        }
        command = [sys.executable, "-m", "services.controller"]
        self.url = f"http://127.0.0.1:{port}"
        self.controller = Part("controller", command, environment, self.folder / "controller.log")
        self._start(self.controller, stack)

    def _add_node(self, name: str, slots: int, address: str, stack: contextlib.ExitStack) -> None:
        home = self.folder / "homes" / name
        environment = self._environment | {
            "MESHLOOM_REDIS_URL": self._link(name, stack),
            "MESHLOOM_HOME": str(home),
            "MESHLOOM_CHECKPOINT_ROOT": str(self.storage),
            "MESHLOOM_NODE_ID": name,
            "MESHLOOM_ADDRESS": address,
            "MESHLOOM_CPU_SLOTS": str(slots),
            "MESHLOOM_MEASURE_IDLE_S": "0",  # it takes seconds, and nodes here share processors
            "MESHLOOM_USER_PATH": str(ROOT / "tests" / "chaos" / "user_models"),
            **self._node_settings,
        }
        command = [sys.executable, "-m", "services.worker.agent"]
        node = Node(name, command, environment, self.folder / f"{name}.log", home=home)
        self.nodes[name] = node
        stack.callback(node.thaw)
        self._start(node, stack)
