"""The chart in ``deploy/k8s``, rendered by Helm, checked against Kubernetes's schemas and what it promises.

``python -m tests.deploy.test_helm_chart`` writes the golden files again.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped] # it has no types
import pytest
from pydantic_settings import BaseSettings
from ruamel.yaml import YAML

from services.contract.words.states import PoolKind
from services.controller.adapters.pools.pools_file import agents_of, limits_of, read_pools_file
from services.controller.settings import Settings
from services.worker.agent.settings import AgentSettings
from tests.pools.kube_cluster import RULES

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/k8s"
HERE = Path(__file__).parent / "k8s"
RELEASES = ("default", "full")
Manifest = dict[str, Any]

pytestmark = pytest.mark.skipif(
    find_spec("helm_python") is None, reason="helm-python-sdk has no wheel for this platform"
)


def helm(values: Mapping[str, object]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.deploy.helm_render", str(CHART)],
        cwd=ROOT,
        input=json.dumps(values),
        capture_output=True,
        text=True,
        check=True,
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def values_of(release: str) -> dict[str, Any]:
    file = HERE / f"{release}.values.yaml"
    found: dict[str, Any] = YAML(typ="safe", pure=True).load(file) if file.exists() else {}
    return found


def text_of(rendered: Mapping[str, str]) -> str:
    """All of a release in one file, in the order of the templates' names."""
    parts = [
        f"# {name}\n{text.strip()}\n" for name, text in sorted(rendered.items()) if text.strip()
    ]
    return "---\n".join(parts)


def objects_of(text: str) -> Iterator[Manifest]:
    for thing in YAML(typ="safe", pure=True).load_all(StringIO(text)):
        if thing is not None:
            yield thing


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    name: str = request.param
    return name, helm(values_of(name))


@pytest.fixture(scope="module")
def objects(release: tuple[str, dict[str, Any]]) -> list[Manifest]:
    return list(objects_of(text_of(release[1]["rendered"])))


def pods_of(objects: list[Manifest]) -> dict[str, Manifest]:
    """The pods' specs by the names of what makes them."""
    return {
        thing["metadata"]["name"]: thing["spec"]["template"]["spec"]
        for thing in objects
        if "template" in thing.get("spec", {})
    }


def containers_of(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def files_of(pod: Manifest, container: Manifest, name: str = "meshloom") -> set[str]:
    """The files of a Secret that a container has."""
    volumes = {volume["name"]: volume.get("secret") for volume in pod["volumes"]}
    return {
        f"{mount['mountPath']}/{item['path']}"
        for mount in container["volumeMounts"]
        for secret in [volumes[mount["name"]]]
        if secret is not None and secret["secretName"] == name
        for item in secret["items"]
    }


def test_helm_finds_no_fault_and_renders_the_golden_file(
    release: tuple[str, dict[str, Any]],
) -> None:
    name, said = release
    assert said["faults"] == []
    assert text_of(said["rendered"]) == (HERE / f"{name}.golden.yaml").read_text()


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.37"])
def test_every_object_is_as_kubernetes_schemas_demand(
    objects: list[Manifest], version: str
) -> None:
    assert len(objects) >= 8
    for thing in objects:
        kubernetes_validate.validate(thing, version, strict=True)
    names = [
        (thing["kind"], thing["metadata"].get("namespace"), thing["metadata"]["name"])
        for thing in objects
    ]
    assert len(set(names)) == len(names)


def test_every_container_is_an_ordinary_user_with_a_read_only_root(objects: list[Manifest]) -> None:
    for pod in pods_of(objects).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["enableServiceLinks"] is False
        for container in containers_of(pod):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "limits" in container["resources"] or pod.get("shareProcessNamespace")


def test_every_workload_has_probes_and_no_agent_is_ended_by_one(objects: list[Manifest]) -> None:
    pods = pods_of(objects)
    for name, pod in pods.items():
        (container,) = [each for each in pod["containers"] if "readinessProbe" in each]
        assert ("livenessProbe" in container) == (not name.endswith("-agents"))


def test_no_program_of_the_ranks_user_starts_beside_them_with_the_agents_password(
    objects: list[Manifest],
) -> None:
    for pod in pods_of(objects).values():
        for container in pod["containers"]:
            names = {each["name"] for each in container.get("env", ())}
            if "MESHLOOM_REDIS_PASSWORD" in names and container["name"] == "agent":
                assert not {name for name in container if name.endswith("Probe")}
                assert "lifecycle" not in container
            elif "MESHLOOM_REDIS_PASSWORD" in names:
                own = container["securityContext"]["runAsUser"]
                assert own not in (0, pod["securityContext"]["runAsUser"])


def test_passwords_come_from_the_secret_alone(objects: list[Manifest]) -> None:
    assert not [thing for thing in objects if thing["kind"] == "Secret"]
    for pod in pods_of(objects).values():
        for container in containers_of(pod):
            for variable in container.get("env", ()):
                if variable["name"].endswith(("TOKEN", "PASSWORD", "AUTH")):
                    assert variable["valueFrom"]["secretKeyRef"]["name"] == "meshloom"
                if variable["name"].endswith("_FILE") and "secrets" in variable["value"]:
                    assert variable["value"] in files_of(pod, container)


@pytest.mark.parametrize(
    ("workload", "settings"), [("-controller", Settings), ("-agents", AgentSettings)]
)
def test_every_variable_is_one_that_the_settings_read(
    objects: list[Manifest], workload: str, settings: type[BaseSettings]
) -> None:
    known = {f"MESHLOOM_{name.upper()}" for name in settings.model_fields}
    for name, pod in pods_of(objects).items():
        if name.endswith(workload):
            containers = pod["containers"]
            given = {variable["name"] for each in containers for variable in each["env"]}
            assert {variable for variable in given if variable.startswith("MESHLOOM_")} <= known


def test_the_controllers_rights_are_those_with_which_the_pool_was_tested(
    release: tuple[str, dict[str, Any]], objects: list[Manifest]
) -> None:
    roles = [thing for thing in objects if thing["kind"].endswith("Role")]
    token = pods_of(objects)["full-controller"]["automountServiceAccountToken"]
    if release[0] == "default":
        assert (roles, token) == ([], False)
        return
    (role,) = roles
    assert (role["kind"], role["metadata"]["namespace"], token) == ("Role", "agents", True)
    assert role["rules"] == list(RULES)
    (binding,) = [thing for thing in objects if thing["kind"] == "RoleBinding"]
    assert binding["metadata"]["namespace"] == "agents"
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "full-controller", "namespace": "meshloom"}
    ]


