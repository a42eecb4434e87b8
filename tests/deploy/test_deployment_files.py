"""The deployment is linted with its own ecosystem's tools, and keeps its promises.

What the images and the running containers do is in test_images.py.
"""

import json
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import BaseSettings
from ruamel.yaml import YAML

from services.controller.settings import AclSettings, Settings
from services.worker.agent.settings import AgentSettings
from tests.deploy.compose_file import ROOT, rendered, seconds, size, words

DOCKERFILES = sorted((ROOT / "deploy").glob("*.Dockerfile"))
WIND_DOWN_S = 10.0  # what an agent takes to kill what is left, and to report it
PREPARED = {"MESHLOOM_WORKER_MEMORY": "8192m", "MESHLOOM_WORKER_CPUS": "2"}
WORKERS = ("worker", "worker-cpu")
PROFILES = {
    "redis-users": [],
    "redis": [],
    "controller": [],
    "worker": ["gpu"],
    "worker-cpu": ["cpu"],
    "backup": ["copy"],
    "restore": ["copy"],
    "prometheus": ["metrics"],
    "grafana": ["metrics"],
}
# Beyond these no container has any; each is explained in docs/security.md.
AGENT = {"CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SYS_PTRACE"}
COPY = {"CHOWN", "DAC_OVERRIDE", "FOWNER"}
CAPABILITIES = {
    "redis-users": {"DAC_OVERRIDE"},
    "worker": AGENT,
    "worker-cpu": AGENT,
    "backup": COPY,
    "restore": COPY,
}
AT_ONCE = [pytest.param(name, id=name) for name in PROFILES]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return rendered(PREPARED)


