"""What is Kubernetes's own: pods without a queue, what they wait for, and where passwords are."""

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped] # it has no types
import pytest
from kubernetes import client  # type: ignore[import-untyped] # it has no types

from services.contract.words.states import PoolKind
from services.controller.adapters.pools import kubernetes
from services.controller.adapters.pools.kubernetes import KubernetesPool
from services.controller.adapters.pools.kubernetes_job import (
    INDEX,
    NODES,
    job_manifest,
    secret_manifest,
)
from services.controller.adapters.pools.pools_file import (
    KubernetesPoolConfig,
    PoolsFileError,
    limits_of,
    read_pools_file,
)
from services.controller.domain.scheduling.reservations import Sighting
from services.controller.ports.pools import AgentProcess, PoolError, PoolRefusedError
from tests.parts import ROOT
from tests.pools.kube_access import NAMESPACE
from tests.pools.kube_kubelet import POD_MARK
from tests.pools.kube_world import ControlledKubeWorld, KubeWorld
from tests.pools.test_conformance import Reserved, nothing_is_left
from tests.waiting import until

LABELS = {"meshloom/owner": "meshloom", "meshloom/pool": "hpc", "meshloom/reservation": "some"}
PASSWORD = "never-in-a-pod"  # noqa: S105 of a test
MINIMAL: dict[str, object] = {
    "kind": "kubernetes",
    "name": "hpc",
    "accelerators": 8,
    "max_nodes": 4,
    "namespace": "agents",
    "image": "registry/worker:1",
}
FULL: dict[str, object] = {
    **MINIMAL,
    "cpu_slots": 2,
    "queue": "gpu",
    "priority_class": "training",
    "image_pull_secrets": ["registry"],
    "node_selector": {"gpu": "h200"},
    "tolerations": [
        {"key": "nvidia.com/gpu"},
        {"key": "team", "operator": "Equal", "value": "ml", "effect": "NoSchedule"},
    ],
    "service_account": "agents",
    "claims": {"checkpoints": "/shared/meshloom"},
    "resources": {"cpu": "32", "memory": "256Gi", "nvidia.com/gpu": "8"},
}


@pytest.fixture(
    scope="module",
    params=["stand-in", pytest.param("control-plane", marks=pytest.mark.kubernetes)],
)
def shared_world(request: pytest.FixtureRequest) -> Iterator[KubeWorld]:
    is_real = request.param == "control-plane"
    made = ControlledKubeWorld(request.getfixturevalue("kube_programs")) if is_real else KubeWorld()
    with made as world:
        yield world


@pytest.fixture
def world(shared_world: KubeWorld) -> Iterator[KubeWorld]:
    yield shared_world
    shared_world.close_pools()
    nothing_is_left(shared_world)


def reserved(
    world: KubeWorld, reservation_id: str, count: int, folder: Path, **fields: object
) -> Reserved:
    """Asked for without a queue, unless ``fields`` has one."""
    made = Reserved(world, reservation_id, count, folder)
    made.pool = world.open(world.config(**{"queue": None, **fields}))
    return made


def reason_of(asked: Reserved, words: str) -> Sighting:
    """The sighting once its reason has these words."""

    def look() -> Sighting | None:
        sighting = asked.sighting()
        return sighting if sighting is not None and words in sighting.reason else None

    return until(look)


def objects(world: KubeWorld, resource: str, group: str = "api/v1") -> list[dict[str, Any]]:
    listed = world.cluster.api.ask("GET", f"{group}/namespaces/{NAMESPACE}/{resource}")
    items: list[dict[str, Any]] = listed["items"]
    return items


def test_without_a_queue_pods_come_one_by_one_and_the_missing_ones_reason_is_told(
    world: KubeWorld, tmp_path: Path
) -> None:
    small = reserved(world, "takes-two", 2, tmp_path / "small").provision()
    small.joined()
    large = reserved(world, "lacks-one", 3, tmp_path / "large").provision()
    sighting = reason_of(large, "Unschedulable")
    assert (sighting.is_held, sighting.is_whole) == (True, True)
    assert "Insufficient cpu" in sighting.reason
    large.release()  # pods that came meanwhile end, too
    small.release()
    nothing_is_left(world)


