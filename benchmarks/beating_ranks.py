"""The part ``ranks`` of ``benchmarks.control_plane``: what it costs that ranks are watched.

Simulated agents beat once a second in a process of their own, each beat with a sample of every rank, as real
ones do. Meanwhile requests are timed, and the way of a fact from an agent to a client that follows all events.
Then it is said what Redis and the controller take for a rank, and for how many ranks a core of each suffices.
"""

import asyncio
import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event as ProcessEvent
from pathlib import Path
from typing import Final

import httpx
import psutil
from redis import Redis

from benchmarks.plane_rig import Size, cluster, controller, report, say, timed
from benchmarks.simulated_cluster import NODES_A_JOB, SPARE_NODE, spec
from services.contract.jobs.plans import RankPlacement
from services.contract.messages.commands import LaunchGang
from services.contract.messages.facts import GangLaunched
from services.contract.redis import redis_keys as keys
from services.controller.domain.job.job import Job
from services.local.embedded_redis import EmbeddedRedis
from tests.controller.agent_double import AgentDouble
from tests.controller.simulated_agents import SimulatedAgent
from tests.waiting import until

MANY_RANKS: Final = 10_240
_RANKS_A_JOB: Final = 1_024
_ASKED: Final = 50
_TOLD: Final = 40
_WATCHED_S: Final = 20.0
_WANTED: Final = 100_000
_Seats = Mapping[tuple[str, int], Sequence[RankPlacement]]