def _tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def test_the_compose_file_matches_the_compose_specification(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    # As it stands, and with the variables filled in: some are numbers only then.
    (tmp_path / "rendered.json").write_text(json.dumps(compose))
    command = [_tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*command, ROOT / "docker-compose.yml", tmp_path / "rendered.json"],
        capture_output=True,
        text=True,
        check=False,
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
    # The build sees only what .dockerignore lets through.
    let_through = (ROOT / ".dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    assert [
        name for names in copied for name in names.split() if f"!{name}" not in let_through
    ] == []


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
    assert {name: service.get("profiles", []) for name, service in services.items()} == PROFILES
    (device,) = services["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert "gpu" in device["capabilities"]
    assert [name for name in services if "deploy" in services[name]] == ["worker"]


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_container_has_no_more_rights_than_it_needs(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert service["init"] is True
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert set(service.get("cap_add", ())) == CAPABILITIES.get(name, set())
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "pid", "ipc", "devices", "userns_mode"} & set(service)


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_container_has_limits(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert size(str(service["mem_limit"])) >= 256 << 20
    assert float(service["cpus"]) > 0
    assert int(service["pids_limit"]) > 0
    assert service["logging"]["options"]["max-size"]


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_that_is_stopped_has_time_for_a_checkpoint_and_a_controller_that_moves_its_gangs(
    compose: dict[str, Any], name: str
) -> None:
    worker = compose["services"][name]
    grace_s = float(worker["environment"]["MESHLOOM_STOP_GRACE_S"])
    assert grace_s > 0
    assert seconds(worker["stop_grace_period"]) >= grace_s + WIND_DOWN_S
    # What depends on a service is stopped before it.
    assert {"controller", "redis"} <= set(worker["depends_on"])


@pytest.mark.parametrize("name", WORKERS)
def test_ranks_of_a_worker_are_another_user_than_its_agent_who_may_make_them_so(
    compose: dict[str, Any], name: str
) -> None:
    worker = compose["services"][name]
    user = worker["environment"]["MESHLOOM_RANK_USER"]
    image = (ROOT / "deploy/worker.Dockerfile").read_text()
    assert re.search(rf"useradd --uid [1-9]\d* .*{user} ", image)
    assert worker["user"] == "0:0"
    assert {"SETUID", "SETGID", "KILL", "CHOWN"} <= set(worker["cap_add"])


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_container_that_serves_is_started_again_and_one_that_ends_is_not(
    compose: dict[str, Any], name: str
) -> None:
    ends = name in {"redis-users", "backup", "restore"}
    assert compose["services"][name]["restart"] == ("no" if ends else "unless-stopped")


def test_the_limits_of_the_worker_must_be_set() -> None:
    for name in PREPARED:
        with pytest.raises(KeyError, match=f"{name}.*prepare"):
            rendered({each: text for each, text in PREPARED.items() if each != name})


def test_a_full_redis_refuses_writes_before_its_container_is_killed(
    compose: dict[str, Any],
) -> None:
    service = compose["services"]["redis"]
    command = words(service["command"])
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert size(options["--maxmemory"]) * 2 < size(service["mem_limit"])
    assert options["--maxmemory-policy"] == "noeviction"
    assert (options["--appendonly"], options["--appendfsync"]) == ("yes", "always")
    assert options["--dir"] == "/data"
    assert "redis-data:/data" in service["volumes"]
    assert options["--aclfile"] == "/acl/users.acl"
    assert "redis-users:/acl:ro" in service["volumes"]


def test_no_secret_stands_in_a_file_of_settings_or_in_an_environment(
    compose: dict[str, Any],
) -> None:
    files = {name: each["file"] for name, each in compose["secrets"].items()}
    assert files == {name: f"./.secrets/{name}" for name in files}
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {".secrets/", ".env"} <= set(ignored)
    for name, service in compose["services"].items():
        for variable, text in service.get("environment", {}).items():
            if re.search(r"TOKEN|PASSWORD|SECRET", variable):
                assert variable.endswith("_FILE"), (name, variable)
                assert text.removeprefix("/run/secrets/") in service["secrets"]
            assert not re.search(r"://[^/]*:[^/]*@", str(text)), (name, variable)
    assert "PASSWORD" not in (ROOT / ".env.example").read_text()
    assert "TOKEN" not in (ROOT / ".env.example").read_text()


def test_each_container_gets_only_its_own_secrets(compose: dict[str, Any]) -> None:
    given = {name: set(each.get("secrets", ())) for name, each in compose["services"].items()}
    controllers, agents = {"redis-controller-password"}, {"redis-agent-password"}
    assert {name: secrets for name, secrets in given.items() if secrets} == {
        "redis-users": controllers | agents,
        "redis": controllers,
        "controller": controllers | {"token"},
        "worker": agents,
        "worker-cpu": agents,
        "prometheus": {"prometheus-token"},
        "grafana": {"grafana-password"},
    }


def test_only_the_controller_and_grafana_are_published_and_on_loopback(
    compose: dict[str, Any],
) -> None:
    services = compose["services"]
    published = {name: each["ports"] for name, each in services.items() if "ports" in each}
    assert published == {"controller": ["127.0.0.1:8400:8400"], "grafana": ["127.0.0.1:3000:3000"]}
    on = {name: set(each.get("networks", ())) for name, each in services.items()}
    assert {name for name in on if "control" in on[name]} == {"redis", "controller", *WORKERS}
    assert on["prometheus"] == {"metrics"}
    for network in ("control", "metrics"):
        assert compose["networks"][network]["internal"] is True


@pytest.mark.parametrize(
    ("service", "settings"),
    [
        ("controller", Settings),
        ("redis-users", AclSettings),
        ("worker", AgentSettings),
        ("worker-cpu", AgentSettings),
    ],
)
def test_every_variable_of_a_service_is_one_that_its_settings_read(
    compose: dict[str, Any], service: str, settings: type[BaseSettings]
) -> None:
    known = {f"MESHLOOM_{name.upper()}" for name in settings.model_fields}
    variables = compose["services"][service]["environment"]
    given = {name for name in variables if name.startswith("MESHLOOM_")}
    assert given
    assert given <= known


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
    for service in WORKERS:
        volumes = compose["services"][service]["volumes"]
        assert f"checkpoints:{settings.checkpoint_root}" in volumes


def test_backup_and_restore_have_the_volumes_that_redis_and_agents_write(
    compose: dict[str, Any],
) -> None:
    for name, mode in (("backup", ":ro"), ("restore", "")):
        service = compose["services"][name]
        assert f"redis-data:/redis{mode}" in service["volumes"]
        assert f"checkpoints:/checkpoints{mode}" in service["volumes"]
        assert service["network_mode"] == "none"


def test_prometheus_and_grafana_get_the_rules_and_the_dashboard(compose: dict[str, Any]) -> None:
    services = compose["services"]
    mounted = {}
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
                mounted[target] = ROOT / source
    yaml = YAML(typ="safe", pure=True)
    scraped = yaml.load(mounted["/etc/prometheus/prometheus.yml"])
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["controller:8400"]}]
    secret = job["authorization"]["credentials_file"]
    assert secret.removeprefix("/run/secrets/") in services["prometheus"]["secrets"]
    for rules in scraped["rule_files"]:
        assert f"/etc/prometheus/{rules}" in mounted
    provisioning = mounted["/etc/grafana/provisioning"]
    (source,) = yaml.load(provisioning / "datasources/prometheus.yml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.load(provisioning / "dashboards/meshloom.yml")["providers"]
    dashboard = mounted[f"{provider['options']['path']}/meshloom.json"]
    (variable,) = [
        each
        for each in json.loads(dashboard.read_text())["templating"]["list"]
        if each["type"] == "datasource"
    ]
    assert variable["query"] == "prometheus"


def test_bare_machines_and_compose_scrape_alike() -> None:
    yaml = YAML(typ="safe", pure=True)
    bare, compose = (
        yaml.load(ROOT / "deploy/prometheus" / name) for name in ("prometheus.yml", "compose.yml")
    )
    for each in (bare, compose):
        (job,) = each["scrape_configs"]
        job.pop("static_configs")
        job.pop("authorization")
    assert bare == compose


def test_prepare_adds_lines_behind_a_last_one_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy/prepare.sh", tmp_path / "deploy")
    (tmp_path / ".env").write_text("MESHLOOM_PORT=8500")
    for _ in range(2):
        subprocess.run(["sh", tmp_path / "deploy/prepare.sh"], check=True, capture_output=True)
    lines = (tmp_path / ".env").read_text().splitlines()
    names = [line.split("=")[0] for line in lines]
    assert lines[0] == "MESHLOOM_PORT=8500"
    assert names == ["MESHLOOM_PORT", "MESHLOOM_WORKER_MEMORY", "MESHLOOM_WORKER_CPUS"]


def test_prepare_makes_secrets_once_and_lets_no_rank_read_the_agents(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy/prepare.sh", tmp_path / "deploy")
    shutil.copy(ROOT / ".env.example", tmp_path)
    named = set(rendered(PREPARED)["secrets"])

    def prepared() -> dict[str, str]:
        subprocess.run(["sh", tmp_path / "deploy/prepare.sh"], check=True, capture_output=True)
        return {path.name: path.read_text() for path in (tmp_path / ".secrets").iterdir()}

    secrets = prepared()
    assert set(secrets) == named
    assert secrets.pop("prometheus-token") == ""
    assert len(set(secrets.values())) == len(secrets)
    for text in secrets.values():
        assert re.fullmatch(r"[0-9a-f]{64}", text)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / ".secrets").iterdir()
    }
    assert stat.S_IMODE((tmp_path / ".secrets").stat().st_mode) == 0o700
    assert modes.pop("redis-agent-password") == 0o400
    # Users of containers other than root read them.
    assert [name for name, mode in modes.items() if not mode & 0o004] == []
    settings = dict(
        line.split("=", 1)
        for line in (tmp_path / ".env").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    rendered(settings)
    assert size(settings["MESHLOOM_WORKER_MEMORY"]) >= 1 << 30

    (tmp_path / ".secrets/prometheus-token").write_text("given")
    before = (tmp_path / ".env").read_text()
    assert prepared() == secrets | {"prometheus-token": "given"}
    assert (tmp_path / ".env").read_text() == before