def test_an_image_that_cannot_be_pulled_is_told(world: KubeWorld, tmp_path: Path) -> None:
    asked = reserved(world, "has-no-image", 1, tmp_path, image="no-such-image").provision()
    told = 'ImagePullBackOff: Back-off pulling image "no-such-image"'
    assert reason_of(asked, "ImagePull").reason == told
    asked.release()


def test_passwords_are_in_the_secret_alone_which_ranks_do_not_find(
    world: KubeWorld, tmp_path: Path
) -> None:
    asked = reserved(world, "has-a-password", 2, tmp_path)
    agents = {
        name: AgentProcess(agent.command, {**agent.environment, "PASSWORD": PASSWORD})
        for name, agent in asked.agents().items()
    }
    asyncio.run(asked.pool.provision(asked.id, agents))
    for process in asked.joined().values():
        assert process.environ()["PASSWORD"] == PASSWORD
        assert "JOB_COMPLETION_INDEX" not in process.environ()
        uid = process.environ()[POD_MARK]
        volumes = next(world.cluster.folder.glob(f"*/{uid}"))
        assert not list((volumes / "own").iterdir())
    for resource, group in (("pods", "api/v1"), ("events", "api/v1"), ("jobs", "apis/batch/v1")):
        assert PASSWORD not in json.dumps(objects(world, resource, group))
    secret = next(
        each
        for each in objects(world, "secrets")
        if each["metadata"]["name"] == "meshloom-has-a-password"
    )
    assert PASSWORD in base64.b64decode(secret["data"]["0"]).decode()
    asked.release()
    nothing_is_left(world)


def test_an_agent_that_ends_by_itself_takes_the_reservation_with_it(
    world: KubeWorld, tmp_path: Path
) -> None:
    asked = reserved(world, "ends-well", 2, tmp_path).provision()
    agents = asked.joined()
    agents[asked.node_ids[0]].terminate()  # it ends with code 0
    sighting = reason_of(asked, "the agent of hpc-1 has ended: exit code 0")
    assert (sighting.is_held, sighting.is_whole) == (True, False)
    asked.release()
    nothing_is_left(world)


def test_a_request_that_was_interrupted_is_completed_by_the_next_controller(
    world: KubeWorld, tmp_path: Path
) -> None:
    asked = reserved(world, "half-asked", 1, tmp_path)
    config = world.config(queue=None)
    labels = {**LABELS, "meshloom/reservation": asked.id}
    job = job_manifest(f"meshloom-{asked.id}", labels, asked.node_ids, config)
    world.cluster.api.ask("POST", f"apis/batch/v1/namespaces/{NAMESPACE}/jobs", job)
    sighting = until(asked.sighting)
    assert (sighting.is_held, sighting.is_whole) == (True, False)
    asked.provision().joined()
    assert until(asked.sighting).is_whole
    asked.release()
    nothing_is_left(world)


def test_a_job_of_others_is_neither_taken_nor_ended(world: KubeWorld, tmp_path: Path) -> None:
    asked = reserved(world, "is-not-ours", 1, tmp_path)
    labels = {**LABELS, "meshloom/owner": "others", "meshloom/reservation": asked.id}
    job = job_manifest(f"meshloom-{asked.id}", labels, asked.node_ids, world.config())
    world.cluster.api.ask("POST", f"apis/batch/v1/namespaces/{NAMESPACE}/jobs", job)
    for act in (asked.provision, lambda: asyncio.run(asked.pool.release(asked.id))):
        with pytest.raises(PoolRefusedError, match="was not made for pool hpc"):
            act()
    assert asked.sighting() is None
    path = f"apis/batch/v1/namespaces/{NAMESPACE}/jobs/meshloom-{asked.id}"
    assert world.cluster.api.ask("DELETE", path)


def test_a_refusal_says_what_kubernetes_says(world: KubeWorld, tmp_path: Path) -> None:
    elsewhere = reserved(world, "elsewhere", 1, tmp_path, namespace="nowhere")
    with pytest.raises(
        PoolRefusedError, match=r'403: jobs.batch is forbidden: .* in the namespace "nowhere"'
    ):
        elsewhere.provision()
    long = reserved(world, "long-" * 12 + "name", 1, tmp_path)
    with pytest.raises(
        PoolRefusedError, match=r"422: Job.* is invalid: .*must be no more than 63 characters"
    ):
        long.provision()