async def measure_beating_ranks(ranks: int, *, apart: bool) -> None:
    """Print the figures with so many ranks that beat; ``apart``: telemetry has a Redis without a file."""
    a_job = min(_RANKS_A_JOB, ranks)
    size = Size(ended=20, waiting=20, running=ranks // a_job, ranks=a_job)
    async with cluster(size) as (filled, _, redis, url):
        with (
            _telemetry(redis, url, apart=apart) as (telemetry, telemetry_url),
            controller(url, telemetry_url) as (client, process),
            _beating(url, telemetry_url, filled.running, telemetry),
        ):
            until(lambda: "leading" in client.get("/readyz").text, timeout_s=60)
            where = "a server of its own" if apart else "the same server"
            say(f"{ranks} ranks of {size.running} jobs beat once a second, telemetry on {where}")
            _requests(client, filled.running[0].id)
            _events(client, redis)
            _costs(redis, telemetry, process, ranks)
            _bytes((redis, telemetry) if apart else (redis,), filled.running[0].id)


@contextmanager
def _telemetry(redis: Redis, url: str, *, apart: bool) -> Iterator[tuple[Redis, str]]:
    """The server that has telemetry."""
    if not apart:
        yield redis, url
        return
    with (
        tempfile.TemporaryDirectory(prefix="meshloom-telemetry-") as folder,
        EmbeddedRedis.start(Path(folder)) as server,
        Redis.from_url(server.url, decode_responses=True) as telemetry,
    ):
        telemetry.config_set("appendonly", "no")
        yield telemetry, server.url


def _requests(client: httpx.Client, job_id: str) -> None:
    for path in ("/v1/jobs?state=RUNNING", f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/ranks"):

        def ask(path: str = path) -> None:
            client.get(path).raise_for_status()

        report(f"GET {path.replace(job_id, '{id}')}, ranks beating", timed(ask, _ASKED))


def _events(client: httpx.Client, redis: Redis) -> None:
    """From the moment at which an agent tells a fact until a client that follows all events has its event."""
    agent = AgentDouble(redis, SPARE_NODE)
    body = spec(1, priority=10).model_dump(mode="json", exclude_unset=True)
    seen: dict[str, float] = {}
    with _following(client, seen):
        took = []
        for _ in range(_TOLD):
            job_id = str(client.post("/v1/jobs", json=body).raise_for_status().json()["id"])
            launch = agent.awaits(LaunchGang, job_id)
            fact = GangLaunched(
                job_id=job_id, fence=launch.fence, node_id=SPARE_NODE, pids={0: 100}
            )
            began = time.monotonic()
            agent.tell(fact)
            until(lambda: seen.get(job_id, 0.0) > began, every_s=0.005)  # noqa: B023 called at once
            took.append(seen[job_id] - began)
    report("fact told → event at a client, by SSE", took)


@contextmanager
def _following(client: httpx.Client, seen: dict[str, float]) -> Iterator[None]:
    """Within, ``seen`` has by job when its newest event came."""
    opened = threading.Event()
    following = httpx.Client(base_url=client.base_url, timeout=60)

    def follow() -> None:
        try:
            with following.stream(
                "GET", "/v1/events", headers={"Accept": "text/event-stream"}
            ) as lines:
                opened.set()
                for line in lines.iter_lines():
                    if line.startswith("data:"):
                        seen[json.loads(line[5:])["job_id"]] = time.monotonic()
        except httpx.HTTPError:
            return  # the block has ended

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    opened.wait(60)
    try:
        yield
    finally:
        following.close()


def _costs(redis: Redis, telemetry: Redis, process: psutil.Process, ranks: int) -> None:
    """What Redis and the controller take in some seconds in which nobody asks anything."""
    server, other = (
        psutil.Process(int(each.info("server")["process_id"])) for each in (redis, telemetry)
    )
    is_apart = server.pid != other.pid
    calls, samples, written = _calls(telemetry), _samples(telemetry), _appended(redis)
    used, led, began = _used_s(other), _used_s(process), time.monotonic()
    used_here = _used_s(server)
    time.sleep(_WATCHED_S)  # noqa: TID251 (the period that is measured)
    took = time.monotonic() - began
    share, lead = (_used_s(other) - used) / took, (_used_s(process) - led) / took
    here = (_used_s(server) - used_here) / took
    told = _samples(telemetry) - samples
    if not told:
        raise AssertionError("no agent beats any more: the machine is too busy for so many ranks")
    commands = (_calls(telemetry) - calls) / told
    bytes_each = (_appended(redis) - written) / told
    say(f"{'samples a second of each rank':<44}{told / took / ranks:9.2f}")
    say(f"{'commands a sample, within scripts too':<44}{commands:9.2f}")
    say(f"{'bytes a sample that Redis appends':<44}{bytes_each:9.0f}")
    if is_apart:
        say(f"{'Redis for telemetry, percent of a core':<44}{100 * share:9.1f}")
    say(f"{'Redis, percent of a core':<44}{100 * here:9.1f}")
    say(f"{'controller, percent of a core':<44}{100 * lead:9.1f}")
    say(
        f"at one sample a second a core of Redis is full at {told / took / share:.0f} ranks; {_WANTED} ranks "
        f"would append {_WANTED * bytes_each / 1e6:.0f} MB a second"
    )


def _bytes(servers: Sequence[Redis], job_id: str) -> None:
    """What Redis keeps of one job of each kind."""
    redis = servers[0]
    ended = str(redis.zrange(keys.jobs_in_state("SUCCEEDED"), 0, 0)[0])
    waiting = str(redis.zrange(keys.jobs_in_state("QUEUED"), 0, 0)[0])
    for name, its in (("running", job_id), ("waiting", waiting), ("ended", ended)):
        total = sum(
            int(server.memory_usage(key, samples=0) or 0)
            for server in servers
            for key in (keys.job(its), *server.scan_iter(f"{keys.job(its)}:*", count=10_000))
        )
        say(f"{f'bytes in Redis of a job that is {name}':<44}{total:9d}")


def _calls(redis: Redis) -> int:
    told: dict[str, dict[str, int]] = redis.info("commandstats")
    return sum(each["calls"] for each in told.values())


def _samples(redis: Redis) -> int:
    return int(redis.info("commandstats")["cmdstat_hset"]["calls"])


def _appended(redis: Redis) -> int:
    return int(redis.info("persistence")["aof_current_size"])


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextmanager
def _beating(url: str, telemetry_url: str, jobs: Sequence[Job], telemetry: Redis) -> Iterator[None]:
    """Within, the agents of these jobs' nodes beat, in a process of their own."""
    seats: dict[str, dict[tuple[str, int], list[RankPlacement]]] = {}
    for job in jobs:
        for seat in () if job.plan is None else job.plan.ranks:
            its = seats.setdefault(seat.node_id, {})
            its.setdefault((job.id, job.fence), []).append(seat)
    if len(seats) != len(jobs) * NODES_A_JOB:
        raise AssertionError(f"{len(jobs)} jobs run on {len(seats)} nodes")
    for name in seats:
        telemetry.delete(keys.node_beat(name))
    spawning = multiprocessing.get_context("spawn")
    stopping = spawning.Event()
    process = spawning.Process(
        target=_beat, args=(url, telemetry_url, seats, stopping), daemon=True
    )
    process.start()
    try:
        until(lambda: all(telemetry.exists(keys.node_beat(name)) for name in seats), timeout_s=60)
        yield
        if not process.is_alive():
            raise AssertionError("the simulated agents have failed")
    finally:
        stopping.set()
        process.join()


def _beat(
    url: str, telemetry_url: str, seats: Mapping[str, _Seats], stopping: ProcessEvent
) -> None:
    """What the agents' process does."""

    async def run() -> None:
        agents = [
            SimulatedAgent(url, name, 0, gangs=its, beat_s=1.0) for name, its in seats.items()
        ]
        for agent in agents:
            agent.telemetry_url = telemetry_url
        tasks = [asyncio.create_task(agent.run()) for agent in agents]
        stopped = asyncio.create_task(asyncio.to_thread(stopping.wait))
        await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()

    asyncio.run(run())
