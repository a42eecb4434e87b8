"""A real agent in a process of its own, with the test in the controller's place."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import redis
from pydantic import JsonValue

from fsdp_core.plan.model import MeshPlan, ShardingPlan
from services.contract.jobs.plans import GangPlan, RankPlacement
from services.contract.jobs.specs import JobSpec
from services.contract.messages.board import MAX_STEP, BoardReader
from services.contract.messages.commands import Command, LaunchGang
from services.contract.messages.facts import (
    FACT,
    Fact,
    GangEnded,
    GangLaunched,
    GangProgressed,
    NodeJoined,
)
from services.contract.messages.telemetry import LogLine, MetricRecord, StepRecord
from services.contract.redis import redis_keys
from services.contract.words.ids import new_job_id
from services.controller.adapters.redis.telemetry_names import PLAIN_NAMES, TelemetryNames
from services.local.settings import child_environment
from services.worker.agent.host.folders import NodeFolder
from services.worker.agent.host.processes import marked, sweep
from tests.waiting import until

F = TypeVar("F", bound=Fact)

NODE = "node-under-test"
JOB = new_job_id(1_700_000_000_000, bytes(10))
FOREVER = MAX_STEP
PROGRAMS = Path(__file__).parent / "programs"


def spec(ranks: int = 2, steps: int = 5, **options: JsonValue) -> JobSpec:
    """A job for ``programs/rank_program.py``."""
    return JobSpec.model_validate(
        {
            "model": {"factory": "none:none", "args": options},
            "data": {"factory": "none"},
            "train": {"steps": steps, "global_batch": ranks},
            "resources": {"ranks": ranks, "device": "cpu"},
        }
    )


def launch(fence: int = 1, ranks: int = 2, steps: int = 5, **options: JsonValue) -> LaunchGang:
    places = tuple(
        RankPlacement(rank=rank, node_id=NODE, local_rank=rank, device="cpu")
        for rank in range(ranks)
    )
    plan = GangPlan(
        device_type="cpu", sharding=ShardingPlan(mesh=MeshPlan(dp_shard=ranks)), ranks=places
    )
    return LaunchGang(job_id=JOB, fence=fence, spec=spec(ranks, steps, **options), plan=plan)


@dataclass
class Controller:
    """What a controller does to an agent: it writes inboxes and reads facts, and telemetry under its ``names``."""

    url: str
    names: TelemetryNames = PLAIN_NAMES
    client: "redis.Redis" = field(init=False)

    def __post_init__(self) -> None:
        self.client = redis.Redis.from_url(self.url, decode_responses=True, protocol=2)

    def open_job(self, fence: int = 1) -> None:
        self.client.hset(redis_keys.job(JOB), "fence", str(fence))

    def send(self, *commands: Command) -> None:
        for command in map(self.names.told, commands):
            self.client.xadd(
                redis_keys.node_inbox(NODE), {redis_keys.MESSAGE_FIELD: command.model_dump_json()}
            )

    def facts(self) -> list[Fact]:
        arrived: Any = self.client.lrange(redis_keys.node_facts(NODE), 0, -1)
        return [FACT.validate_json(text) for text in arrived]

    def steps(self) -> list[StepRecord]:
        stream = self._stream(redis_keys.job_steps(self.names.of(JOB)))
        return [StepRecord.model_validate_json(text) for text in stream]

    def metrics(self) -> list[MetricRecord]:
        stream = self._stream(redis_keys.job_metrics(self.names.of(JOB)))
        return [MetricRecord.model_validate_json(text) for text in stream]

    def logs(self) -> list[LogLine]:
        stream = self._stream(redis_keys.job_logs(self.names.of(JOB)))
        return [LogLine.model_validate_json(text) for text in stream]

    def all_of(self, kind: type[F]) -> list[F]:
        return [fact for fact in self.facts() if isinstance(fact, kind)]

    def fact(self, kind: type[F], which: Callable[[F], bool] = lambda _: True) -> F:
        """The first such fact, once it is there."""
        return until(lambda: next((f for f in self.all_of(kind) if which(f)), None))

    def _stream(self, key: str) -> list[str]:
        entries: Any = self.client.xrange(key)
        return [fields[redis_keys.MESSAGE_FIELD] for _, fields in entries]


@dataclass
class AgentProcess:
    """A running agent."""

    process: subprocess.Popen[bytes]
    home: Path
    log: Path

    @property
    def folder(self) -> NodeFolder:
        return NodeFolder(self.home, NODE)

    @property
    def checkpoint_root(self) -> Path:
        return self.home / "checkpoints"

    def marked(self) -> list[int]:
        """The live processes that this agent answers for."""
        return [process.pid for process in marked(self.folder.mark)]

    def warm(self) -> psutil.Process:
        """The process that forks its ranks."""
        pids = self.marked()
        (warm,) = (p for p in map(psutil.Process, pids) if p.ppid() not in pids and _is_template(p))
        return warm

    def template(self) -> psutil.Process:
        """The process of which ``warm`` is a fork."""
        parent = self.warm().parent()
        assert parent is not None
        return parent

    def sentinel(self) -> psutil.Process:
        """The process that ends what it leaves."""
        return self._child("services.worker.agent.host.sentinel")

    def _child(self, module: str) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        (child,) = (child for child in children if module in child.cmdline())
        return child

    def kill(self) -> None:
        if os.getpgid(self.process.pid) == self.process.pid:  # it is the agent's parent
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def _is_template(process: psutil.Process) -> bool:
    return "services.worker.rank.process.template" in process.cmdline()


StartAgent = Callable[..., AgentProcess]


@pytest.fixture
def controller(redis_url: str) -> Iterator[Controller]:
    controller = Controller(redis_url)
    yield controller
    controller.client.close()


@contextlib.contextmanager
def agents_on(redis_url: str, folder: Path) -> Iterator[StartAgent]:
    """Starts agents, and ends them with the block; by default on one home and this Redis."""
    agents: list[AgentProcess] = []

    def start(
        url: str = redis_url,
        home: Path = folder / "home",
        *,
        below_a_parent: bool = False,
        **env: str,
    ) -> AgentProcess:
        log = folder / f"agent-{len(agents)}.log"
        environment = child_environment(
            **{
                "MESHLOOM_REDIS_URL": url,
                "MESHLOOM_HOME": str(home),
                "MESHLOOM_NODE_ID": NODE,
                "MESHLOOM_USER_PATH": str(PROGRAMS),
                "MESHLOOM_TRAINER": "rank_program:train",
                "MESHLOOM_MEASURE_IDLE_S": "0",
                "PYTHONPATH": str(Path(__file__).parents[2]),
                **env,
            }
        )
        command = [sys.executable, "-m", "services.worker.agent"]
        if below_a_parent:
            run = "import subprocess, sys; subprocess.call(sys.argv[1:])"
            command = [sys.executable, "-c", run, *command]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=below_a_parent,
            )
        agents.append(AgentProcess(process, home, log))
        return agents[-1]

    try:
        yield start
    finally:
        _end(agents)


def _end(agents: list[AgentProcess]) -> None:
    for agent in agents:
        if agent.process.poll() is None:
            agent.kill()
    try:
        until(lambda: not any(agent.marked() for agent in agents))
    finally:
        for agent in agents:
            sweep(agent.folder.mark)
            agent.folder.remove_boards()
            sys.stdout.write(agent.log.read_text())


@pytest.fixture
def start_agent(redis_url: str, tmp_path: Path) -> Iterator[StartAgent]:
    """Starts agents, and ends them with the test."""
    with agents_on(redis_url, tmp_path) as start:
        yield start


@pytest.fixture
def agent(start_agent: StartAgent, controller: Controller) -> AgentProcess:
    """An agent that has joined, for a job whose first attempt is open."""
    controller.open_job()
    agent = start_agent()
    controller.fact(NodeJoined)
    return agent


def ended(controller: Controller, fence: int = 1) -> GangEnded:
    return controller.fact(GangEnded, lambda fact: fact.fence == fence)


def launched(controller: Controller, fence: int = 1) -> GangLaunched:
    return controller.fact(GangLaunched, lambda fact: fact.fence == fence)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def running(controller: Controller, **options: JsonValue) -> GangLaunched:
    """A gang that steps forever, once it has begun to."""
    controller.send(launch(1, 2, FOREVER, pause_s=0.01, **options))
    controller.fact(GangProgressed)
    return launched(controller)


def step_of(reader: BoardReader) -> int:
    snapshot = reader.read()
    return snapshot.step if snapshot is not None else 0