def test_a_token_that_expired_is_read_again(world: KubeWorld, tmp_path: Path) -> None:
    known = world.cluster.kubeconfig.read_text()
    file = tmp_path / "kubeconfig"
    file.write_text(known.replace(f'"{world.cluster.access.token}"', '"expired"'))
    pool = world.open(world.config(kubeconfig=file))
    with pytest.raises(PoolError, match="401: Unauthorized") as caught:
        asyncio.run(pool.sightings())
    assert not isinstance(caught.value, PoolRefusedError)
    file.write_text(known)
    asyncio.run(pool.sightings())


def test_a_cluster_that_cannot_be_found_is_no_refusal(tmp_path: Path) -> None:
    for fields in ({}, {"kubeconfig": tmp_path / "none"}):
        pool = KubernetesPool(
            KubernetesPoolConfig.model_validate({**MINIMAL, **fields}), "meshloom"
        )
        with pytest.raises(PoolError, match="no access to Kubernetes") as caught:
            asyncio.run(pool.sightings())
        assert not isinstance(caught.value, PoolRefusedError)


@pytest.mark.parametrize("fields", [MINIMAL, FULL], ids=["minimal", "full"])
@pytest.mark.parametrize("version", ["1.29", "1.33", "1.37"])
def test_what_is_asked_for_is_as_the_schemas_of_kubernetes_demand(
    fields: dict[str, object], version: str
) -> None:
    config = KubernetesPoolConfig.model_validate(fields)
    job = job_manifest("some", LABELS, ["hpc-1", "hpc-3"], config)
    agent = AgentProcess(("agent",), {"PASSWORD": PASSWORD})
    secret = secret_manifest("some", LABELS, [agent, agent], "uid")
    for manifest in (job, secret):
        kubernetes_validate.validate(manifest, version, strict=True)
    pod = job["spec"]["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert ("kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]) == ("queue" in fields)


def test_annotations_that_others_wrote_name_no_nodes_and_stop_no_round() -> None:
    """Who may make Jobs and pods in the namespace may give them our labels."""
    numbers = {NODES: "1,²,\x1b[2J,999999999,-1,2"}
    job = client.V1Job(
        metadata=client.V1ObjectMeta(name="a", labels=LABELS, annotations=numbers),
        spec=client.V1JobSpec(template=client.V1PodTemplateSpec()),
    )
    pod = client.V1Pod(
        metadata=client.V1ObjectMeta(
            name="p",
            labels=LABELS,
            annotations={INDEX: "²"},
            deletion_timestamp=datetime.max.replace(tzinfo=UTC),
        ),
        status=client.V1PodStatus(phase="Failed"),
    )
    limits = limits_of(KubernetesPoolConfig.model_validate(MINIMAL), PoolKind.KUBERNETES)
    running = client.V1Pod(metadata=pod.metadata, status=client.V1PodStatus(phase="Running"))
    found = kubernetes._Seen(job, [pod, running], limits).sighting(())
    assert found.node_ids == ("hpc-1", "hpc-2")
    assert found.is_held


def test_what_a_secret_cannot_hold_is_refused() -> None:
    large = AgentProcess(("agent",), {"LARGE": "x" * 600_000})
    with pytest.raises(PoolRefusedError, match="a Secret holds"):
        secret_manifest("some", LABELS, [large, large], "uid")
    with pytest.raises(PoolRefusedError, match="not the name of a variable"):
        secret_manifest("some", LABELS, [AgentProcess(("agent",), {"a b": ""})], "uid")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"image": ""}, "/pools/0/kubernetes/image: String should have at least 1 character"),
        ({"resources": {"cpu": "many"}}, "/pools/0/kubernetes/resources/cpu: String should match"),
        ({"scratch": ["/a"], "claims": {"b": "/a"}}, "several volumes are mounted at /a"),
        ({"tolerations": [{"value": "x"}]}, "value needs operator: Equal"),
        ({"context": "there"}, "context needs a kubeconfig"),
        ({"gpus": 8}, "/pools/0/kubernetes/gpus: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(
    fields: dict[str, object], told: str, tmp_path: Path
) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(json.dumps({"pools": [{**MINIMAL, **fields}]}))  # JSON is YAML
    with pytest.raises(PoolsFileError) as caught:
        read_pools_file(file)
    assert told in str(caught.value)


def test_the_clients_large_package_is_loaded_only_for_a_pool_that_needs_it() -> None:
    program = "import services.controller.__main__, sys; print('kubernetes' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
