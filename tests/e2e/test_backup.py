"""A stack is backed up while it trains, loses everything, and goes on from the backup."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from ruamel.yaml import YAML

from services.contract.words.states import CheckpointState, JobState
from tests.e2e.conftest import LONG, Stack, free_port, running_stack
from tests.waiting import until

ROOT = Path(__file__).parents[2]


def _is_older_than_7(program: str | None) -> bool:
    if program is None:
        return True
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return int(said.partition("v=")[2].split(".", maxsplit=1)[0]) < 7


pytestmark = [
    pytest.mark.ranks,
    pytest.mark.redis,
    pytest.mark.skipif(
        _is_older_than_7(shutil.which("redis-server")),
        reason="PATH has no redis-server 7 or newer, whose append-only file is a folder",
    ),
]


@contextlib.contextmanager
def redis_of_compose(folder: Path, port: int) -> Iterator[None]:
    """Redis on ``folder``, with what docker-compose.yml says about keeping data."""
    service = YAML(typ="safe").load(ROOT / "docker-compose.yml")["services"]["redis"]
    words = str(service["command"]).split()
    kept = words[words.index("--appendonly") : words.index("--maxmemory")]
    command = ["redis-server", "--port", str(port), "--dir", str(folder), *kept]
    folder.mkdir(exist_ok=True)
    words = ["" if word == '""' else word for word in command]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        assert process.poll() is None
        try:
            return bool(client.ping())
        except RedisConnectionError:
            return False

    try:
        with Redis(port=port) as client:
            until(answers)
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def whole(folder: Path, port: int) -> Iterator[Stack]:
    url = f"redis://127.0.0.1:{port}/0"
    (folder / "home").mkdir(exist_ok=True)
    storage = str(folder / "storage")
    with (
        redis_of_compose(folder / "redis", port),
        running_stack(
            folder / "home", MESHLOOM_REDIS_URL=url, MESHLOOM_CHECKPOINT_ROOT=storage
        ) as stack,
    ):
        yield stack


def backup(action: str, folder: Path) -> str:
    command = [sys.executable, "-m", "services.controller.backup", action]
    command += ["--redis", folder / "redis", "--checkpoints", folder / "storage"]  # type: ignore[list-item]
    done = subprocess.run([*command, folder / "backup"], capture_output=True, text=True, check=True)
    return done.stdout


def test_a_stack_is_saved_while_it_trains_and_goes_on_bit_for_bit_after_it_was_wiped(
    tmp_path: Path,
) -> None:
    port = free_port()
    with whole(tmp_path, port) as stack:
        done = stack.rested(stack.submit(name="done").id)
        kept = stack.client.checkpoints(done.id).items
        # Of so many steps that it trains on while the backup is made.
        long = {**LONG, "train": {"steps": 160, "global_batch": 4, "seed": 7}}
        training = stack.submit(**long, name="training").id
        until(
            lambda: [
                c
                for c in stack.client.checkpoints(training).items
                if c.state is CheckpointState.COMMITTED
            ]
        )

        assert backup("save", tmp_path) == "save: Redis and 2 jobs with their checkpoints\n"

        assert stack.job(training).state is JobState.RUNNING
        late = stack.submit(name="late", train={"steps": 1, "global_batch": 4}).id
        assert stack.rested(training).state is JobState.SUCCEEDED
        undisturbed = stack.losses(training)

    for name in ("redis", "storage", "home"):
        shutil.rmtree(tmp_path / name)
    assert backup("restore", tmp_path) == "restore: Redis and 2 jobs with their checkpoints\n"

    with whole(tmp_path, port) as stack:
        jobs = {job.id: job for job in stack.client.jobs().items}
        assert set(jobs) == {done.id, training}
        assert late not in jobs
        assert jobs[done.id].state is JobState.SUCCEEDED
        assert stack.client.checkpoints(done.id).items == kept
        again = stack.rested(training)
        assert again.state is JobState.SUCCEEDED, again.failure
        (*_, attempt) = stack.client.attempts(training).items
        assert attempt.fence == 2
        assert attempt.resumed_from is not None
        found = stack.losses(training)
        # Of steps between the copies of Redis and of the checkpoint the curve may be lost.
        assert found.items() <= undisturbed.items()
        assert attempt.first_step is not None
        assert set(range(attempt.first_step, max(undisturbed) + 1)) <= set(found)
