"""What can befall the machines of a test's cluster: each is a daemon and the processes that it has started."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping

import psutil

from tests.parts import Part


class Machines(ABC):
    """All nodes of a cluster.

    Attributes:
        nodes: Their daemons by name.
    """

    nodes: Mapping[str, Part]

    @abstractmethod
    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """Live processes that the daemon of a node has started, and theirs; by default of all nodes."""

    def node_of(self, process: psutil.Process) -> str:
        """The node on which a process runs."""
        return next(name for name in self.nodes if process in self.processes(name))

    def kill_node_of(self, process: psutil.Process) -> None:
        """``kill -9`` of all that a machine's loss would end."""
        name = self.node_of(process)
        there = self.processes(name)
        self.nodes[name].kill()
        _kill(there)

    def freeze_node_of(self, process: psutil.Process) -> None:
        """SIGSTOP of all that a hanging machine would stop."""
        name = self.node_of(process)
        psutil.Process(self.nodes[name].pid).suspend()
        for each in self.processes(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()

    def repair(self) -> None:
        """Have frozen nodes go on, and start those that were killed."""
        for name, node in self.nodes.items():
            if not node.is_running:
                node.start()
                continue
            for process in self.processes(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
            psutil.Process(node.pid).resume()

    def kill_all(self) -> None:
        """``kill -9`` of what the daemons have started."""
        _kill(self.processes())


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
