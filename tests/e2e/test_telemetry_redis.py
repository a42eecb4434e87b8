"""A Redis of telemetry's own: what is there, and that nothing else waits for it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
import redis

from services.cli.errors import CliError
from services.contract.api.views import JobView
from services.contract.redis import redis_keys as keys
from services.contract.words.states import JobState
from services.local.embedded_redis import redis_program, wait_for_redis
from services.local.settings import child_environment
from tests.cluster import Cluster
from tests.parts import Part
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis, pytest.mark.timeout(300)]

OF_TELEMETRY: Final = (keys.job_ranks, keys.job_steps, keys.job_logs, keys.job_records)


@dataclass
class Apart:
    """A cluster with a second Redis."""

    cluster: Cluster
    program: Part
    url: str

    def start(self) -> None:
        self.program.start()
        wait_for_redis(self.url)

    def names(self, url: str, job_id: str) -> set[str]:
        """The keys of a job that a server has."""
        with redis.Redis.from_url(url, decode_responses=True) as server:
            found: Any = server.keys(f"{keys.job(job_id)}*")
            return set(found)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    folder = tmp_path_factory.mktemp("apart")
    with contextlib.ExitStack() as stack:
        program = stack.enter_context(redis_program(folder / "telemetry"))
        part = Part("telemetry", program.command, child_environment(), program.log)
        stack.callback(part.stop)
        part.start()
        wait_for_redis(program.url)
        setting = {"MESHLOOM_TELEMETRY_REDIS_URL": program.url}
        cluster = Cluster(folder, {"loom-1": 4}, setting, **setting)
        yield Apart(stack.enter_context(cluster), part, program.url)


def test_telemetry_is_on_its_server_alone_and_goes_with_its_job(apart: Apart) -> None:
    cluster = apart.cluster
    job = cluster.submit(train={"steps": 30, "global_batch": 4})
    assert cluster.rested(job.id).state is JobState.SUCCEEDED
    told = {key(job.id) for key in OF_TELEMETRY}
    assert told <= apart.names(apart.url, job.id)
    assert not told & apart.names(cluster.redis_url, job.id)
    assert len(cluster.losses(job.id)) == 30
    assert {rank.step for rank in cluster.client.ranks(job.id).items} == {30}
    assert list(cluster.client.logs(job.id))
    cluster.client.delete(job.id)
    assert not apart.names(apart.url, job.id)
    assert not apart.names(cluster.redis_url, job.id)


def test_jobs_begin_train_commit_and_end_while_telemetry_is_away(apart: Apart) -> None:
    cluster = apart.cluster
    job = cluster.submit(
        train={"steps": 100_000, "global_batch": 4}, checkpoint={"every_steps": 20, "keep_last": 2}
    )
    before = cluster.at_step(job.id, 50)
    apart.program.kill()
    seen = until(lambda: _away(cluster, job.id))
    assert seen.state is JobState.RUNNING
    assert seen.attempt == before.attempt
    committed = until(lambda: _later(cluster, job.id, seen.latest_checkpoint))
    with pytest.raises(CliError, match="the one for telemetry: Redis does not answer"):
        cluster.client.metrics(job.id)
    short = cluster.submit(train={"steps": 10, "global_batch": 4})
    until(lambda: cluster.job(short.id).state is JobState.SUCCEEDED)
    assert cluster.node_view("loom-1").lease_s is not None
    apart.start()
    back = cluster.job_when(job.id, lambda job: not job.telemetry_away and job.progress.step > 50)
    assert (back.attempt, back.restarts) == (before.attempt, 0)
    until(lambda: _later(cluster, job.id, committed))
    # What the short job did in the meantime was held.
    assert until(lambda: len(cluster.losses(short.id)) == 10)
    cluster.client.kill(job.id)
    cluster.rested(job.id)
    steps = sorted(cluster.losses(job.id))
    assert steps == list(range(1, steps[-1] + 1))


def test_a_server_for_telemetry_that_lost_all_costs_no_step_of_a_curve(apart: Apart) -> None:
    cluster = apart.cluster
    job = cluster.submit(train={"steps": 40, "global_batch": 4})
    assert cluster.rested(job.id).state is JobState.SUCCEEDED
    losses = cluster.losses(job.id)
    until(lambda: keys.job_last(job.id) in apart.names(cluster.redis_url, job.id))
    with redis.Redis.from_url(apart.url) as server:
        server.flushall()
    assert cluster.losses(job.id) == losses
    assert len(losses) == 40
    assert cluster.job(job.id).progress.step == 40


def _away(cluster: Cluster, job_id: str) -> JobView | None:
    job = cluster.job(job_id)
    return job if job.telemetry_away else None


def _later(cluster: Cluster, job_id: str, checkpoint: str | None) -> str | None:
    newest = cluster.job(job_id).latest_checkpoint
    return newest if newest != checkpoint else None
