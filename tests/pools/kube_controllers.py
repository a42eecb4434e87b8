"""Kubernetes's controllers as far as pools need them: Jobs, the scheduler, lost nodes, owners, and Kueue's quota.

They follow what Kubernetes's documentation says of Indexed Jobs with ``backoffLimit: 0``. Each look does what the
state asks for, so that none needs to have seen the one before.
"""

import copy
import itertools
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from tests.pools.kube_objects import (
    Objects,
    Thing,
    condition,
    label,
    now_text,
    owner_of,
    set_condition,
)

LOOKS_EVERY_S: Final = 0.1
_LOST_AFTER_LOOKS: Final = 60
_QUEUE: Final = "kueue.x-k8s.io/queue-name"
_INDEX: Final = "batch.kubernetes.io/job-completion-index"
_numbers = itertools.count()


class Controllers:
    """All of them.

    Args:
        objects: What they act on.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._beats: dict[str, tuple[str, int]] = {}

    def look(self) -> None:
        """Do what is to be done now."""
        with self._objects.lock:
            self._collect_garbage()
            self._watch_nodes()
            self._admit()
            for job in self._objects.all("jobs"):
                _JobController(self._objects, job).look()
            self._schedule()

    def _collect_garbage(self) -> None:
        uids = {job["metadata"]["uid"] for job in self._objects.all("jobs")}
        for resource in ("pods", "secrets"):
            for thing in self._objects.all(resource):
                owner = owner_of(thing)
                if owner is not None and owner not in uids:
                    self._objects.delete(resource, thing["metadata"]["name"])

    def _watch_nodes(self) -> None:
        """Counts looks, not seconds: this process may have been stopped meanwhile."""
        for node in self._objects.all("nodes"):
            name, beat = node["metadata"]["name"], node["metadata"]["annotations"]["beat"]
            known, missed = self._beats.get(name, ("", 0))
            missed = missed + 1 if beat == known else 0
            self._beats[name] = (beat, missed)
            is_lost = missed > _LOST_AFTER_LOOKS
            status = "Unknown" if is_lost else "True"
            set_condition(node, "Ready", status, "KubeletReady", "")
            if is_lost:
                self._evict(name)

    def _evict(self, node: str) -> None:
        for pod in self._objects.all("pods"):
            if pod["spec"].get("nodeName") == node and "deletionTimestamp" not in pod["metadata"]:
                message = "Taint manager: deleting due to NoExecute taint"
                set_condition(pod, "DisruptionTarget", "True", "DeletionByTaintManager", message)
                self._objects.delete("pods", pod["metadata"]["name"])

    def _admit(self) -> None:
        """Kueue with one flavor, whose quota of CPUs is what all nodes have: a Job as a whole, or not."""
        quota = sum(
            int(node["status"]["allocatable"]["cpu"]) for node in self._objects.all("nodes")
        )
        queued = [job for job in self._objects.all("jobs") if label(job, _QUEUE)]
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
                self._objects.changed(job)
                taken += needs
                continue
            about = ("Workload", f"job-{job['metadata']['name']}-{job['metadata']['uid'][:5]}")
            self._objects.warn(about, "Pending", f"couldn't assign flavors to pod set main: {why}")

    def _schedule(self) -> None:
        for pod in self._objects.all("pods"):
            if "nodeName" in pod["spec"]:
                continue
            nodes = self._objects.all("nodes")
            why = {node["metadata"]["name"]: self._why_not(pod, node) for node in nodes}
            fits = [name for name, reason in why.items() if not reason]
            if fits:
                pod["spec"]["nodeName"] = fits[0]
                set_condition(pod, "PodScheduled", "True", "", "")
            else:
                counts = {reason: list(why.values()).count(reason) for reason in why.values()}
                told = ", ".join(f"{count} {reason}" for reason, count in counts.items())
                message = f"0/{len(why)} nodes are available: {told}."
                set_condition(pod, "PodScheduled", "False", "Unschedulable", message)
            self._objects.changed(pod)

    def _why_not(self, pod: Thing, node: Thing) -> str:
        name = node["metadata"]["name"]
        there = [
            each
            for each in self._objects.all("pods")
            if each["spec"].get("nodeName") == name
            and each["status"]["phase"] in ("Pending", "Running")
        ]
        if condition(node, "Ready") is None:
            return "node(s) had untolerated taint(s)"
        if not pod["spec"].get("nodeSelector", {}).items() <= node["metadata"]["labels"].items():
            return "node(s) didn't match Pod's node affinity/selector"
        rules = pod["spec"]["affinity"]["podAntiAffinity"]
        (rule,) = rules["requiredDuringSchedulingIgnoredDuringExecution"]
        apart = rule["labelSelector"]["matchLabels"].items()
        if any(apart <= each["metadata"]["labels"].items() for each in there):
            return "node(s) didn't match pod anti-affinity rules"
        if sum(map(_pod_cpus, (*there, pod))) > int(node["status"]["allocatable"]["cpu"]):
            return "Insufficient cpu"
        return ""


class _JobController:
    """What becomes of one Job."""

    def __init__(self, objects: Objects, job: Thing) -> None:
        self._objects = objects
        self._job = job
        self._pods = objects.pods_of(job)

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
        self._objects.changed(self._job)

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
                self._objects.create("pods", self._pod(index))

    def _fail(self, reason: str, message: str) -> None:
        """Failed only when all pods have ended, as since Kubernetes 1.31."""
        set_condition(self._job, "FailureTarget", "True", reason, message)
        self._delete_pods()
        if all(
            pod["status"]["phase"] in ("Succeeded", "Failed")
            for pod in self._objects.pods_of(self._job)
        ):
            set_condition(self._job, "Failed", "True", reason, message)

    def _delete_pods(self) -> None:
        for pod in self._pods:
            if pod["status"]["phase"] in ("Pending", "Running"):
                self._objects.delete("pods", pod["metadata"]["name"])

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


def _is_done(job: Thing) -> bool:
    return any(condition(job, kind) is not None for kind in ("Failed", "Complete"))


def _pod_cpus(pod: Thing) -> int:
    return int(pod["spec"]["containers"][0]["resources"]["requests"]["cpu"])


def _cpus(job: Thing) -> int:
    return _pod_cpus(job["spec"]["template"]) * int(job["spec"]["parallelism"])
