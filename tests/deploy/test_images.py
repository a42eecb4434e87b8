"""The images are built and docker-compose.yml's services run from them (`make test-images`).

See `tests.deploy.images` and `tests.deploy.containers` for how, and for what is not seen here: an
engine's own start, its networks, and the images of Redis, Prometheus and Grafana.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import meshloom
from meshloom.client import RestClient
from services.contract.words.states import CheckpointState, JobState, NodeState
from tests.deploy.compose_file import ROOT, rendered, size
from tests.deploy.containers import Project, environments
from tests.deploy.images import PROGRAMS, Workshop
from tests.e2e.conftest import REST, tiny_spec
from tests.waiting import until

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root builds and runs images this way"),
    pytest.mark.skipif(
        bool(missing := [name for name in PROGRAMS if shutil.which(name) is None]),
        reason=f"PATH lacks {', '.join(missing)}",
    ),
]
URL = "http://127.0.0.1:8400"
NODE = "cpu-1"
RUNNING = ("redis-users", "redis", "controller", "worker-cpu")
RANK_USER = "10002:10002"
PACED = {"train": {"steps": 400, "global_batch": 4, "seed": 7}, "checkpoint": {"every_steps": 20}}


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    folder = Path(str(request.config.getoption("--images"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def secrets_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What deploy/prepare.sh makes."""
    copy = tmp_path_factory.mktemp("checkout")
    (copy / "deploy").mkdir()
    shutil.copy(ROOT / "deploy/prepare.sh", copy / "deploy")
    shutil.copy(ROOT / ".env.example", copy)
    subprocess.run(["sh", copy / "deploy/prepare.sh"], check=True)
    return copy / ".secrets"


@pytest.fixture(scope="module")
def project(folder: Path, secrets_folder: Path) -> Iterator[Project]:
    """All services of the profile `cpu`, started in order."""
    workshop = Workshop(folder)
    stack = folder / f"stack-{secrets.token_hex(4)}"
    variables = {"MESHLOOM_WORKER_MEMORY": "6g", "MESHLOOM_WORKER_CPUS": "2"}
    variables |= {"MESHLOOM_BACKUP": str(stack / "backup"), "MESHLOOM_SHM_SIZE": "1gb"}
    file = rendered(variables)
    try:
        controller, worker, others = (
            workshop.meshloom("controller"),
            workshop.meshloom("worker"),
            workshop.others(),
        )
        images = dict.fromkeys(("redis-users", "controller"), controller)
        images |= dict.fromkeys(("worker-cpu", "backup", "restore"), worker)
        images |= others
        stack.mkdir()
        running = Project(file, images, stack, secrets_folder)
        with running.network():
            try:
                up(running)
                yield running
            finally:
                running.down()
    finally:
        workshop.removed()
        shutil.rmtree(stack, ignore_errors=True)


def up(project: Project) -> None:
    project.up(*RUNNING)
    project.healthy("controller", "worker-cpu")


@pytest.fixture(scope="module")
def token(secrets_folder: Path) -> str:
    return (secrets_folder / "token").read_text()


@pytest.fixture
def client(project: Project, token: str) -> Iterator[RestClient]:
    assert project.containers
    with RestClient(URL, token=token, patience_s=60) as client:
        yield client


def rested(client: RestClient, job_id: str) -> JobState:
    def look() -> JobState | None:
        state = client.job(job_id).state
        return state if state in REST else None

    return until(look, timeout_s=600)


def losses(client: RestClient, job_id: str) -> dict[int, float | None]:
    return {each.step: each.loss for each in client.metrics(job_id, max_points=10_000).items}


def at_a_commit(client: RestClient, job_id: str) -> None:
    def look() -> bool:
        assert client.job(job_id).state not in REST, client.job(job_id).failure
        committed = CheckpointState.COMMITTED
        return any(each.state is committed for each in client.checkpoints(job_id).items)

    until(look, timeout_s=600)


def assert_redis_had_all(project: Project) -> None:
    """Redis has loaded its file without a refusal, and no job had to be found in storage."""
    assert "CRITICAL" not in project.containers["redis"].log.read_text()
    assert "job_found_again" not in project.containers["controller"].log.read_text()


def test_a_job_trains_and_its_export_is_downloaded_by_a_controller_that_only_reads_the_storage(
    project: Project, client: RestClient, token: str, tmp_path: Path
) -> None:
    until(lambda: [node.state for node in client.nodes().items] == [NodeState.READY])
    job_id = client.submit(tiny_spec()).id
    assert rested(client, job_id) is JobState.SUCCEEDED, client.job(job_id).failure
    with meshloom.Client(URL, token=token) as programs:
        checkpoint = programs.jobs.get(job_id).checkpoints()[0]
        (file,) = checkpoint.download(tmp_path / "model")
        assert checkpoint.view.export is not None
        stored = Path("checkpoints") / checkpoint.view.export.folder / file.name
    assert file.read_bytes() == (project.folder / "volumes" / stored).read_bytes()
    # It reads as its group, and nothing else of the storage, and writes nothing.
    controller = project.containers["controller"]
    root = Path("/var/lib/meshloom")
    assert controller.run("cat", str(root / stored)).returncode == 0
    shards = root / "checkpoints" / job_id / "shards" / checkpoint.id / "rank-00000.safetensors"
    assert "Permission denied" in controller.run("cat", str(shards)).stderr
    assert "Read-only" in controller.run("touch", str(root / "checkpoints/new")).stderr


