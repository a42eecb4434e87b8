"""The fault table: each fault is really injected, and the job ends as if nothing had happened."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx2
import pytest
import redis

from services.contract.api.queue import DrainRequest
from services.contract.api.views import JobView
from services.contract.redis import redis_keys
from services.contract.words.states import JobState, NodeState
from tests.chaos.conftest import LONG, STEPS, check, eventually, finish, paced, set_pace
from tests.chaos.invariants import Losses
from tests.chaos.proxy import Mode
from tests.cluster import Cluster
from tests.parts import gone

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

# Less than what Redis keeps of an ended job for, which the check after each test reads.
_SHIFT_S: Final = 300
STEP_LINE = re.compile(r"^step (\d+)/", re.MULTILINE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, of which one is enough for a job."""
    with Cluster(tmp_path_factory.mktemp("cluster"), {"loom-1": 2, "loom-2": 2}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> Losses:
    """The losses of the job that nobody disturbs."""
    job = cluster.submit(**LONG, model=paced(cluster.folder / "no-orders", 0.0))
    assert cluster.rested(job.id).state is JobState.SUCCEEDED
    check(cluster, job.id)
    return cluster.losses(job.id)


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    """Where ranks are told to fail."""
    return tmp_path


@pytest.fixture
def job(cluster: Cluster, undisturbed: Losses, orders: Path) -> JobView:
    """The job, at a pace that leaves time for faults, once it has committed a checkpoint."""
    assert len(undisturbed) == STEPS
    return cluster.committed(cluster.submit(**LONG, model=paced(orders, 0.08)).id)


def test_a_rank_that_raises_exits_or_runs_out_of_memory_is_named_and_the_next_attempt_goes_on(
    cluster: Cluster, job: JobView, orders: Path, undisturbed: Losses
) -> None:
    faults = {
        "raise": "ArithmeticError: this rank fails as it was told to",
        "exit": "exited with code 7",
        "run out of memory": "can't allocate memory",
    }
    for fence, fault in enumerate(faults, start=1):
        in_its_turn(cluster, job.id, attempt=fence)
        (orders / "rank-1").write_text(fault)
    finish(cluster, job.id, undisturbed)
    *failed, last = cluster.client.attempts(job.id).items
    assert last.failure is None
    for attempt, words in zip(failed, faults.values(), strict=True):
        assert attempt.failure is not None
        assert attempt.failure.rank == 1
        assert words in (attempt.failure.error or "")
        assert attempt.time_to_detect_s is not None


def test_a_frozen_node_with_nowhere_else_to_go_has_its_ranks_ended_when_it_wakes(
    cluster: Cluster, job: JobView, undisturbed: Losses
) -> None:
    here, elsewhere = homes(cluster, job)
    cluster.client.drain(elsewhere, DrainRequest())
    ranks = [cluster.rank_pid(job.id, rank, attempt=1) for rank in range(2)]
    cluster.nodes[here].freeze()
    cluster.in_state(job.id, JobState.RESTARTING)
    cluster.nodes[here].thaw()
    eventually(lambda: gone(ranks))
    done = finish(cluster, job.id, undisturbed)
    cluster.client.undrain(elsewhere)
    assert done.attempt == 2


def test_a_node_that_is_cut_off_is_left_and_what_it_trained_alone_counts_for_nothing(
    cluster: Cluster, job: JobView, undisturbed: Losses
) -> None:
    here, elsewhere = homes(cluster, job)
    ranks = [cluster.rank_pid(job.id, rank, attempt=1) for rank in range(2)]
    with cluster.links[here].misbehaving(Mode.BLACK_HOLE):
        moved = cluster.at_step(job.id, 1, attempt=2)
        assert homes(cluster, moved)[0] == elsewhere
        eventually(lambda: cluster.node_view(here).state is NodeState.LOST)
    eventually(lambda: gone(ranks))
    eventually(lambda: cluster.node_view(here).state is NodeState.READY)
    done = finish(cluster, job.id, undisturbed)
    assert done.attempt == 2


def test_a_controller_that_is_away_loses_no_step_and_tells_the_truth_when_it_is_back(
    cluster: Cluster, job: JobView, orders: Path, undisturbed: Losses
) -> None:
    cluster.controller.kill()
    trained = trains_on(cluster, job, 25)
    set_pace(orders, 1.0)  # it is not to end before there is somebody to ask
    cluster.controller.start()
    back = cluster.job(job.id)
    assert back.state is JobState.RUNNING
    assert cluster.at_step(job.id, trained).restarts == 0
    done = finish(cluster, job.id, undisturbed)
    assert (done.attempt, done.restarts) == (1, 0)


def test_what_happens_while_the_controller_is_away_is_acted_on_when_it_is_back(
    cluster: Cluster, job: JobView, orders: Path, undisturbed: Losses
) -> None:
    ranks = [cluster.rank_pid(job.id, rank, attempt=1) for rank in range(2)]
    cluster.controller.kill()
    ranks[1].kill()
    eventually(lambda: gone(ranks))
    cluster.controller.start()
    cluster.at_step(job.id, 1, attempt=2)
    cluster.controller.kill()
    set_pace(orders, 0.0)
    eventually(lambda: logged_step(cluster, job.id, attempt=2) == STEPS)
    cluster.controller.start()
    done = finish(cluster, job.id, undisturbed)
    (first, _) = cluster.client.attempts(job.id).items
    assert first.failure is not None
    assert (first.failure.rank, first.failure.signal) == (1, "SIGKILL")
    assert (done.attempt, done.restarts) == (2, 1)


def test_redis_killed_and_away_stops_no_training_and_loses_no_checkpoint(
    cluster: Cluster, job: JobView, undisturbed: Losses
) -> None:
    before = {c.id for c in cluster.client.checkpoints(job.id).items}
    cluster.redis.kill()
    trains_on(cluster, job, 30)  # a checkpoint falls into it
    cluster.redis.start()
    done = finish(cluster, job.id, undisturbed)
    assert (done.attempt, done.restarts) == (1, 0)
    assert before <= committed_ever(cluster, job.id)


def test_redis_out_of_everybodys_reach_for_longer_than_a_lease_kills_no_job(
    cluster: Cluster, job: JobView, undisturbed: Losses
) -> None:
    for link in cluster.links.values():
        link.mode = Mode.BLACK_HOLE
    with redis.Redis.from_url(cluster.redis_url) as server:
        leases = [redis_keys.node_lease(name) for name in cluster.nodes]
        eventually(lambda: server.exists(*leases) == 0)
    trains_on(cluster, job, 6)
    for link in cluster.links.values():
        link.mode = Mode.PASS
    eventually(lambda: cluster.ready() == set(cluster.nodes))
    done = finish(cluster, job.id, undisturbed)
    assert (done.attempt, done.restarts) == (1, 0)


def test_a_redis_that_refuses_all_it_can_refuse_stops_no_training_and_loses_nothing(
    cluster: Cluster, job: JobView, orders: Path, undisturbed: Losses
) -> None:
    set_pace(orders, 0.3)
    with redis.Redis.from_url(cluster.redis_url) as server:
        server.execute_command("ACL", "SETUSER", "owner", "on", ">owner", "~*", "&*", "+@all")
    path = urlsplit(cluster.redis_url).path
    with redis.Redis.from_url(f"unix://owner:owner@{path}") as server:
        ways: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            (
                "maxmemory",
                lambda: server.config_set("maxmemory", "1"),
                lambda: server.config_set("maxmemory", "0"),
            ),
            (
                "replica",
                lambda: server.replicaof("127.0.0.1", "1"),
                lambda: server.replicaof("NO", "ONE"),
            ),
            (
                "ACL",
                lambda: server.acl_setuser("default", enabled=True, commands=["-@all", "+auth"]),
                lambda: server.acl_setuser("default", enabled=True, commands=["+@all"]),
            ),
        ]
        for word, refuse, repair in ways:
            refuse()
            eventually(lambda word=word: word in unready(cluster))  # type: ignore[misc] # mypy knows no defaults here
            trains_on(cluster, job, 5)
            repair()
            eventually(lambda: cluster.ready() == set(cluster.nodes))
    config = Path(cluster.redis.command[1])
    usual = config.read_text()
    cluster.redis.kill()
    config.write_text(
        f"{usual}\nenable-debug-command local\nloading-process-events-interval-bytes 1024\n"
    )
    cluster.redis.start()
    with (
        # Redis answers once it is loaded, which takes four seconds and more.
        redis.Redis.from_url(cluster.redis_url, socket_timeout=120) as server,
        redis.Redis.from_url(cluster.redis_url) as other,
        ThreadPoolExecutor() as beside,
    ):
        eventually(lambda: cluster.ready() == set(cluster.nodes))
        config.write_text(usual)
        server.mset({f"filling:{number}": "x" * 100 for number in range(2_000)})
        server.config_set("key-load-delay", "2000")
        reload = beside.submit(server.execute_command, "DEBUG", "RELOAD")
        eventually(lambda: says_that_it_loads(other))
        trains_on(cluster, job, 5)
        reload.result()
        server.config_set("key-load-delay", "0")
        server.delete(*(f"filling:{number}" for number in range(2_000)))
    done = finish(cluster, job.id, undisturbed)
    assert (done.attempt, done.restarts) == (1, 0)


