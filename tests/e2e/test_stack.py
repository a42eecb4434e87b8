"""The local stack comes up, refuses a second owner, and goes down without a trace."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from meshloom.client import RestClient as Client
from services.contract.redis import redis_keys
from services.local.settings import child_environment
from tests.e2e.conftest import LONG, USER_MODELS, Stack, free_port, tiny_spec
from tests.parts import gone
from tests.waiting import until

OPERATOR = "an-operator-of-this-test"
# A stack with a token admits no models but the built-in ones, which take no rests.
BUILT_IN = {"train": {"steps": 1_000, "global_batch": 4, "seed": 7}}
pytestmark = [pytest.mark.ranks, pytest.mark.redis]


def _local(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.local", *arguments],
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_second_owner_of_a_home_is_refused_in_one_line(stack: Stack) -> None:
    done = _local("up", MESHLOOM_HOME=str(stack.home), MESHLOOM_PORT="0")
    assert done.returncode == 2
    assert done.stderr.startswith("meshloom: a stack already runs on")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_taken_port_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = _local("up", MESHLOOM_HOME=str(tmp_path), MESHLOOM_PORT=port)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert "MESHLOOM_PORT" in done.stderr


def test_redis_killed_alone_comes_back_and_nobody_who_watches_a_job_notices(stack: Stack) -> None:
    before = stack.rested(stack.submit().id)
    job_id = stack.submit(**LONG).id
    stack.at_step(job_id, 7)
    server = stack.part("redis-server")
    os.kill(server.pid, signal.SIGKILL)
    done = stack.rested(job_id)
    assert done.exit_reason == "completed"
    assert done.attempt == 1
    assert sorted(stack.losses(job_id)) == list(range(1, 81))
    assert stack.job(before.id).state == before.state
    assert stack.part("redis-server").pid != server.pid


def test_only_the_controller_holds_its_secrets_and_a_killed_owner_leaves_no_process_and_no_readable_file(
    tmp_path: Path,
) -> None:
    port = free_port()
    owner = subprocess.Popen(
        [sys.executable, "-m", "services.local", "up"],
        env=child_environment(
            MESHLOOM_HOME=str(tmp_path),
            MESHLOOM_PORT=str(port),
            MESHLOOM_TOKEN=OPERATOR,
            MESHLOOM_TELEMETRY_SECRET=OPERATOR[::-1],
            MESHLOOM_TEMPLATE_LINGER_S="0",
        ),
        stderr=subprocess.DEVNULL,
    )
    with Client(f"http://127.0.0.1:{port}", OPERATOR) as client:
        until(lambda: _is_up(client, owner))
        job = client.submit(tiny_spec(**BUILT_IN))
        until(lambda: client.job(job.id).progress.step > 0)
    family = psutil.Process(owner.pid).children(recursive=True)
    assert len(family) >= 6, "Redis, controller, agent, warm process, two ranks"
    for secret in (OPERATOR, OPERATOR[::-1]):
        holders = [p for p in family if secret in p.environ().values()]
        assert [p.cmdline()[-1] for p in holders] == ["services.controller"]
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    everything = [tmp_path, *tmp_path.rglob("*")]
    names = {path.relative_to(tmp_path).parts[0] for path in everything[1:]}
    assert names >= {"checkpoints", "logs", "nodes", "redis"}
    assert [path for path in everything if path.stat().st_mode & 0o077] == []


def test_a_run_that_was_interrupted_goes_on_with_its_job(tmp_path: Path) -> None:
    spec_file = tmp_path / "spec.yaml"
    # Of so many steps that it is interrupted long before its end.
    train = {"steps": 160, "global_batch": 4, "seed": 7}
    spec_file.write_text(json.dumps(tiny_spec(**LONG | {"train": train})))
    port = free_port()
    environment = {
        "MESHLOOM_HOME": str(tmp_path),
        "MESHLOOM_PORT": str(port),
        "MESHLOOM_USER_PATH": str(USER_MODELS),
    }
    command = [sys.executable, "-m", "services.local", "run", str(spec_file)]
    with (
        (tmp_path / "first.log").open("wb") as log,
        subprocess.Popen(
            command, env=child_environment(**environment), stdout=log, stderr=log
        ) as first,
        Client(f"http://127.0.0.1:{port}", patience_s=60) as client,
    ):
        until(lambda: any(job.latest_checkpoint for job in client.jobs().items))
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130
    assert "continues the unfinished job" in (tmp_path / "first.log").read_text()
    second = _local("run", str(spec_file), **environment)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "going on with job_" in second.stdout
    assert "SUCCEEDED" in second.stdout
    assert "attempt      2" in second.stdout, second.stdout


def test_ctrl_c_while_it_starts_ends_it_at_once(tmp_path: Path) -> None:
    environment = {"MESHLOOM_HOME": str(tmp_path), "MESHLOOM_PORT": str(free_port())}
    with subprocess.Popen(
        [sys.executable, "-m", "services.local", "up"],
        env=child_environment(**environment),
        stderr=subprocess.PIPE,
        text=True,
    ) as owner:
        until(lambda: psutil.Process(owner.pid).children())
        family = psutil.Process(owner.pid).children(recursive=True)
        owner.send_signal(signal.SIGINT)
        _, said = owner.communicate(timeout=60)
        assert owner.returncode == 0
    assert "is up" not in said
    assert "Traceback" not in said
    until(lambda: gone(family))


def test_ctrl_c_ends_the_wait_for_a_redis_that_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            "MESHLOOM_HOME": str(tmp_path),
            "MESHLOOM_PORT": str(free_port()),
            "MESHLOOM_REDIS_URL": f"redis://127.0.0.1:{silent.getsockname()[1]}",
        }
        with subprocess.Popen(
            [sys.executable, "-m", "services.local", "up"], env=child_environment(**environment)
        ) as owner:
            connection, _ = silent.accept()
            with connection:
                owner.send_signal(signal.SIGINT)
                assert owner.wait(60) == 0


def test_a_redis_that_runs_already_is_used(tmp_path: Path, redis_url: str) -> None:
    spec_file = tmp_path / "spec.yaml"
    spec_file.write_text(json.dumps(tiny_spec()))
    done = _local(
        *("run", str(spec_file)),
        MESHLOOM_HOME=str(tmp_path / "home"),
        MESHLOOM_PORT=str(free_port()),
        MESHLOOM_REDIS_URL=redis_url,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "home" / "redis").exists()
    with redis.Redis.from_url(redis_url) as client:
        assert client.zcard(redis_keys.JOBS) == 1


def _is_up(client: Client, owner: subprocess.Popen[bytes]) -> bool:
    assert owner.poll() is None
    try:
        return bool(client.nodes().items)
    except Exception:  # noqa: BLE001 whatever it is, it is not up yet
        return False
