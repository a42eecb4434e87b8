"""``python -m tests.pools.kube_job_controller ADDRESS CA``: the stand-ins for Jobs and Kueue at a real API server.

Kubernetes 1.20 drops what it does not know of a Job: that it is suspended, and that it is indexed. Which Jobs may run is
therefore read off their annotations, one of which is Meshloom's own and one the queue's.
"""

import contextlib
import copy
import sys
import threading
from pathlib import Path
from typing import Final
from urllib.error import HTTPError

from services.controller.adapters.pools.kubernetes_job import COMPLETE
from tests.pools.kube_access import NAMESPACE, Server, Thing
from tests.pools.kube_jobs import QUEUE, JobsAndQueue
from tests.pools.kube_objects import KINDS, label, warning

_LOOKS_EVERY_S: Final = 0.2
_ADMITTED: Final = "tests/admitted"
_CONFLICT: Final = 409


class RemoteStore:
    """The objects of an API server, as they were at the last look.

    Args:
        server: The API server.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._things: dict[str, list[Thing]] = {}
        self._known: dict[str, Thing] = {}

    def look(self) -> None:
        """Read them again."""
        for resource in ("jobs", "pods", "nodes"):
            self._things[resource] = self._server.ask("GET", _path(resource))["items"]
        for job in self._things["jobs"]:
            job["spec"]["suspend"] = not _may_run(job)
        self._known = {each["metadata"]["uid"]: copy.deepcopy(each) for each in self.all("jobs")}

    def all(self, resource: str) -> list[Thing]:
        """See ``Store.all``."""
        return list(self._things[resource])

    def create(self, resource: str, thing: Thing) -> Thing:
        """See ``Store.create``."""
        version, kind = KINDS[resource]
        made = self._server.ask(
            "POST", _path(resource), {"apiVersion": version, "kind": kind, **thing}
        )
        self._things.setdefault(resource, []).append(made)
        return made

    def delete(self, resource: str, name: str) -> Thing:
        """See ``Store.delete``; one that is already gone is no error."""
        with contextlib.suppress(HTTPError):
            return self._server.ask("DELETE", f"{_path(resource)}/{name}")
        return {}

    def changed(self, thing: Thing) -> Thing:
        """See ``Store.changed``: of Jobs, the status and whether they may run."""
        meta, known = thing["metadata"], self._known[thing["metadata"]["uid"]]
        path = f"{_path('jobs')}/{meta['name']}"
        if thing["spec"]["suspend"] != known["spec"]["suspend"]:
            self._server.ask("PATCH", path, {"metadata": {"annotations": {_ADMITTED: "true"}}})
        if thing.get("status", {}) != known.get("status", {}):
            self._server.ask("PATCH", f"{path}/status", {"status": thing["status"]})
        self._known[meta["uid"]] = copy.deepcopy(thing)
        return thing

    def warn(self, about: tuple[str, str], reason: str, message: str) -> None:
        """See ``Store.warn``."""
        event = warning(about, reason, message)
        name = event["metadata"]["name"]
        try:
            self._server.ask("POST", _path("events"), event)
        except HTTPError as error:
            if error.code != _CONFLICT:
                raise
            told = {key: event[key] for key in ("message", "lastTimestamp")}
            self._server.ask("PATCH", f"{_path('events')}/{name}", told)


def _may_run(job: Thing) -> bool:
    annotations = job["metadata"].get("annotations", {})
    return (_ADMITTED if label(job, QUEUE) else COMPLETE) in annotations


def _path(resource: str) -> str:
    if resource == "nodes":
        return "api/v1/nodes"
    group = "apis/batch/v1" if resource == "jobs" else "api/v1"
    return f"{group}/namespaces/{NAMESPACE}/{resource}"


def main() -> None:
    """Look after Jobs until killed."""
    store = RemoteStore(Server(sys.argv[1], Path(sys.argv[2])))
    jobs, pause = JobsAndQueue(store), threading.Event()
    while not pause.wait(_LOOKS_EVERY_S):
        with contextlib.suppress(OSError):  # it is asked again
            store.look()
            jobs.look()


if __name__ == "__main__":
    main()
