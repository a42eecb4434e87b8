"""What the test's API server keeps: objects as Kubernetes has them, checked against its own schemas."""

import base64
import copy
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import kubernetes_validate  # type: ignore[import-untyped] # it has no types

from tests.pools.kube_access import NAMESPACE, Thing, now_text

VERSION: Final = "1.33"
KINDS: Final = {
    "jobs": ("batch/v1", "Job"),
    "pods": ("v1", "Pod"),
    "secrets": ("v1", "Secret"),
    "events": ("v1", "Event"),
    "nodes": ("v1", "Node"),
}
"""The resources that there are, with the version and kind of each."""


class ApiError(Exception):
    """An answer that is not 2xx.

    Attributes:
        status: The HTTP status.
        reason: As in Kubernetes's ``Status``.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass
class Objects:
    """All objects, by resource and name, in one namespace.

    Attributes:
        lock: Held by whoever reads or changes any.
        by_resource: They themselves.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    by_resource: dict[str, dict[str, Thing]] = field(
        default_factory=lambda: {resource: {} for resource in KINDS}
    )
    version: int = 0

    def all(self, resource: str) -> list[Thing]:
        """Those of one resource; the list is the caller's."""
        return list(self.by_resource[resource].values())

    def get(self, resource: str, name: str) -> Thing:
        """One of them."""
        found = self.by_resource[resource].get(name)
        if found is None:
            raise ApiError(404, "NotFound", f'{resource} "{name}" not found')
        return found

    def create(self, resource: str, thing: Thing) -> Thing:
        """Keep a new one, if it is as the schema demands."""
        version, kind = KINDS[resource]
        made: Thing = {"apiVersion": version, "kind": kind, **copy.deepcopy(thing)}
        for key, text in made.pop("stringData", {}).items():
            made.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()
        if (made["apiVersion"], made["kind"]) != (version, kind):
            raise ApiError(400, "BadRequest", f"{made['kind']} is no {kind} of {version}")
        _check(made)
        meta = made["metadata"]
        if meta["name"] in self.by_resource[resource]:
            raise ApiError(409, "AlreadyExists", f'{resource} "{meta["name"]}" already exists')
        meta |= {"uid": secrets.token_hex(16), "creationTimestamp": now_text()}
        self.by_resource[resource][meta["name"]] = made
        return self.changed(made)

    def patch(self, resource: str, name: str, patch: Mapping[str, Any]) -> Thing:
        """Merge a patch (RFC 7386) into one."""
        before = self.get(resource, name)
        wanted = patch.get("metadata", {}).get("resourceVersion")
        if wanted not in (None, before["metadata"]["resourceVersion"]):
            raise ApiError(409, "Conflict", f'{resource} "{name}" has been modified')
        after = _merged(before, patch)
        _check(after)
        if resource == "jobs":
            _check_immutable(before, after)
        self.by_resource[resource][name] = after
        return self.changed(after)

    def changed(self, thing: Thing) -> Thing:
        """Note that one was changed in place."""
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        return thing

    def delete(self, resource: str, name: str, grace_s: int | None = None) -> Thing:
        """Remove one; a pod that may run stays until its node has ended it, unless its grace is 0."""
        thing = self.get(resource, name)
        runs = (
            resource == "pods"
            and "nodeName" in thing["spec"]
            and thing["status"]["phase"] not in ("Failed", "Succeeded")
        )
        if not runs or grace_s == 0:
            del self.by_resource[resource][name]
            return thing
        if "deletionTimestamp" not in thing["metadata"]:
            grace = thing["spec"].get("terminationGracePeriodSeconds", 30)
            thing["metadata"] |= {
                "deletionTimestamp": now_text(grace),
                "deletionGracePeriodSeconds": grace,
            }
            self.changed(thing)
        return thing

    def warn(self, about: tuple[str, str], reason: str, message: str) -> None:
        """An event of the type Warning about an object, by kind and name; once as long as it says the same."""
        event = warning(about, reason, message)
        if (known := self.by_resource["events"].get(event["metadata"]["name"])) is not None:
            known |= {key: event[key] for key in ("message", "lastTimestamp")}
            self.changed(known)
            return
        self.create("events", event)


def warning(about: tuple[str, str], reason: str, message: str) -> Thing:
    """An event about an object, by kind and name; its own name is that of what it says."""
    kind, name = about
    return {
        "metadata": {"name": f"{name}.{reason.lower()}", "namespace": NAMESPACE},
        "involvedObject": {"kind": kind, "name": name, "namespace": NAMESPACE},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": now_text(),
    }