def test_the_controller_speaks_https_with_the_certificate_of_a_secret(
    release: tuple[str, dict[str, Any]], objects: list[Manifest]
) -> None:
    pod = pods_of(objects)["full-controller"]
    (container,) = pod["containers"]
    given = {each["name"]: each.get("value") for each in container["env"]}
    schemes = {
        container[f"{when}Probe"]["httpGet"].get("scheme", "HTTP")
        for when in ("startup", "liveness", "readiness")
    }
    if release[0] == "default":
        assert (schemes, "MESHLOOM_TLS_CERT" in given) == ({"HTTP"}, False)
        return
    assert schemes == {"HTTPS"}
    assert files_of(pod, container, "controller-tls") == {
        given["MESHLOOM_TLS_CERT"],
        given["MESHLOOM_TLS_KEY"],
    }


def test_redis_has_a_user_for_each_node_that_may_join(
    release: tuple[str, dict[str, Any]], objects: list[Manifest]
) -> None:
    (users,) = pods_of(objects)["full-redis"]["initContainers"]
    nodes = {
        "default": [],
        "full": ["full-agents-0", "full-agents-1", "gpu-1", "gpu-2", "gpu-3", "cpu-1", "cpu-2"],
    }
    assert users["args"][2:] == nodes[release[0]]


def test_only_controllers_and_agents_reach_redis(objects: list[Manifest]) -> None:
    policies = {
        thing["metadata"]["name"]: thing["spec"]
        for thing in objects
        if thing["kind"] == "NetworkPolicy"
    }
    redis = policies["full-redis"]
    assert "Egress" in redis["policyTypes"]
    assert "egress" not in redis
    (rule,) = redis["ingress"]
    labels = [peer["podSelector"].get("matchLabels", {}) for peer in rule["from"]]
    components = {each.get("app.kubernetes.io/component") for each in labels if each}
    assert components == {"controller", "agent"}
    workloads = {
        name: thing["spec"]["template"]["metadata"]["labels"]
        for thing in objects
        for name in [thing["metadata"]["name"]]
        if "template" in thing.get("spec", {})
    }
    for name, spec in policies.items():
        selected = spec["podSelector"].get("matchLabels")
        if selected is not None and name in workloads:
            assert selected.items() <= workloads[name].items()


def test_the_pools_file_of_the_chart_is_one_that_the_controller_takes(tmp_path: Path) -> None:
    rendered = helm(values_of("full"))["rendered"]
    (config,) = (thing for thing in objects_of(text_of(rendered)) if thing["kind"] == "ConfigMap")
    path = tmp_path / "pools.yaml"
    path.write_text(config["data"]["pools.yaml"])
    file = read_pools_file(path)
    limits = limits_of(file.pools[0], PoolKind.KUBERNETES)
    agents = agents_of(file.agent, limits, file.pools[0].grace_s, {"AGENT_PASSWORD": "secret"})
    environment = agents["gpu-1"].environment
    assert environment["MESHLOOM_REDIS_URL"] == "redis://agent-gpu-1@full-redis.meshloom.svc:6379/0"
    assert environment["MESHLOOM_REDIS_PASSWORD"] == "secret"  # noqa: S105 of a test


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"agents": {"replicas": -1}}, "replicas"),
        ({"agnets": {}}, "agnets"),
        ({"controller": {"environment": {"A": 1}}}, "environment"),
    ],
)
def test_wrong_values_are_refused_with_the_place(values: dict[str, object], told: str) -> None:
    assert told in helm(values)["refused"]


def main() -> None:
    for name in RELEASES:
        rendered = helm(values_of(name))["rendered"]
        (HERE / f"{name}.golden.yaml").write_text(text_of(rendered))


if __name__ == "__main__":
    main()
