"""What no release has that tests can install: indexed Jobs with ``backoffLimit: 0``, and Kueue's quota.

They follow what Kubernetes's documentation says. Each look does what the state asks for, so that none needs to have
seen the one before.
"""

import copy
import itertools
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, Protocol

from tests.pools.kube_access import Thing, now_text
from tests.pools.kube_objects import condition, label, owner_of, set_condition

QUEUE: Final = "kueue.x-k8s.io/queue-name"
_INDEX: Final = "batch.kubernetes.io/job-completion-index"
_numbers = itertools.count()


class Store(Protocol):
    """Where objects are."""

    def all(self, resource: str) -> list[Thing]:
        """Those of one resource, each of which may be changed in place."""
        ...

    def create(self, resource: str, thing: Thing) -> Thing:
        """Keep a new one."""
        ...

    def delete(self, resource: str, name: str) -> Thing:
        """Remove one, with its grace."""
        ...

    def changed(self, thing: Thing) -> Thing:
        """Note that one was changed in place."""
        ...

    def warn(self, about: tuple[str, str], reason: str, message: str) -> None:
        """An event of the type Warning about an object, by kind and name."""
        ...


class JobsAndQueue:
    """The controllers of Jobs and of the queue.

    Args:
        store: What they act on.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def look(self) -> None:
        """Do what is to be done now."""
        self._admit()
        for job in self._store.all("jobs"):
            _JobController(self._store, job).look()

    def _admit(self) -> None:
        """Kueue with one flavor, whose quota of CPUs is what all nodes have: a Job as a whole, or not."""
        quota = sum(int(node["status"]["allocatable"]["cpu"]) for node in self._store.all("nodes"))
        queued = [job for job in self._store.all("jobs") if label(job, QUEUE)]
        taken = sum(
            _cpus(job) for job in queued if not job["spec"]["suspend"] and not _is_done(job)
        )
        for job in queued:
            if not job["spec"]["suspend"] or _is_done(job):
                continue
            needs, flavor = _cpus(job), "cpu in flavor default-flavor"
            if needs > quota:
                why = f"insufficient quota for {flavor}, previously considered podsets requests (0) + current podset request ({needs}) > maximum capacity ({quota})"
            elif taken + needs > quota:
                why = f"insufficient unused quota for {flavor}, {taken + needs - quota} more needed"
            else:
                job["spec"]["suspend"] = False
                self._store.changed(job)
                taken += needs
                continue
            about = ("Workload", f"job-{job['metadata']['name']}-{job['metadata']['uid'][:5]}")
            self._store.warn(about, "Pending", f"couldn't assign flavors to pod set main: {why}")


class _JobController:
    """What becomes of one Job."""

    def __init__(self, store: Store, job: Thing) -> None:
        self._store = store
        self._job = job
        self._pods = _pods_of(store, job)

    def look(self) -> None:
        status = self._job.setdefault("status", {})
        if _is_done(self._job):
            return
        if (failing := condition(self._job, "FailureTarget")) is not None:
            self._fail(failing["reason"], failing["message"])
        elif self._job["spec"].get("suspend"):
            status.pop("startTime", None)
            self._delete_pods()
        else:
            status.setdefault("startTime", now_text())
            self._run()
        self._store.changed(self._job)

    def _run(self) -> None:
        spec = self._job["spec"]
        started = datetime.strptime(self._job["status"]["startTime"], "%Y-%m-%dT%H:%M:%SZ")  # noqa: DTZ007 set below
        ran_s = (datetime.now(UTC) - started.replace(tzinfo=UTC)).total_seconds()
        ended = [pod["status"]["phase"] for pod in self._pods]
        deleted = [pod for pod in self._pods if "deletionTimestamp" in pod["metadata"]]
        if "activeDeadlineSeconds" in spec and ran_s >= spec["activeDeadlineSeconds"]:
            self._fail("DeadlineExceeded", "Job was active longer than specified deadline")
        elif deleted or ended.count("Failed") > spec["backoffLimit"]:
            self._fail("BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif ended.count("Succeeded") == spec["completions"]:
            set_condition(self._job, "Complete", "True", "CompletionsReached", "")
        else:
            for index in self._missing():
                self._store.create("pods", self._pod(index))

    def _fail(self, reason: str, message: str) -> None:
        """Failed only when all pods have ended, as since Kubernetes 1.31."""
        set_condition(self._job, "FailureTarget", "True", reason, message)
        self._delete_pods()
        if all(
            pod["status"]["phase"] in ("Succeeded", "Failed")
            for pod in _pods_of(self._store, self._job)
        ):
            set_condition(self._job, "Failed", "True", reason, message)

    def _delete_pods(self) -> None:
        for pod in self._pods:
            if pod["status"]["phase"] in ("Pending", "Running"):
                self._store.delete("pods", pod["metadata"]["name"])

    def _missing(self) -> Iterator[int]:
        there = {pod["metadata"]["annotations"][_INDEX] for pod in self._pods}
        yield from (
            index for index in range(self._job["spec"]["completions"]) if str(index) not in there
        )

    def _pod(self, index: int) -> Thing:
        template = copy.deepcopy(self._job["spec"]["template"])
        meta, spec = self._job["metadata"], template["spec"]
        for container in (*spec["initContainers"], *spec["containers"]):
            container["env"] = [
                *container.get("env", ()),
                {"name": "JOB_COMPLETION_INDEX", "value": str(index)},
            ]
        return {
            "metadata": {
                "name": f"{meta['name']}-{index}-{next(_numbers):05}",
                "labels": {
                    **template["metadata"]["labels"],
                    "batch.kubernetes.io/job-name": meta["name"],
                },
                "annotations": {_INDEX: str(index)},
                "ownerReferences": [
                    {
                        "apiVersion": "batch/v1",
                        "kind": "Job",
                        "name": meta["name"],
                        "uid": meta["uid"],
                    }
                ],
            },
            "spec": spec,
            "status": {"phase": "Pending"},
        }


def _pods_of(store: Store, job: Thing) -> list[Thing]:
    return [pod for pod in store.all("pods") if owner_of(pod) == job["metadata"]["uid"]]


def _is_done(job: Thing) -> bool:
    return any(condition(job, kind) is not None for kind in ("Failed", "Complete"))


def pod_cpus(pod: Thing) -> int:
    """What a pod asks for."""
    return int(pod["spec"]["containers"][0]["resources"]["requests"]["cpu"])


def _cpus(job: Thing) -> int:
    return pod_cpus(job["spec"]["template"]) * int(job["spec"]["parallelism"])