def owner_of(thing: Thing) -> str | None:
    """The uid of an object's owner."""
    owners = thing["metadata"].get("ownerReferences", ())
    return owners[0]["uid"] if owners else None


def condition(thing: Thing, kind: str) -> Thing | None:
    """A condition of an object, if it is true."""
    conditions = thing.get("status", {}).get("conditions", ())
    return next(
        (each for each in conditions if each["type"] == kind and each["status"] == "True"), None
    )


def set_condition(thing: Thing, kind: str, status: str, reason: str, message: str) -> None:
    """Put a condition into the place of the one of its type."""
    conditions = thing.setdefault("status", {}).setdefault("conditions", [])
    told = {"type": kind, "status": status, "reason": reason, "message": message}
    if any(told.items() <= each.items() for each in conditions):
        return
    before = [each for each in conditions if each["type"] == kind]
    conditions[:] = [each for each in conditions if each["type"] != kind]
    conditions.append({**(before[0] if before else {}), **told, "lastTransitionTime": now_text()})


def matching(selector: str, part: Callable[[Thing, str], str]) -> Callable[[Thing], bool]:
    """Whether an object is as a selector of labels or fields says.

    Args:
        selector: ``key=value`` pairs, separated by commas; empty: all.
        part: The value of an object's key.
    """
    wanted = [each.split("=", 1) for each in selector.split(",") if each]
    return lambda thing: all(part(thing, key) == value for key, value in wanted)


def label(thing: Thing, key: str) -> str:
    """The value of a label."""
    value: str = thing["metadata"].get("labels", {}).get(key, "")
    return value


def field_at(thing: Thing, path: str) -> str:
    """The value of a field, by its path."""
    found: Any = thing
    for key in path.split("."):
        found = found.get(key, {}) if isinstance(found, dict) else {}
    return found if isinstance(found, str) else ""


def _merged(before: Any, patch: Any) -> Any:  # noqa: ANN401 JSON
    if not isinstance(before, dict) or not isinstance(patch, dict):
        return copy.deepcopy(patch)
    kept = {key: value for key, value in before.items() if key not in patch}
    new = {
        key: _merged(before.get(key), value) for key, value in patch.items() if value is not None
    }
    return copy.deepcopy({**kept, **new})


def _check(thing: Thing) -> None:
    named = f'{thing["kind"]} "{thing["metadata"]["name"]}" is invalid'
    try:
        kubernetes_validate.validate(thing, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = "/".join(map(str, error.path))
        raise ApiError(422, "Invalid", f"{named}: /{where}: {error.message}") from None
    for fault in _faults(thing):
        raise ApiError(422, "Invalid", f"{named}: {fault}")


def _faults(thing: Thing) -> Iterator[str]:
    """What the schemas do not say, and the API server refuses."""
    name = thing["metadata"]["name"]
    if (
        len(name) > 63
        or not name.replace("-", "").replace(".", "").isalnum()
        or name.lower() != name
    ):
        yield f'metadata.name: Invalid value: "{name}": must be no more than 63 characters'
    if thing["kind"] == "Secret" and sum(map(len, thing.get("data", {}).values())) > 2**20 * 4 / 3:
        yield "/data: too long: may not be more than 1048576 bytes"
    if thing["kind"] == "Job":
        yield from _job_faults(thing)


def _job_faults(job: Thing) -> Iterator[str]:
    spec = job["spec"]
    pod = spec["template"]["spec"]
    if spec.get("completionMode") == "Indexed" and "completions" not in spec:
        yield "/spec/completions: required when completion mode is Indexed"
    if len(f"{job['metadata']['name']}-{spec['completions']}") > 63:
        yield "/metadata/name: will not be able to create pods with valid host names"
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        yield "/spec/template/spec/restartPolicy: unsupported value"
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        mounts = container.get("volumeMounts", ())
        if len({mount["mountPath"] for mount in mounts}) < len(mounts):
            yield "/spec/template/spec: mountPath must be unique"
        if not {mount["name"] for mount in mounts} <= volumes:
            yield "/spec/template/spec: a mount has no volume"


def _check_immutable(before: Thing, after: Thing) -> None:
    for key in ("completions", "completionMode", "template", "selector", "podFailurePolicy"):
        if before["spec"].get(key) != after["spec"].get(key):
            raise ApiError(422, "Invalid", f"Job: /spec/{key}: field is immutable")