def says_that_it_loads(server: "redis.Redis") -> bool:
    try:
        return not server.ping()
    except redis.exceptions.BusyLoadingError:
        return True
    except redis.exceptions.ConnectionError:
        return False


def unready(cluster: Cluster) -> str:
    """Why the controller is not ready; "" while it is."""
    answer = httpx2.get(f"{cluster.url}/readyz")
    return answer.text if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE else ""


@pytest.mark.skipif(
    shutil.which("cc") is None, reason="clock.c is compiled by cc, and PATH has none"
)
def test_a_clock_of_redis_that_is_set_on_and_back_costs_no_attempt_and_no_step(
    cluster: Cluster, job: JobView, orders: Path, undisturbed: Losses, tmp_path: Path
) -> None:
    set_pace(orders, 0.3)
    library, shift = tmp_path / "clock.so", tmp_path / "shift"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    shift.write_bytes(bytes(8))
    usual = cluster.redis.environment
    try:
        cluster.redis.kill()
        preloaded = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(shift)}
        cluster.redis.environment = {**usual, **preloaded}
        cluster.redis.start()
        eventually(lambda: cluster.ready() == set(cluster.nodes))
        with redis.Redis.from_url(cluster.redis_url) as server:
            began = redis_seconds(server)
            for turns in (1, -1, 0):
                with shift.open("r+b") as file:
                    file.write((turns * _SHIFT_S).to_bytes(8, "little", signed=True))
                assert abs(redis_seconds(server) - began - turns * _SHIFT_S) < _SHIFT_S / 2
                trains_on(cluster, job, 5)
                eventually(lambda: cluster.ready() == set(cluster.nodes))
        done = finish(cluster, job.id, undisturbed)
        assert (done.attempt, done.restarts) == (1, 0)
    finally:
        cluster.redis.kill()
        cluster.redis.environment = usual
        cluster.redis.start()


