"""Nodes by Kubernetes (https://kubernetes.io): an indexed Job for each reservation, an agent in each of its pods."""

import asyncio
import contextlib
import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from kubernetes import client  # type: ignore[import-untyped] # it has no types
from kubernetes import config as kubernetes_config
from kubernetes.client.exceptions import ApiException  # type: ignore[import-untyped] # it has no types
from kubernetes.config.config_exception import ConfigException  # type: ignore[import-untyped] # it has no types
from urllib3.exceptions import HTTPError

from services.contract.words.ids import NodeId
from services.contract.words.states import PoolKind
from services.controller.adapters.pools.kubernetes_job import (
    COMPLETE,
    INDEX,
    NODES,
    OWNER,
    POOL,
    RESERVATION,
    job_manifest,
    secret_manifest,
)
from services.controller.adapters.pools.pools_file import KubernetesPoolConfig, limits_of
from services.controller.domain.scheduling.reservations import PoolLimits, Sighting
from services.controller.ports.pools import AgentProcess, PoolError, PoolRefusedError

T = TypeVar("T")

_ANSWER_S: Final = 30.0
_LATE: Final = timedelta(seconds=30)
"""So long after its grace a pod that is still there is on a node that does not answer."""
_SAID_CHARACTERS: Final = 500
_MERGE: Final = "application/merge-patch+json"
_UNAUTHORIZED: Final = 401
_EXISTS: Final = 409
_MISSING: Final = 404
_REFUSALS: Final = frozenset({400, 403, 404, 405, 409, 413, 415, 422})
"""HTTP statuses of requests that fail in the same way when they are repeated."""
_NUMBER: Final = re.compile(r"[0-9]{1,5}")
_STARTING: Final = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons of containers that say nothing of what they wait for."""


@dataclass(frozen=True)
class _Cluster:
    """The parts of the API that a pool uses."""

    connections: client.ApiClient
    batch: client.BatchV1Api
    core: client.CoreV1Api


class KubernetesPool:
    """The port ``NodePool``. Calls are made in threads, and the cluster is contacted by the first.

    Args:
        config: Of the pool.
        owner: Begins the names of our Jobs, and is a label of theirs.
        answer_s: Seconds in which the API server has to answer.
    """

    def __init__(
        self, config: KubernetesPoolConfig, owner: str, answer_s: float = _ANSWER_S
    ) -> None:
        self._config = config
        self._owner = owner
        self._limits = limits_of(config, PoolKind.KUBERNETES)
        self._answer_s = answer_s
        self._connecting = threading.Lock()
        self._connected: _Cluster | None = None

    @property
    def limits(self) -> PoolLimits:
        """See ``NodePool.limits``."""
        return self._limits

    async def provision(self, reservation_id: str, agents: Mapping[NodeId, AgentProcess]) -> None:
        """See ``NodePool.provision``."""
        await asyncio.to_thread(self._provision, reservation_id, agents)

    async def release(self, reservation_id: str) -> None:
        """See ``NodePool.release``."""
        await asyncio.to_thread(self._release, reservation_id)

    async def sightings(self) -> Sequence[Sighting]:
        """See ``NodePool.sightings``."""
        return await asyncio.to_thread(self._sightings)

    async def close(self) -> None:
        """See ``NodePool.close``."""
        connected, self._connected = self._connected, None
        if connected is not None:
            await asyncio.to_thread(connected.connections.close)

    def _provision(self, reservation_id: str, agents: Mapping[NodeId, AgentProcess]) -> None:
        name, labels = self._name(reservation_id), self._labels(reservation_id)
        # What cannot be made is refused before anything is.
        secret_manifest(name, labels, agents.values(), "")
        job = job_manifest(name, labels, agents, self._config)
        made = self._ask(self._cluster.batch.create_namespaced_job, body=job, ignore=_EXISTS)
        if made is None:
            made = self._job(reservation_id)
            if made is None or COMPLETE in _annotations(made):
                return  # asked for before, and whole or on its way out
        secret = secret_manifest(name, labels, agents.values(), _uid(made))
        self._ask(self._cluster.core.create_namespaced_secret, body=secret, ignore=_EXISTS)
        patch: dict[str, Any] = {"metadata": {"annotations": {COMPLETE: "true"}}}
        if self._config.queue is None:
            patch["spec"] = {"suspend": False}
        self._patch(name, patch)

    def _release(self, reservation_id: str) -> None:
        job = self._job(reservation_id)
        if job is None or _is_over(job):
            return
        name = self._name(reservation_id)
        if job.status is None or job.status.start_time is None:
            self._ask(
                self._cluster.batch.delete_namespaced_job,
                name=name,
                propagation_policy="Background",
                ignore=_MISSING,
            )
            return
        # A Job past its deadline fails: its pods get their grace, and its name stays taken for a while.
        self._patch(name, {"spec": {"activeDeadlineSeconds": 1}})

    def _sightings(self) -> Sequence[Sighting]:
        selector = f"{OWNER}={self._owner},{POOL}={self._limits.name}"
        listed = self._listed(self._cluster.batch.list_namespaced_job, label_selector=selector)
        # Others may give theirs our labels. By another name than that of its reservation none could be released.
        jobs = [job for job in listed if _name(job) == self._name(_label(job, RESERVATION))]
        pods: dict[str, list[client.V1Pod]] = defaultdict(list)
        for pod in self._listed(self._cluster.core.list_namespaced_pod, label_selector=selector):
            pods[_label(pod, RESERVATION)].append(pod)
        seen = [_Seen(job, pods[_label(job, RESERVATION)], self._limits) for job in jobs]
        warnings: Sequence[client.CoreV1Event] = ()
        if any(each.said is None for each in seen):
            warnings = self._listed(
                self._cluster.core.list_namespaced_event, field_selector="type=Warning"
            )
        return [each.sighting(warnings) for each in seen]

    def _job(self, reservation_id: str) -> client.V1Job | None:
        """The Job of a reservation; None: there is none.

        Raises:
            PoolRefusedError: One of this name is not ours.
        """
        name = self._name(reservation_id)
        job = self._ask(self._cluster.batch.read_namespaced_job, name=name, ignore=_MISSING)
        if job is not None and not self._labels(reservation_id).items() <= _labels(job).items():
            raise PoolRefusedError(
                f"the Job {name} in namespace {self._config.namespace} was not made for pool {self._limits.name}"
            )
        return job

    def _patch(self, name: str, patch: Mapping[str, object]) -> None:
        self._ask(
            self._cluster.batch.patch_namespaced_job,
            name=name,
            body=dict(patch),
            _content_type=_MERGE,
            ignore=_MISSING,
        )

    def _listed(self, call: Callable[..., Any], **selectors: Any) -> Sequence[Any]:  # noqa: ANN401 each call has its own
        listed = self._ask(call, **selectors)
        return () if listed is None else listed.items

    def _ask(
        self, call: Callable[..., T], *, ignore: int | None = None, **fields: object
    ) -> T | None:
        """What a call of the API answers; None: the HTTP status to ignore.

        Raises:
            PoolRefusedError: The same request will fail again.
            PoolError: The API server does not answer, or cannot now.
        """
        try:
            return call(namespace=self._config.namespace, _request_timeout=self._answer_s, **fields)
        except ApiException as error:
            if error.status == ignore:
                return None
            if error.status == _UNAUTHORIZED:
                self._connected = None  # a token that expired: the next call reads the present one
            said = _message(error)
            raise PoolRefusedError(said) if error.status in _REFUSALS else PoolError(said) from None
        except (HTTPError, OSError) as error:
            raise PoolError(f"Kubernetes does not answer: {_short(error)}") from error

    @property
    def _cluster(self) -> _Cluster:
        with self._connecting:
            if self._connected is None:
                self._connected = self._connect()
            return self._connected

    def _connect(self) -> _Cluster:
        configuration = client.Configuration()
        configuration.retries = 0
        where = self._config.kubeconfig
        try:
            if where is None:
                kubernetes_config.load_incluster_config(client_configuration=configuration)
            else:
                kubernetes_config.load_kube_config(
                    config_file=str(where),
                    context=self._config.context,
                    client_configuration=configuration,
                )
        except (ConfigException, OSError) as error:
            source = "the controller's pod" if where is None else str(where)
            raise PoolError(f"no access to Kubernetes by {source}: {_short(error)}") from error
        connections = client.ApiClient(configuration)
        return _Cluster(connections, client.BatchV1Api(connections), client.CoreV1Api(connections))

    def _name(self, reservation_id: str) -> str:
        return f"{self._owner}-{reservation_id}".lower()

    def _labels(self, reservation_id: str) -> Mapping[str, str]:
        return {OWNER: self._owner, POOL: self._limits.name, RESERVATION: reservation_id}


class _Seen:
    """What a Job and its pods say of a reservation.

    Args:
        job: Of the reservation.
        pods: Of the Job.
        limits: Of the pool.
    """

    def __init__(self, job: client.V1Job, pods: Sequence[client.V1Pod], limits: PoolLimits) -> None:
        self._job = job
        self._pods = pods
        # Others may make a Job with our labels and any annotations.
        numbers = filter(_NUMBER.fullmatch, _annotations(job).get(NODES, "").split(","))
        self._node_ids = tuple(f"{limits.name}-{number}" for number in numbers)
        self._is_over = _is_over(job)
        self._ended = [pod for pod in pods if _has_ended(pod) or _is_deleted(pod)]
        self.said: Final[str | None] = self._why()
        """Why it has no nodes; empty: it has them. None: only events tell."""

    def sighting(self, warnings: Sequence[client.CoreV1Event]) -> Sighting:
        """As the port has it.

        Args:
            warnings: The events of the namespace that are warnings, if ``said`` is None.
        """
        is_held = not self._is_over or any(_is_there(pod) for pod in self._pods)
        is_whole = COMPLETE in _annotations(self._job) and not self._is_over and not self._ended
        said = self._warned(warnings) if self.said is None else self.said
        reason = " ".join(said.split())[:_SAID_CHARACTERS]
        return Sighting(_label(self._job, RESERVATION), self._node_ids, is_held, reason, is_whole)

    def _why(self) -> str | None:
        ended = [text for text in map(self._ending, self._ended) if text]
        if ended:
            return "; ".join(ended)
        if self._is_over:
            return _condition(self._job, "Failed", "FailureTarget", "Complete") or "it was deleted"
        if self._ended:
            return f"the pod of {self._node_of(self._ended[0])} is deleted"
        if len(self._pods) < len(self._node_ids):
            return None
        waiting = [_waiting(pod) for pod in self._pods if not _runs(pod)]
        return next((said for said in waiting if said), None if waiting else "")

    def _warned(self, warnings: Sequence[client.CoreV1Event]) -> str:
        """The newest warning about the Job, its pods, or what Kueue keeps of it."""
        name = _name(self._job)
        pods = {_name(pod) for pod in self._pods}
        mine = [
            event
            for event in warnings
            for about in (event.involved_object,)
            if (about.kind == "Job" and about.name == name)
            or (about.kind == "Pod" and about.name in pods)
            or (about.kind == "Workload" and (about.name or "").startswith(f"job-{name}-"))
        ]
        if mine:
            return max(mine, key=_when).message or ""
        if self._job.spec is not None and self._job.spec.suspend:
            return "waiting for Kueue"
        return "its pods are starting"

    def _ending(self, pod: client.V1Pod) -> str:
        """Why a pod ended by itself; empty: it did not."""
        status = pod.status
        if status is None or not _has_ended(pod):
            return ""
        codes = [
            state.terminated
            for container in status.container_statuses or ()
            for state in (container.state,)
            if state is not None and state.terminated is not None
        ]
        said = [f"exit code {code.exit_code}" for code in codes]
        said += [code.reason for code in codes if code.reason and code.reason != "Error"]
        said += [text for text in (status.reason, status.message) if text]
        return f"the agent of {self._node_of(pod)} has ended: {', '.join(said) or 'nothing more is known'}"

    def _node_of(self, pod: client.V1Pod) -> NodeId:
        index = _annotations(pod).get(INDEX, "")
        known = _NUMBER.fullmatch(index) is not None and int(index) < len(self._node_ids)
        return self._node_ids[int(index)] if known else _name(pod)


def _name(thing: client.V1Job | client.V1Pod) -> str:
    return (thing.metadata and thing.metadata.name) or ""


def _uid(job: client.V1Job) -> str:
    return (job.metadata and job.metadata.uid) or ""


def _labels(thing: client.V1Job | client.V1Pod) -> Mapping[str, str]:
    return (thing.metadata and thing.metadata.labels) or {}


def _label(thing: client.V1Job | client.V1Pod, key: str) -> str:
    return _labels(thing).get(key, "")


def _annotations(thing: client.V1Job | client.V1Pod) -> Mapping[str, str]:
    return (thing.metadata and thing.metadata.annotations) or {}


def _is_deleted(thing: client.V1Job | client.V1Pod) -> bool:
    return thing.metadata is not None and thing.metadata.deletion_timestamp is not None


def _is_over(job: client.V1Job) -> bool:
    """Whether it starts no pod any more."""
    return _is_deleted(job) or bool(_condition(job, "Failed", "FailureTarget", "Complete"))


def _condition(job: client.V1Job, *types: str) -> str:
    """The first of these conditions of a Job that is true, in Kubernetes's words."""
    conditions = (job.status and job.status.conditions) or ()
    return next(
        (
            f"{each.reason or each.type}: {each.message or ''}"
            for each in conditions
            if each.type in types and each.status == "True"
        ),
        "",
    )


