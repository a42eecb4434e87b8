"""The part ``memory`` of ``benchmarks.control_plane``: whether the controller grows with what has been.

Jobs run from their submission to their end, one after another by the dozen, on a simulated agent, and lists and
events are read meanwhile. The full size has as many jobs as a cluster in which one ends every two seconds has in
an hour. Printed is the resident memory after each fifth, with all that has ended still in Redis.
"""

import asyncio
from typing import Final

import httpx
import psutil
from redis import Redis

from benchmarks.plane_rig import Size, cluster, controller, say
from benchmarks.simulated_cluster import spec
from services.contract.redis import redis_keys as keys
from tests.controller.simulated_agents import SimulatedAgent
from tests.waiting import until

JOBS_AN_HOUR: Final = 1_800
_PARTS: Final = 5
_AT_ONCE: Final = 20
_LATE_S: Final = 300


async def measure_memory(jobs: int) -> None:
    """Print the controller's memory while so many jobs run from start to end."""
    async with cluster(Size(ended=0, waiting=0, running=0, ranks=2)) as (_, _, redis, url):
        agent = SimulatedAgent(url, "loom-1", _AT_ONCE)
        beating = asyncio.create_task(agent.run())
        try:
            measuring = asyncio.create_task(asyncio.to_thread(_measure, redis, url, jobs))
            await asyncio.wait({measuring, beating}, return_when=asyncio.FIRST_COMPLETED)
            if beating.done():
                beating.result()
            await measuring
        finally:
            beating.cancel()
            await asyncio.wait([beating])


def _measure(redis: Redis, url: str, jobs: int) -> None:
    with controller(url) as (client, process):
        until(lambda: "leading" in client.get("/readyz").text, timeout_s=60)
        sizes = [_resident(process)]
        for part in range(1, _PARTS + 1):
            while (done := _done(redis)) < jobs * part // _PARTS:
                _run_some(client, redis, done)
            sizes.append(_resident(process))
    shown = ", ".join(f"{size:.1f}" for size in sizes)
    say(f"MiB of the controller at the start and after each fifth of {_done(redis)} jobs: {shown}")
    grown = (sizes[-1] - sizes[2]) / (jobs * (_PARTS - 2) / _PARTS)
    say(f"{'KiB that it grew a job, after the second fifth':<44}{1024 * grown:9.2f}")


def _run_some(client: httpx.Client, redis: Redis, done: int) -> None:
    body = spec(1).model_dump(mode="json", exclude_unset=True)
    names = [str(client.post("/v1/jobs", json=body).json()["id"]) for _ in range(_AT_ONCE)]
    until(lambda: _done(redis) >= done + _AT_ONCE, every_s=0.02, timeout_s=_LATE_S)
    for path in ("/v1/jobs?limit=50", "/v1/events?limit=100", f"/v1/jobs/{names[0]}", "/v1/queue"):
        client.get(path).raise_for_status()


def _done(redis: Redis) -> int:
    return int(redis.zcard(keys.jobs_in_state("SUCCEEDED")))


def _resident(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / (1 << 20)
