"""A real control plane of Kubernetes over the tests' own kubelets: etcd, API server, scheduler and controllers.

Its release has no indexed Jobs, and Kueue is in no registry: ``kube_job_controller`` stands in for both.
"""

import base64
import contextlib
import json
import subprocess
from pathlib import Path
from typing import Final

from services.local.settings import child_environment
from tests.e2e.conftest import free_port
from tests.parts import ROOT, Part
from tests.pools.kube_access import ADMIN_TOKEN, NAMESPACE, Server, Thing
from tests.pools.kube_cluster import RULES, Access, KubeCluster, kubeconfig, started
from tests.waiting import until

_HOME: Final = "meshloom"
_ACCOUNT: Final = "meshloom"
_FEATURES: Final = "--feature-gates=TTLAfterFinished=true"
_CONTROLLERS: Final = (
    "garbagecollector,nodelifecycle,serviceaccount,serviceaccount-token,ttl-after-finished"
)


class ControlledKubeCluster(KubeCluster):
    """Nodes under a real control plane, whose client has a service account's token, TLS and the rights of a Role.

    Args:
        nodes: How many.
        programs: The folder with etcd and the servers.
    """

    def __init__(self, nodes: int, programs: Path) -> None:
        super().__init__(nodes)
        self._programs = programs

    def serve(self, stack: contextlib.ExitStack) -> Access:
        """See ``KubeCluster.serve``."""
        ca = self._certificates()
        self._etcd = f"http://127.0.0.1:{free_port()}"
        self._run(stack, "etcd", *self._of_etcd(self._etcd))
        self.server, admin = self.api_server(stack, ca)
        address = admin.address
        config = self.folder / "admin"
        config.write_text(json.dumps(kubeconfig(admin)))
        common = (f"--kubeconfig={config}", "--leader-elect=false", "--bind-address=127.0.0.1")
        none = ("--port=0", "--secure-port=0")
        self._run(stack, "kube-scheduler", *common, *none)
        self._run(stack, "kube-controller-manager", *common, *none, *self._of_controllers(ca))
        stand_in = self.python_part("jobs", "kube_job_controller", address, str(ca))
        started(stand_in, stack)
        return Access(address, self._client(Server(address, ca)), ca)

    def api_server(
        self, stack: contextlib.ExitStack, ca: Path, *options: str
    ) -> tuple[Part, Access]:
        """An API server of this cluster, with further options; how an administrator reaches it."""
        address = f"https://127.0.0.1:{free_port()}"
        part = self._run(stack, "kube-apiserver", *self._of_api_server(address), *options)
        admin = Access(address, ADMIN_TOKEN, ca)
        until(Server(address, ca).is_ready)
        return part, admin

    def _certificates(self) -> Path:
        folder = self.folder / "tls"
        make: list[str | Path] = ["sh", ROOT / "deploy/certificates.sh", folder, "127.0.0.1"]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        make = ["openssl", "genrsa", "-out", folder / "accounts.key", "2048"]
        subprocess.run(make, check=True, stderr=subprocess.DEVNULL)
        return folder / "ca.crt"

    def _run(self, stack: contextlib.ExitStack, name: str, *words: str) -> Part:
        command: list[str | Path] = [self._programs / name, *words]
        part = Part(name, command, child_environment(), self.folder / f"{name}.log")
        started(part, stack)
        return part

    def _of_etcd(self, address: str) -> tuple[str, ...]:
        peer = f"http://127.0.0.1:{free_port()}"
        return (
            f"--data-dir={self.folder}/etcd",
            *(f"--{what}-client-urls={address}" for what in ("listen", "advertise")),
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )

    def _of_api_server(self, address: str) -> tuple[str, ...]:
        tls = self.folder / "tls"
        tokens = self.folder / "tokens"
        tokens.write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n')
        return (
            f"--etcd-servers={self._etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={address.rpartition(':')[2]}",
            "--endpoint-reconciler-type=none",
            f"--tls-cert-file={tls}/127.0.0.1.crt",
            f"--tls-private-key-file={tls}/127.0.0.1.key",
            f"--client-ca-file={tls}/ca.crt",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={tls}/accounts.key",
            f"--service-account-key-file={tls}/accounts.key",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--default-not-ready-toleration-seconds=1",
            "--default-unreachable-toleration-seconds=1",
            _FEATURES,
        )

    def _of_controllers(self, ca: Path) -> tuple[str, ...]:
        return (
            f"--controllers={_CONTROLLERS}",
            f"--root-ca-file={ca}",
            f"--service-account-private-key-file={self.folder}/tls/accounts.key",
            # A node is lost after eight seconds, and its pods go at once: by default it takes six minutes.
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=8s",
            "--node-eviction-rate=10",
            "--unhealthy-zone-threshold=0.9",
            _FEATURES,
        )

    def _client(self, server: Server) -> str:
        """A service account with the Role; its token."""
        for name in (_HOME, NAMESPACE):
            server.ask("POST", "api/v1/namespaces", {"metadata": {"name": name}})
        accounts = f"api/v1/namespaces/{_HOME}/serviceaccounts"
        server.ask("POST", accounts, {"metadata": {"name": _ACCOUNT}})
        rights = f"apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
        named: Thing = {"metadata": {"name": "pools"}}
        server.ask("POST", f"{rights}/roles", {**named, "rules": list(RULES)})
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "pools"}
        who = {"kind": "ServiceAccount", "name": _ACCOUNT, "namespace": _HOME}
        server.ask("POST", f"{rights}/rolebindings", {**named, "roleRef": role, "subjects": [who]})
        # Without its service account a namespace takes no pods.
        listed = f"api/v1/namespaces/{NAMESPACE}/serviceaccounts"
        until(lambda: server.ask("GET", listed)["items"])

        def secret() -> str | None:
            account = server.ask("GET", f"{accounts}/{_ACCOUNT}")
            return next((each["name"] for each in account.get("secrets", ())), None)

        found = server.ask("GET", f"api/v1/namespaces/{_HOME}/secrets/{until(secret)}")
        return base64.b64decode(found["data"]["token"]).decode()
