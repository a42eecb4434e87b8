"""What only a real API server shows: its validation of all that is sent, its authorizer and its collectors of garbage."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from services.controller.adapters.pools.kubernetes_job import job_manifest
from tests.deploy.test_helm_chart import helm, objects_of, text_of, values_of
from tests.pools.kube_access import NAMESPACE, Server
from tests.pools.kube_cluster import RULES, Access, kubeconfig
from tests.pools.kube_control_plane import ControlledKubeCluster
from tests.pools.kube_world import ControlledKubeWorld
from tests.pools.test_conformance import Reserved, nothing_is_left
from tests.waiting import until

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]

PATHS = {
    "ConfigMap": "api/v1",
    "Deployment": "apis/apps/v1",
    "NetworkPolicy": "apis/networking.k8s.io/v1",
    "Role": "apis/rbac.authorization.k8s.io/v1",
    "RoleBinding": "apis/rbac.authorization.k8s.io/v1",
    "Service": "api/v1",
    "ServiceAccount": "api/v1",
    "StatefulSet": "apis/apps/v1",
}
JOBS = f"apis/batch/v1/namespaces/{NAMESPACE}/jobs"
SECRETS = f"api/v1/namespaces/{NAMESPACE}/secrets"


@pytest.fixture(scope="module")
def world(kube_programs: Path) -> Iterator[ControlledKubeWorld]:
    with ControlledKubeWorld(kube_programs) as world:
        yield world


@pytest.fixture
def api(world: ControlledKubeWorld) -> Iterator[Server]:
    yield world.cluster.api
    world.close_pools()


def missing(sent: Any, kept: Any, place: str = "") -> Iterator[str]:  # noqa: ANN401 JSON
    """Where an object is not as it was sent; what the server has added does not count."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        for key, value in sent.items():
            yield from missing(value, kept.get(key), f"{place}/{key}")
    elif isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        for number, (one, other) in enumerate(zip(sent, kept, strict=True)):
            yield from missing(one, other, f"{place}/{number}")
    elif sent != kept and sent not in (None, [], {}) and str(sent) != str(kept):
        yield f"{place}: {sent!r} became {kept!r}"


def may(api: Server, user: str, verb: str, group: str, resource: str, namespace: str) -> bool:
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": resource}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": attributes},
    }
    path = "apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(api.ask("POST", path, review)["status"]["allowed"])


def test_the_chart_is_taken_as_it_is_and_its_role_gives_these_rights_and_no_others(
    api: Server,
) -> None:
    for thing in objects_of(text_of(helm(values_of("full"))["rendered"])):
        namespace = thing["metadata"].get("namespace", "meshloom")
        kind = f"{thing['kind'].lower()}s".replace("ys", "ies")
        kept = api.ask("POST", f"{PATHS[thing['kind']]}/namespaces/{namespace}/{kind}", thing)
        assert not list(missing(thing, kept)), thing["metadata"]["name"]

    user = "system:serviceaccount:meshloom:full-controller"
    given = {
        (verb, group, resource)
        for rule in RULES
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    verbs = ("create", "get", "list", "watch", "patch", "update", "delete")
    resources = (
        ("batch", "jobs"),
        *(("", each) for each in ("secrets", "pods", "events", "nodes")),
    )
    asked = {(verb, *resource) for verb in verbs for resource in resources}
    assert {each for each in asked if may(api, user, *each, NAMESPACE)} == given
    assert not any(may(api, user, *each, "meshloom") for each in asked)


def test_what_is_asked_for_is_kept_but_for_what_the_release_does_not_know(
    world: ControlledKubeWorld, api: Server, tmp_path: Path
) -> None:
    asked = Reserved(world, "is-kept", 1, tmp_path).provision()
    asked.joined()
    job = api.ask("GET", f"{JOBS}/meshloom-is-kept")
    labels = job["metadata"]["labels"]
    own = {key: labels[key] for key in labels if key.startswith("meshloom/")}
    sent = job_manifest("meshloom-is-kept", own, asked.node_ids, world.config())
    unknown = {each.partition(":")[0] for each in missing(sent, job)}
    assert unknown == {"/spec/suspend", "/spec/completionMode"}
    asked.release()
    nothing_is_left(world)


def test_a_job_that_is_over_is_removed_and_its_secret_and_pods_with_it(
    world: ControlledKubeWorld, api: Server, tmp_path: Path
) -> None:
    asked = Reserved(world, "is-removed", 2, tmp_path).provision()
    asked.joined()
    asked.release()
    name = f"meshloom-{asked.id}"
    job = api.ask("GET", f"{JOBS}/{name}")
    assert job["spec"]["ttlSecondsAfterFinished"] == 600
    api.ask("PATCH", f"{JOBS}/{name}", {"spec": {"ttlSecondsAfterFinished": 1}})

    def names(path: str) -> list[str]:
        return [each["metadata"]["name"] for each in api.ask("GET", path)["items"]]

    until(lambda: name not in names(JOBS))
    until(lambda: name not in names(SECRETS))
    pods = f"api/v1/namespaces/{NAMESPACE}/pods?labelSelector=meshloom/reservation={asked.id}"
    until(lambda: not names(pods))
    again = Reserved(world, asked.id, 1, tmp_path / "again").provision()  # its name is free
    again.joined()
    again.release()
    nothing_is_left(world)


def test_the_same_rights_are_enough_where_owners_are_guarded(
    world: ControlledKubeWorld, api: Server, tmp_path: Path
) -> None:
    cluster = world.cluster
    assert isinstance(cluster, ControlledKubeCluster)
    assert cluster.access.ca is not None
    with contextlib.ExitStack() as stack:
        guard = "--enable-admission-plugins=OwnerReferencesPermissionEnforcement"
        _, admin = cluster.api_server(stack, cluster.access.ca, guard)
        file = tmp_path / "kubeconfig"
        access = Access(admin.address, cluster.access.token, admin.ca)
        file.write_text(json.dumps(kubeconfig(access)))
        asked = Reserved(world, "is-guarded", 1, tmp_path)
        asked.pool = world.open(world.config(kubeconfig=file))
        asked.provision().joined()

        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": f"meshloom-{asked.id}"}
        uid = api.ask("GET", f"{JOBS}/{owner['name']}")["metadata"]["uid"]
        guarded = {**owner, "uid": uid, "blockOwnerDeletion": True}
        client = Server(access.address, access.ca, access.token)
        with pytest.raises(HTTPError) as caught:
            client.ask(
                "POST", SECRETS, {"metadata": {"name": "guarded", "ownerReferences": [guarded]}}
            )
        assert "cannot set blockOwnerDeletion" in caught.value.read().decode()
        asked.release()
        nothing_is_left(world)
