"""A stand-in for a Kubernetes cluster on one machine: API server with controllers, and a kubelet for each node.

No kube-apiserver is in the registries from which tests may install. See ``kube_api_server`` for what is served.
"""

import contextlib
import json
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Self

import psutil

from services.local.settings import child_environment
from tests.e2e.conftest import free_port
from tests.parts import Part, gone
from tests.pools.kube_access import Server
from tests.pools.kube_api_server import CLIENT_TOKEN
from tests.pools.kube_kubelet import NODE_MARK
from tests.pools.machines import Machines
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


@dataclass(frozen=True)
class Access:
    """An API server that answers.

    Attributes:
        address: Its URL.
        token: Of a client that has the rights of ``RULES``.
        ca: The file of its authority; None: it has no TLS.
    """

    address: str
    token: str
    ca: Path | None = None


class KubeCluster(Machines):
    """Nodes of one CPU each; use it as a context manager in the main thread, with which all dies.

    Args:
        nodes: How many.

    Attributes:
        folder: Of all files; volumes of pods are below the folders of their nodes.
        kubeconfig: With which clients find it.
        server: The API server's process.
        access: For clients.
        nodes: The kubelets by node.
        api: For what a test looks up or makes itself.
    """

    server: Part

    def __init__(self, nodes: int) -> None:
        self._mark = secrets.token_hex(8)
        self._names = [f"n{number}" for number in range(1, nodes + 1)]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kube-")))
            self.folder = folder
            stack.callback(self.kill_all)
            self.access = access = self.serve(stack)
            self.api = Server(access.address, access.ca)
            self.kubeconfig = folder / "kubeconfig"
            self.kubeconfig.write_text(json.dumps(kubeconfig(access)))
            ca = () if access.ca is None else (str(access.ca),)
            self.nodes = {
                name: self.python_part(
                    name, "kube_kubelet", access.address, name, str(folder / name), *ca
                )
                for name in self._names
            }
            for node in self.nodes.values():
                started(node, stack)
            until(lambda: len(self.api.ask("GET", "api/v1/nodes")["items"]) == len(self.nodes))
            self._parts = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def serve(self, stack: contextlib.ExitStack) -> Access:
        """Start the API server and the controllers, which end with ``stack``."""
        port = free_port()
        rules = self.folder / "rules.json"
        rules.write_text(json.dumps(RULES))
        self.server = self.python_part("api-server", "kube_api_server", str(port), str(rules))
        started(self.server, stack)
        access = Access(f"http://127.0.0.1:{port}", CLIENT_TOKEN)
        until(Server(access.address).is_ready)
        return access

    def python_part(self, name: str, module: str, *words: str) -> Part:
        """A process of a module beside this one."""
        command = [sys.executable, "-m", f"tests.pools.{module}", *words]
        return Part(name, command, child_environment(), self.folder / f"{name}.log")

    @property
    def marks(self) -> Mapping[str, str]:
        """What marks a process as one of this cluster's."""
        return {_MARK: self._mark}

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """See ``Machines.processes``; those of ranks, whose environment has no marks, are not among them."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                given = process.environ()
                is_there = node in (None, given.get(NODE_MARK))
                if is_there and given.get(_MARK) == self._mark and not gone([process]):
                    found.append(process)
        return found

    def agent_of(self, rank: psutil.Process) -> psutil.Process:
        """The agent that has started a rank, whose environment has no marks."""
        above = rank.parents()
        return next(process for process in self.processes() if process in above)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """The API server stopped until the block ends."""
        process = psutil.Process(self.server.pid)
        process.suspend()
        try:
            yield
        finally:
            process.resume()


def started(part: Part, stack: contextlib.ExitStack) -> None:
    """Start a process that ends with ``stack``."""
    stack.callback(part.stop)
    part.start()


def kubeconfig(access: Access) -> dict[str, object]:
    """The file by which clients find an API server."""
    ca = {} if access.ca is None else {"certificate-authority": str(access.ca)}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [{"name": "tests", "cluster": {"server": access.address, **ca}}],
        "users": [{"name": "controller", "user": {"token": access.token}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "controller"}}],
    }
