"""What Kubernetes is asked for: the Job of a reservation, and the Secret from which its pods start their agents.

No password stands in the Job. The Secret has one script for each index of the Job, and an init container hands each
pod its own: ranks, which run as the agent's user, find neither it nor those of other nodes.
"""

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

from services.contract.words.ids import NodeId
from services.controller.adapters.pools.pools_file import KubernetesPoolConfig
from services.controller.ports.pools import AgentProcess, PoolRefusedError

OWNER: Final = "meshloom/owner"
POOL: Final = "meshloom/pool"
RESERVATION: Final = "meshloom/reservation"
NODES: Final = "meshloom/nodes"
COMPLETE: Final = "meshloom/complete"
"""Annotation of a Job for which nothing more is to be made."""
QUEUE: Final = "kueue.x-k8s.io/queue-name"
INDEX: Final = "batch.kubernetes.io/job-completion-index"

_KEPT_S: Final = 600
"""So long Kubernetes keeps the Job of a reservation that was given back. Until then its name cannot be used
again: a controller that does not know that its term is over may still ask for it."""
_SECRET_BYTES: Final = 1_000_000
_SCRIPTS: Final = "/run/meshloom/scripts"
_OWN: Final = "/run/meshloom/own"
_HAND_OVER: Final = f'cp "{_SCRIPTS}/$JOB_COMPLETION_INDEX" {_OWN}/start'
_START: Final = f'start=$(cat {_OWN}/start) && rm {_OWN}/start && eval "$start"'
_OF_KUBERNETES: Final = (
    "JOB_COMPLETION_INDEX",
    "KUBERNETES_SERVICE_HOST",
    "KUBERNETES_SERVICE_PORT",
    "KUBERNETES_SERVICE_PORT_HTTPS",
    "KUBERNETES_PORT",
    "KUBERNETES_PORT_443_TCP",
    "KUBERNETES_PORT_443_TCP_ADDR",
    "KUBERNETES_PORT_443_TCP_PORT",
    "KUBERNETES_PORT_443_TCP_PROTO",
)
"""Variables of each container, which are none of the agent's."""
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Manifest = dict[str, Any]


def job_manifest(
    name: str, labels: Mapping[str, str], node_ids: Iterable[NodeId], config: KubernetesPoolConfig
) -> Manifest:
    """The Job of a reservation: it is suspended until its Secret is there, or until Kueue admits it.

    A pod that fails, or is deleted with its node, fails the Job, which ends the others.

    Args:
        name: Of the Job and its Secret.
        labels: By which Job and pods are found.
        node_ids: One for each index.
        config: Of the pool.
    """
    numbers = [node_id.removeprefix(f"{config.name}-") for node_id in node_ids]
    of_queue = {} if config.queue is None else {QUEUE: config.queue}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": {**labels, **of_queue},
            "annotations": {NODES: ",".join(numbers)},
        },
        "spec": {
            "suspend": True,
            "completionMode": "Indexed",
            "completions": len(numbers),
            "parallelism": len(numbers),
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": _KEPT_S,
            "template": {"metadata": {"labels": dict(labels)}, "spec": _pod(name, labels, config)},
        },
    }


def secret_manifest(
    name: str,
    labels: Mapping[str, str],
    agents: Iterable[AgentProcess],
    job_uid: str,
) -> Manifest:
    """The Secret with the agents' commands and environments; it goes when its Job goes.

    Raises:
        PoolRefusedError: The name of a variable cannot be one, or Kubernetes takes no Secret of this size.
    """
    scripts = {str(index): _script(agent) for index, agent in enumerate(agents)}
    size = sum(len(script.encode()) for script in scripts.values())
    if size > _SECRET_BYTES:
        raise PoolRefusedError(
            f"the environments of {len(scripts)} agents take {size} bytes; a Secret holds {_SECRET_BYTES}"
        )
    job = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job_uid}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": dict(labels), "ownerReferences": [job]},
        "immutable": True,
        "stringData": scripts,
    }


def _pod(name: str, labels: Mapping[str, str], config: KubernetesPoolConfig) -> Manifest:
    scratch = {f"scratch-{place}": folder for place, folder in enumerate(config.scratch)}
    claims = {
        f"claim-{place}": (claim, folder)
        for place, (claim, folder) in enumerate(config.claims.items())
    }
    memory = {"medium": "Memory"}
    volumes: list[Manifest] = [
        {"name": "scripts", "secret": {"secretName": name, "defaultMode": 0o440}},
        {"name": "own", "emptyDir": {**memory, "sizeLimit": "1Mi"}},
        {"name": "shm", "emptyDir": {**memory, "sizeLimit": config.shared_memory}},
        *({"name": volume, "emptyDir": {}} for volume in scratch),
        *(
            {"name": volume, "persistentVolumeClaim": {"claimName": claim}}
            for volume, (claim, _) in claims.items()
        ),
    ]
    own = {"name": "own", "mountPath": _OWN}
    mounts: list[Manifest] = [
        own,
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 of the pod
        *({"name": volume, "mountPath": folder} for volume, folder in scratch.items()),
        *({"name": volume, "mountPath": folder} for volume, (_, folder) in claims.items()),
    ]
    quantities = _resources(config)
    container = {
        "image": config.image,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"requests": quantities, "limits": quantities},
    }
    pod: Manifest = {
        "restartPolicy": "Never",
        # The first process of a pod reaps what ranks leave behind, which the agent would not.
        "shareProcessNamespace": True,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(config.grace_s),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": config.user,
            "runAsGroup": config.user,
            "fsGroup": config.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {"podAntiAffinity": _one_on_each_node(labels)},
        "initContainers": [
            {
                **container,
                "name": "hand-over",
                "command": ["/bin/sh", "-c", _HAND_OVER],
                "volumeMounts": [
                    {"name": "scripts", "mountPath": _SCRIPTS, "readOnly": True},
                    own,
                ],
            }
        ],
        "containers": [
            {
                **container,
                "name": "agent",
                "command": ["/bin/sh", "-c", _START],
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    if config.node_selector:
        pod["nodeSelector"] = dict(config.node_selector)
    if config.tolerations:
        pod["tolerations"] = [each.model_dump(exclude_none=True) for each in config.tolerations]
    if config.service_account is not None:
        pod["serviceAccountName"] = config.service_account
    if config.priority_class is not None:
        pod["priorityClassName"] = config.priority_class
    if config.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in config.image_pull_secrets]
    return pod


def _one_on_each_node(labels: Mapping[str, str]) -> Manifest:
    same = {"matchLabels": {RESERVATION: labels[RESERVATION]}}
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": same}
        ]
    }


def _resources(config: KubernetesPoolConfig) -> Mapping[str, str]:
    if config.resources:
        return dict(config.resources)
    resources = {"cpu": str(config.cpu_slots)} if config.cpu_slots else {}
    if config.accelerators:
        resources["nvidia.com/gpu"] = str(config.accelerators)
    return resources


def _script(agent: AgentProcess) -> str:
    """Shell commands that become the agent: signals to the container reach it, and nothing of ours is in between."""
    for name in agent.environment:
        if _VARIABLE.fullmatch(name) is None:
            raise PoolRefusedError(f"/agent/environment/{name}: not the name of a variable")
    exports = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in agent.environment.items()
    )
    return f"unset start {' '.join(_OF_KUBERNETES)}\n{exports}exec {shlex.join(agent.command)}\n"
