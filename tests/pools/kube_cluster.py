"""A stand-in for a Kubernetes cluster on one machine: API server with controllers, and a kubelet for each node.

No kube-apiserver is in the registries from which tests may install. See ``kube_api_server`` for what is served.
"""

import contextlib
import json
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Self

import psutil

from services.local.settings import child_environment
from tests.e2e.conftest import free_port
from tests.parts import Part
from tests.pools.kube_api_server import CLIENT_TOKEN
from tests.pools.kube_kubelet import NODE_MARK, Server
from tests.waiting import until

_MARK: Final = "MARK_OF_KUBE_CLUSTER"
RULES: Final = (
    {
        "apiGroups": ["batch"],
        "resources": ["jobs"],
        "verbs": ["create", "get", "list", "patch", "delete"],
    },
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["list"]},
)


def why_not_here() -> str | None:
    """Why it cannot run here; None: it can."""
    missing = [name for name in ("kubernetes", "kubernetes_validate") if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


class KubeCluster:
    """Nodes of one CPU each; use it as a context manager in the main thread, with which all dies.

    Args:
        nodes: How many.
        rules: What the client may do, as of a Role.

    Attributes:
        folder: Of all files; volumes of pods are below the folders of their nodes.
        kubeconfig: With which clients find it.
        server: The API server's process.
        nodes: The kubelets by node.
        api: For what a test looks up or makes itself.
    """

    def __init__(self, nodes: int, rules: Sequence[Mapping[str, Sequence[str]]] = RULES) -> None:
        self._mark = secrets.token_hex(8)
        self._names = [f"n{number}" for number in range(1, nodes + 1)]
        self._rules = rules

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kube-")))
            self.folder = folder
            stack.callback(self._kill_all)
            port = free_port()
            address = f"http://127.0.0.1:{port}"
            self.kubeconfig = folder / "kubeconfig"
            self.kubeconfig.write_text(json.dumps(_kubeconfig(address)))
            rules = folder / "rules.json"
            rules.write_text(json.dumps(self._rules))
            self.api = Server(address)
            self.server = _part(
                folder, "api-server", "tests.pools.kube_api_server", str(port), str(rules)
            )
            _start(self.server, stack)
            until(self._answers)
            self.nodes = {
                name: _part(
                    folder, name, "tests.pools.kube_kubelet", address, name, str(folder / name)
                )
                for name in self._names
            }
            for name, node in self.nodes.items():
                self.api.ask("POST", "api/v1/nodes", _node(name))
                _start(node, stack)
            self._parts = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    @property
    def marks(self) -> Mapping[str, str]:
        """What marks a process as one of this cluster's."""
        return {_MARK: self._mark}

    def processes(self) -> list[psutil.Process]:
        """Live processes of agents and what they have started."""
        return list(self._marked(_MARK, self._mark))

    def agent_of(self, rank: psutil.Process) -> psutil.Process:
        """The agent that has started a rank, whose environment has no marks."""
        above = rank.parents()
        return next(process for process in self.processes() if process in above)

    def kill_node_of(self, process: psutil.Process) -> None:
        """``kill -9`` of all that a machine's loss would end."""
        name = process.environ()[NODE_MARK]
        there = self._on(name)
        self.nodes[name].kill()
        for each in there:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()

    def freeze_node_of(self, process: psutil.Process) -> None:
        """SIGSTOP of all that a hanging machine would stop."""
        name = process.environ()[NODE_MARK]
        psutil.Process(self.nodes[name].pid).suspend()
        for each in self._on(name):
            each.suspend()

    def repair(self) -> None:
        """Have frozen nodes go on, and start those that were killed."""
        for name, node in self.nodes.items():
            if not node.is_running:
                node.start()
                continue
            for process in self._on(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
            psutil.Process(node.pid).resume()

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """The API server stopped until the block ends."""
        process = psutil.Process(self.server.pid)
        process.suspend()
        try:
            yield
        finally:
            process.resume()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.api.ask("GET", "api/v1/nodes"))
        return False

    def _on(self, node: str) -> list[psutil.Process]:
        mine = set(self.processes())
        return [process for process in self._marked(NODE_MARK, node) if process in mine]

    def _marked(self, name: str, value: str) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_marked = process.environ().get(name) == value
                if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def _kill_all(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _start(part: Part, stack: contextlib.ExitStack) -> None:
    stack.callback(part.stop)
    part.start()


def _part(folder: Path, name: str, module: str, *words: str) -> Part:
    command = [sys.executable, "-m", module, *words]
    return Part(name, command, child_environment(), folder / f"{name}.log")


def _node(name: str) -> dict[str, object]:
    return {
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name},
            "annotations": {"beat": ""},
        },
        "status": {
            "allocatable": {"cpu": "1"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def _kubeconfig(address: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [{"name": "tests", "cluster": {"server": address}}],
        "users": [{"name": "controller", "user": {"token": CLIENT_TOKEN}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "controller"}}],
    }
