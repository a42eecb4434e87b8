"""Stand-ins for Kubernetes's scheduler and its controllers of lost nodes and of owners, as far as pools need them."""

from typing import Final

from tests.pools.kube_access import Thing
from tests.pools.kube_jobs import JobsAndQueue, pod_cpus
from tests.pools.kube_objects import Objects, condition, owner_of, set_condition

LOOKS_EVERY_S: Final = 0.1
_LOST_AFTER_LOOKS: Final = 60


class Controllers:
    """All of them.

    Args:
        objects: What they act on.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._jobs = JobsAndQueue(objects)
        self._beats: dict[str, tuple[str, int]] = {}

    def look(self) -> None:
        """Do what is to be done now."""
        with self._objects.lock:
            self._collect_garbage()
            self._watch_nodes()
            self._jobs.look()
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
            name = node["metadata"]["name"]
            beat = next(
                each["lastHeartbeatTime"]
                for each in node["status"]["conditions"]
                if each["type"] == "Ready"
            )
            known, missed = self._beats.get(name, ("", 0))
            missed = missed + 1 if beat == known else 0
            self._beats[name] = (beat, missed)
            is_lost = missed > _LOST_AFTER_LOOKS
            if is_lost:
                set_condition(node, "Ready", "Unknown", "NodeStatusUnknown", "")
                self._evict(name)

    def _evict(self, node: str) -> None:
        for pod in self._objects.all("pods"):
            if pod["spec"].get("nodeName") == node and "deletionTimestamp" not in pod["metadata"]:
                message = "Taint manager: deleting due to NoExecute taint"
                set_condition(pod, "DisruptionTarget", "True", "DeletionByTaintManager", message)
                self._objects.delete("pods", pod["metadata"]["name"])

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
        if sum(map(pod_cpus, (*there, pod))) > int(node["status"]["allocatable"]["cpu"]):
            return "Insufficient cpu"
        return ""