@pytest.mark.parametrize("name", ["redis", "controller", "worker-cpu"])
def test_a_container_has_the_rights_and_limits_that_compose_gives_it(
    project: Project, name: str
) -> None:
    container = project.containers[name]
    service = project.file["services"][name]
    assert "Read-only file system" in container.run("touch", "/new").stderr
    assert container.run("sh", "-c", "echo x > /tmp/new && rm /tmp/new").returncode == 0
    main = container.processes()[0]
    status = Path(f"/proc/{main.pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["NoNewPrivs"] == "1"
    names = subprocess.run(
        ["capsh", f"--decode={fields['CapBnd']}"], capture_output=True, text=True, check=True
    ).stdout
    bounding = set(names.strip().partition("=")[2].upper().split(",")) - {""}
    assert bounding == {f"CAP_{each}" for each in service.get("cap_add", ())}
    assert (int(fields["Uid"].split()[0]) == 0) == (name == "worker-cpu")
    limits = {
        "memory/memory.limit_in_bytes": size(str(service["mem_limit"])),
        "pids/pids.max": int(service["pids_limit"]),
        "cpu/cpu.cfs_quota_us": int(float(service["cpus"]) * 100_000),
    }
    for path, wanted in limits.items():
        assert int(container.run("cat", f"/sys/fs/cgroup/{path}").stdout) == wanted


def test_no_secret_is_in_an_environment_and_no_rank_reads_one(
    project: Project, secrets_folder: Path
) -> None:
    texts = [path.read_text() for path in secrets_folder.iterdir() if path.stat().st_size]
    assert len(texts) >= 4
    for name in ("redis", "controller", "worker-cpu"):
        known = environments(project.containers[name].processes())
        assert "PATH=" in known
        assert [text for text in texts if text in known] == []
    worker = project.containers["worker-cpu"]
    path = "/run/secrets/redis-agent-password"
    assert worker.run("cat", path).stdout == (secrets_folder / "redis-agent-password").read_text()
    assert "Permission denied" in worker.run("cat", path, user=RANK_USER).stderr
    shared = (project.folder / "volumes/redis-users/users.acl").read_text()
    assert [text for text in texts if text in shared] == []


def test_redis_takes_only_its_users_and_keeps_its_file_on_the_volume(
    project: Project, secrets_folder: Path
) -> None:
    redis = project.containers["redis"]
    assert "NOAUTH" in redis.run("redis-cli", "ping").stdout
    password = (secrets_folder / "redis-agent-password").read_text()
    agent = ("redis-cli", "--no-auth-warning", "--user", f"agent-{NODE}", "--pass", password)
    assert redis.run(*agent, "ping").stdout == "PONG\n"
    assert "NOPERM" in redis.run(*agent, "set", "ml:epoch", "9").stdout
    assert "NOPERM" in redis.run(*agent, "flushall").stdout
    files = {path.name for path in (project.folder / "volumes/redis-data/appendonlydir").iterdir()}
    assert any(name.endswith(".manifest") for name in files)


def test_prometheus_scrapes_with_its_token_and_has_the_rules(
    project: Project, token: str, secrets_folder: Path
) -> None:
    project.up("prometheus")

    def health() -> str:
        container = project.containers["prometheus"]
        assert container.process.poll() is None, container.log.read_text()
        try:
            answer = httpx.get("http://127.0.0.1:9090/api/v1/targets")
        except httpx.TransportError:
            return ""
        if answer.status_code != httpx.codes.OK:  # it reads its files yet
            return ""
        return str([each["health"] for each in answer.json()["data"]["activeTargets"]])

    # Its token is made after it has started, as an operator does.
    until(lambda: health() == "['down']", timeout_s=120)
    made = httpx.post(
        f"{URL}/v1/tokens",
        json={"subject": "prometheus", "scope": "viewer"},
        headers={"Authorization": f"Bearer {token}"},
    ).raise_for_status()
    (secrets_folder / "prometheus-token").write_text(made.json()["token"])
    until(lambda: health() == "['up']", timeout_s=120)
    rules = httpx.get("http://127.0.0.1:9090/api/v1/rules").json()["data"]["groups"]
    assert len(rules[0]["rules"]) >= 10
    query = {"query": "meshloom_leading"}
    until(
        lambda: httpx.get("http://127.0.0.1:9090/api/v1/query", params=query).json()["data"][
            "result"
        ]
    )
    project.containers.pop("prometheus").stopped()


def test_new_containers_on_the_same_volumes_lose_no_step_and_a_backup_brings_all_back(
    project: Project, client: RestClient
) -> None:
    undisturbed = client.submit(tiny_spec(**PACED)).id
    assert rested(client, undisturbed) is JobState.SUCCEEDED, client.job(undisturbed).failure

    # The upgrade of `docker compose up --build`: each container is stopped, and another takes its place.
    upgraded = client.submit(tiny_spec(**PACED)).id
    at_a_commit(client, upgraded)
    project.down()
    up(project)
    assert rested(client, upgraded) is JobState.SUCCEEDED, client.job(upgraded).failure
    assert client.job(upgraded).restarts == 0
    assert_redis_had_all(project)
    assert losses(client, upgraded) == losses(client, undisturbed)

    saved = client.submit(tiny_spec(**PACED)).id
    at_a_commit(client, saved)
    assert "with their checkpoints" in project.once("backup")
    assert client.job(saved).state is JobState.RUNNING
    kept = {job.id for job in client.jobs().items}
    project.down(volumes=True)
    assert "with their checkpoints" in project.once("restore")
    up(project)
    assert {job.id for job in client.jobs().items} == kept
    assert_redis_had_all(project)
    assert rested(client, saved) is JobState.SUCCEEDED, client.job(saved).failure
    found, whole = losses(client, saved), losses(client, undisturbed)
    # Of steps between the copies of Redis and of the checkpoint the curve may be lost.
    assert found.items() <= whole.items()
    first = client.attempts(saved).items[-1].first_step
    assert first is not None
    assert set(range(first, max(whole) + 1)) <= set(found)
