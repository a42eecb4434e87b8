"""The processes of a cluster, each to be started, killed, frozen and brought back."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from services.local.children import die_with_parent
from services.worker.agent.host.folders import NodeFolder
from services.worker.agent.host.processes import marked

ROOT: Final = Path(__file__).parents[1]
_STOP_WITHIN_S: Final = 60


@dataclass
class Part:
    """A process of the cluster: the same command in each of its lives.

    Attributes:
        name: Of the part.
        command: What is run.
        environment: All of the process's.
        log: What it writes, all lives in a row.
        process: Its present or last life.
    """

    name: str
    command: Sequence[str | Path]
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it lives, frozen or not."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """The process of its present life."""
        assert self.process is not None
        assert self.is_running, f"{self.name} is dead:\n{self.tail()}"
        return self.process.pid

    def start(self) -> None:
        """Begin a life."""
        assert not self.is_running
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 prctl is one call and takes no lock
            )

    def kill(self) -> None:
        """``kill -9``, and reap it."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def stop(self) -> None:
        """End it in an orderly way, or else by force."""
        if self.process is not None and self.is_running:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def restart(self) -> None:
        """``kill -9``, then the next life."""
        self.kill()
        self.start()

    def tail(self) -> str:
        """The last words of its log."""
        return self.log.read_text(errors="replace")[-4_000:] if self.log.exists() else ""


@dataclass
class Node(Part):
    """An agent with all that it has started.

    Attributes:
        home: The node's files.
        frozen: Processes that were stopped, in the order in which they were.
    """

    home: Path = field(default_factory=Path)
    frozen: list[psutil.Process] = field(default_factory=list)

    @property
    def mark(self) -> str:
        """What its processes carry."""
        return NodeFolder(self.home, self.name).mark

    def family(self) -> list[psutil.Process]:
        """What this life of the agent has: its children, the warm process, the ranks.

        The template of which the last two are forks may be the child of an earlier life.
        """
        life = NodeFolder(self.home, self.name).previous_incarnation()
        children = psutil.Process(self.pid).children(recursive=True)
        return list({*children, *marked(f"{self.mark}/{life}")})

    def freeze(self) -> None:
        """SIGSTOP the agent and all that it has started, as when a machine hangs."""
        agent = psutil.Process(self.pid)
        agent.suspend()  # first, so that it starts nothing more
        self.frozen = [agent, *self.family()]
        for process in self.frozen[1:]:
            process.suspend()

    def thaw(self) -> None:
        """Have it all go on."""
        for process in reversed(self.frozen):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self.frozen = []

    def left_over(self) -> list[psutil.Process]:
        """Live processes of this node that its living agent, if any, did not start."""
        own = {p.pid for p in self.family()} if self.is_running else set()
        return [p for p in marked(self.mark) if p.pid not in own]


def gone(processes: Sequence[psutil.Process]) -> bool:
    """Whether none of them lives; one that nobody has reaped is dead."""

    def lives(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    return not any(map(lives, processes))


@contextlib.contextmanager
def node_frozen(node: Node) -> Iterator[None]:
    """The node frozen until the block ends."""
    node.freeze()
    try:
        yield
    finally:
        node.thaw()
