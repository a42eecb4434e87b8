"""``python -m tests.pools.kube_api_server PORT RULES``: a stand-in for Kubernetes's API server and controllers.

It speaks the API over HTTP for the resources that pools use, in one namespace: create, read, list with selectors,
merge patches and delete. It is no Kubernetes: what it does was written from Kubernetes's documentation and schemas.
RULES is a file with the rules of the Role that the client has, as JSON; kubelets may do everything.
"""

import json
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs, urlsplit

from tests.pools.kube_access import ADMIN_TOKEN, NAMESPACE, Thing
from tests.pools.kube_controllers import LOOKS_EVERY_S, Controllers
from tests.pools.kube_objects import (
    KINDS,
    ApiError,
    Objects,
    field_at,
    label,
    matching,
)

CLIENT_TOKEN: Final = "client"  # noqa: S105 of a test
_MERGE: Final = "application/merge-patch+json"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: ClassVar[Objects] = Objects()
    rules: ClassVar[Sequence[dict[str, list[str]]]] = ()

    def do_GET(self) -> None:
        if self.path == "/readyz":
            self._send(200, b"ok")
        else:
            self._answer(self._read)

    def do_POST(self) -> None:
        self._answer(
            lambda resource, _, __: self.objects.create(resource, self._body()), status=201
        )

    def do_PATCH(self) -> None:
        self._answer(lambda resource, name, _: self._patch(resource, name))

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the base's name
        pass

    def _answer(self, act: Any, status: int = 200) -> None:  # noqa: ANN401 one of the lambdas above
        address = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(address.query).items()}
        self._read_body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            resource, name = self._target(address.path)
            with self.objects.lock:
                said = json.dumps(act(resource, name, query))
        except ApiError as error:
            status = error.status
            kind = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": status}
            said = json.dumps({**kind, "reason": error.reason, "message": str(error)})
        self._send(status, said.encode())

    def _send(self, status: int, said: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def _target(self, path: str) -> tuple[str, str]:
        words = path.strip("/").split("/")
        group = "" if words[0] == "api" else words[1]
        version = words[1] if words[0] == "api" else "/".join(words[1:3])
        rest = words[2:] if words[0] == "api" else words[3:]
        namespace = NAMESPACE
        if rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        resource, name = rest[0], "/".join(rest[1:]).removesuffix("/status")
        if KINDS.get(resource, ("",))[0] != version:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        self._authorize(group, resource, name, namespace)
        return resource, name

    def _authorize(self, group: str, resource: str, name: str, namespace: str) -> None:
        """As RBAC does it; who has no rights in a namespace does not learn whether it is there."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token == ADMIN_TOKEN:
            return
        if token != CLIENT_TOKEN:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(
            self.command, "get" if name else "list"
        )
        if namespace != NAMESPACE or not any(
            group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
            for rule in self.rules
        ):
            who = "system:serviceaccount:meshloom:meshloom"
            named = f"{resource}.{group}" if group else resource
            raise ApiError(
                403,
                "Forbidden",
                f'{named} is forbidden: User "{who}" cannot {verb} resource "{resource}" in API group "{group}" in the namespace "{namespace}"',
            )

    def _read(self, resource: str, name: str, query: dict[str, str]) -> Thing:
        if name:
            return self.objects.get(resource, name)
        labelled = matching(query.get("labelSelector", ""), label)
        fielded = matching(query.get("fieldSelector", ""), field_at)
        version, kind = KINDS[resource]
        return {
            "apiVersion": version,
            "kind": f"{kind}List",
            "metadata": {"resourceVersion": str(self.objects.version)},
            "items": [
                each for each in self.objects.all(resource) if labelled(each) and fielded(each)
            ],
        }

    def _patch(self, resource: str, name: str) -> Thing:
        if self.headers.get("Content-Type") != _MERGE:
            raise ApiError(415, "UnsupportedMediaType", f"not {_MERGE}")
        return self.objects.patch(resource, name, self._body())

    def _delete(self, resource: str, name: str, query: dict[str, str]) -> Thing:
        grace = query.get("gracePeriodSeconds")
        return self.objects.delete(resource, name, None if grace is None else int(grace))

    def _body(self) -> Thing:
        said: Thing = json.loads(self._read_body)
        return said


def main() -> None:
    """Serve until killed."""
    Handler.rules = json.loads(Path(sys.argv[2]).read_text())
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    controllers, pause = Controllers(Handler.objects), threading.Event()
    while not pause.wait(LOOKS_EVERY_S):
        controllers.look()


if __name__ == "__main__":
    main()