def _phase(pod: client.V1Pod) -> str:
    return (pod.status and pod.status.phase) or ""


def _has_ended(pod: client.V1Pod) -> bool:
    return _phase(pod) in {"Succeeded", "Failed"}


def _runs(pod: client.V1Pod) -> bool:
    return _phase(pod) == "Running"


def _is_there(pod: client.V1Pod) -> bool:
    """Whether its agent may still run. Those of a node that does not answer stay."""
    if _has_ended(pod):
        return False
    until = pod.metadata and pod.metadata.deletion_timestamp
    return not until or datetime.now(UTC) - _LATE < until


def _waiting(pod: client.V1Pod) -> str:
    """What a pod waits for, in Kubernetes's words; empty: it does not say."""
    status = pod.status
    if status is None:
        return ""
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{condition.reason}: {condition.message or ''}"
    containers = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
    for container in containers:
        state = container.state and container.state.waiting
        if state and state.reason and state.reason not in _STARTING:
            return f"{state.reason}: {state.message or ''}"
    return ""


def _when(event: client.CoreV1Event) -> datetime:
    made = event.metadata.creation_timestamp
    return event.last_timestamp or event.event_time or made or datetime.min.replace(tzinfo=UTC)


def _message(error: ApiException) -> str:
    """What the API server says of a request that it refused."""
    said = error.body or error.reason or ""
    with contextlib.suppress(ValueError, KeyError, TypeError):  # a proxy's answer is no JSON
        said = json.loads(said)["message"]
    return f"Kubernetes answers {error.status}: {_short(said)}"


def _short(said: object) -> str:
    return " ".join(str(said).split())[:_SAID_CHARACTERS]