def redis_seconds(server: "redis.Redis") -> int:
    seconds, _ = server.time()
    return int(seconds)


def test_requests_whose_replies_are_lost_are_applied_once(
    cluster: Cluster, job: JobView, undisturbed: Losses
) -> None:
    victim = cluster.rank_pid(job.id, 1, attempt=1)
    for link in cluster.links.values():
        link.mode = Mode.LOSE_REPLIES
    trains_on(cluster, job, 30)
    victim.kill()
    eventually(lambda: all(link.replies_lost > 5 for link in cluster.links.values()))
    for link in cluster.links.values():
        link.mode = Mode.PASS
    done = finish(cluster, job.id, undisturbed)
    assert (done.attempt, done.restarts) == (2, 1)


def in_its_turn(cluster: Cluster, job_id: str, *, attempt: int) -> None:
    """Return once this attempt, and no later one, has made a step of its own."""
    assert cluster.at_step(job_id, 1, attempt=attempt).attempt == attempt
    eventually(lambda: logged_step(cluster, job_id, attempt=attempt) > 0)


def homes(cluster: Cluster, job: JobView) -> tuple[str, str]:
    """The node on which the job is, and the other one."""
    assert job.plan is not None
    here = job.plan.ranks[0].node_id
    (elsewhere,) = set(cluster.nodes) - {here}
    return here, elsewhere


def trains_on(cluster: Cluster, job: JobView, steps: int) -> int:
    """Return once the first attempt has made so many more steps, which its rank says by itself."""
    goal = logged_step(cluster, job.id, attempt=1) + steps
    assert goal < STEPS
    eventually(lambda: logged_step(cluster, job.id, attempt=1) >= goal)
    return goal


def logged_step(cluster: Cluster, job_id: str, *, attempt: int) -> int:
    """The newest step that rank 0 wrote of, whoever can or cannot be reached."""
    logs = cluster.folder.glob(f"homes/*/nodes/*/jobs/{job_id}/attempt-{attempt}/rank-0.stdout.log")
    return max(
        (int(step) for log in logs for step in STEP_LINE.findall(log.read_text())), default=0
    )


def committed_ever(cluster: Cluster, job_id: str) -> set[str]:
    """The checkpoints that a manifest names, retired or not."""
    records = cluster.chain(job_id).records()
    return {r.checkpoint_id for r in records if r.kind == "checkpoint_committed"}
