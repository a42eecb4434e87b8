"""A whole Meshloom for the tests: real Redis, controller, agent and ranks, on a home of its own."""

import contextlib
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from meshloom.client import RestClient as Client
from services.cli.errors import CliError
from services.contract.api.views import JobView
from services.contract.words.states import JobState, NodeState
from services.local.settings import child_environment
from tests.waiting import until

USER_MODELS = Path(__file__).parent / "user_models"
REST = {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.PAUSED}


# Some seconds, most of them rests: there is time to disturb it, and others have the processor.
LONG: dict[str, object] = {
    "model": {
        "factory": "paced_models:PacedDecoder",
        "args": {"pace_s": 0.03, "dim": 32, "layers": 2, "heads": 2},
    },
    "train": {"steps": 80, "global_batch": 4, "seed": 7},
    "checkpoint": {"every_steps": 20},
}


def tiny_spec(**changes: object) -> dict[str, object]:
    """A job of two ranks that takes a second or two, and waits for no plan."""
    spec: dict[str, object] = {
        "name": "tiny",
        "model": {"factory": "decoder", "args": {"dim": 32, "layers": 2, "heads": 2}},
        "data": {"factory": "stdlib_bytes", "args": {"seq_len": 32}},
        "optimizer": {"factory": "adamw", "args": {"lr": 0.003}},
        "train": {"steps": 40, "global_batch": 4, "seed": 7},
        "resources": {"ranks": 2, "device": "cpu"},
        "checkpoint": {"every_steps": 20},
        "plan": "default",
    }
    return {**spec, **changes}


@dataclass
class Stack:
    """A running stack: its owner's process, its home and a client."""

    process: subprocess.Popen[bytes]
    home: Path
    url: str
    client: Client

    def part(self, name: str) -> psutil.Process:
        """The process of a part: ``services.controller``, ``redis-server`` and so on."""
        return until(lambda: self._find(name))

    def _find(self, name: str) -> psutil.Process | None:
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = child.cmdline()
                if name in words or any(word.split(" ")[0].endswith(f"/{name}") for word in words):
                    return child
        return None

    def submit(self, **changes: object) -> JobView:
        return self.client.submit(tiny_spec(**changes))

    def at_step(self, job_id: str, step: int) -> JobView:
        """The job once it has made ``step`` steps and has not come to rest."""

        def look() -> JobView | None:
            job = self.job(job_id)
            assert job.state not in REST, f"{job.state}: {job.reason} {job.failure}"
            return job if job.progress.step >= step else None

        return until(look)

    def rested(self, job_id: str, *, timeout_s: float = 120.0) -> JobView:
        """The job once it has ended or is paused."""

        def look() -> JobView | None:
            job = self.job(job_id)
            return job if job.state in REST else None

        return until(look, timeout_s=timeout_s)

    def job(self, job_id: str) -> JobView:
        return self.client.job(job_id)

    def losses(self, job_id: str) -> dict[int, float | None]:
        return {
            record.step: record.loss
            for record in self.client.metrics(job_id, max_points=10_000).items
        }


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One stack for all tests: they kill its parts, and it must bear that."""
    with running_stack(tmp_path_factory.mktemp("home")) as running:
        yield running


@contextlib.contextmanager
def running_stack(home: Path, *before: str, **changes: str) -> Iterator[Stack]:
    """A stack on a home of its own until the block ends.

    Args:
        home: Where it lives.
        before: A command that becomes the one behind it.
        changes: Of its environment.
    """
    port = free_port()
    environment = {
        name: value
        for name, value in child_environment().items()
        if not name.startswith("MESHLOOM_")
    }
    environment |= {
        "MESHLOOM_HOME": str(home),
        "MESHLOOM_PORT": str(port),
        "MESHLOOM_CPU_SLOTS": "4",
        "MESHLOOM_MEASURE_IDLE_S": "0",  # it takes seconds; few tests plan
        "MESHLOOM_USER_PATH": str(USER_MODELS),
        **changes,
    }
    with (home / "stack.log").open("ab") as log:
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "services.local", "up"],
            env=environment,
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with Client(url, patience_s=60) as client:
            until(lambda: _ready(client, process, home))
            yield Stack(process, home, url, client)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (home / "stack.log").read_text()


def _ready(client: Client, process: subprocess.Popen[bytes], home: Path) -> bool:
    assert process.poll() is None, (home / "stack.log").read_text()
    try:
        return any(node.state is NodeState.READY for node in client.nodes().items)
    except CliError:
        return False


def free_port() -> int:
    """A port that was free a moment ago, of those that the kernel gives to no connection by itself.

    One of the others may be the near end of somebody's connection by the time that a server asks for it.
    """
    lowest, own = 20_000, 0  # below are those of Ray
    with contextlib.suppress(OSError):  # not on Linux
        given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        own = int(given[0]) - lowest
    while True:
        wanted = lowest + secrets.randbelow(own) if own > 0 else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", wanted))
            return int(probe.getsockname()[1])
