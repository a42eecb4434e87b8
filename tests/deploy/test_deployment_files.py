"""The deployment is linted with its own ecosystem's tools, and keeps its promises."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import BaseSettings
from ruamel.yaml import YAML

from services.controller.settings import Settings
from services.worker.agent.settings import AgentSettings

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "deploy").glob("*.Dockerfile"))
SERVICES = ("redis-users", "redis", "controller", "worker", "worker-cpu")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe", pure=True).load(ROOT / "docker-compose.yml")
    return loaded


def _tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def test_the_compose_file_matches_the_compose_specification() -> None:
    command = [_tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*command, ROOT / "docker-compose.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_every_dockerfile_passes_hadolint(dockerfile: Path) -> None:
    done = subprocess.run(
        [_tool("hadolint"), dockerfile], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_every_image_runs_as_an_ordinary_user_and_has_a_healthcheck(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert "\nUSER 10001:10001\n" in text
    assert "\nHEALTHCHECK " in text


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_every_image_has_each_package_that_is_installed(dockerfile: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    text = dockerfile.read_text()
    assert [name for name in packages if f"COPY {name} {name}\n" not in text] == []


def test_the_controller_image_installs_no_torch() -> None:
    instructions = [
        line
        for line in (ROOT / "deploy/controller.Dockerfile").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert "torch" not in "\n".join(instructions)
    assert "ARG EXTRAS=controller" in instructions
    assert any(".[${EXTRAS}]" in line for line in instructions)


def test_only_the_gpu_worker_asks_for_nvidia_devices(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == set(SERVICES)
    (device,) = services["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert "gpu" in device["capabilities"]
    assert services["worker"]["profiles"] == ["gpu"]
    assert services["worker-cpu"]["profiles"] == ["cpu"]
    assert "deploy" not in services["worker-cpu"]


def test_user_code_in_a_worker_meets_its_own_limit_of_processes(compose: dict[str, Any]) -> None:
    for service in ("worker", "worker-cpu"):
        assert compose["services"][service]["pids_limit"] == "${MESHLOOM_PIDS_LIMIT:-16384}"


def test_no_secret_has_a_default_and_redis_is_not_published(compose: dict[str, Any]) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert "${MESHLOOM_TOKEN:?" in text
    assert "${MESHLOOM_REDIS_PASSWORD:?" in text
    assert "${MESHLOOM_REDIS_AGENT_PASSWORD:?" in text
    assert "PASSWORD:-" not in text
    for service in ("worker", "worker-cpu"):
        assert "${MESHLOOM_REDIS_PASSWORD" not in str(compose["services"][service])
    assert "ports" not in compose["services"]["redis"]
    assert compose["networks"]["control"]["internal"] is True


@pytest.mark.parametrize(
    ("service", "settings"),
    [("controller", Settings), ("worker", AgentSettings), ("worker-cpu", AgentSettings)],
)
def test_every_variable_of_a_service_is_one_that_its_settings_read(
    compose: dict[str, Any], service: str, settings: type[BaseSettings]
) -> None:
    known = {f"MESHLOOM_{name.upper()}" for name in settings.model_fields}
    given = set(compose["services"][service]["environment"])
    assert given <= known
    assert "MESHLOOM_REDIS_URL" in given


def test_the_controller_may_read_exports_and_write_nothing_of_the_storage(
    compose: dict[str, Any],
) -> None:
    controller = compose["services"]["controller"]
    root = controller["environment"]["MESHLOOM_CHECKPOINT_ROOT"]
    assert controller["volumes"] == [f"checkpoints:{root}:ro"]
    # Whichever image comes first gives the new volume its owner and mode: the controller's group, which may read.
    made = f"install -d -m 0750 -o meshloom -g meshloom {root}"
    for dockerfile in DOCKERFILES:
        text = dockerfile.read_text()
        assert made in text
        assert "groupadd --gid 10001 meshloom" in text


def test_checkpoints_lie_on_the_volume_where_the_agent_writes_them(compose: dict[str, Any]) -> None:
    image = (ROOT / "deploy/worker.Dockerfile").read_text()
    assert "ENV MESHLOOM_HOME=/var/lib/meshloom\n" in image
    settings = AgentSettings(redis_url="redis://r", home=Path("/var/lib/meshloom"))
    for service in ("worker", "worker-cpu"):
        volumes = compose["services"][service]["volumes"]
        assert f"checkpoints:{settings.checkpoint_root}" in volumes
