"""What the control plane costs with thousands of jobs and ranks.

    python -m benchmarks.control_plane [--short] [--telemetry-apart]
        [--only looks history growth requests rest ranks memory]

A real Redis that syncs every write, as the local stack has it, and jobs in it as the controller itself writes
them: some have ended, some run on simulated nodes, the rest wait for slots. The looks of the leader are timed
in this process; requests go to a controller in a process of its own, which leads. All figures are of two cores
at most; times in ms. ``--short`` takes fewer jobs and less than two minutes.
"""

import argparse
import asyncio
import contextlib
import math
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Final

import httpx
from redis import Redis

from benchmarks.beating_ranks import MANY_RANKS, measure_beating_ranks
from benchmarks.controller_memory import JOBS_AN_HOUR, measure_memory
from benchmarks.plane_rig import Size, cluster, controller, goes_on, report, say, timed
from benchmarks.simulated_cluster import NODES_A_JOB, spec
from services.contract.redis import redis_keys as keys
from services.controller.ports.coordination import Ports
from services.controller.use_cases.facts import apply_facts
from services.controller.use_cases.reconcile import Reconciler
from tests.waiting import until

_LOOKS: Final = 50
_REQUESTS: Final = 100
_SUBMISSIONS: Final = 40
_QUEUED_AT_POST: Final = 400
_LONGEST_S: Final = 15.0
_FEWEST: Final = 3
_FACTS: Final = 128
_CORES: Final = 2
_HISTORY: Final = 10
_REST_S: Final = 20.0
_PARTS: Final = ("looks", "history", "growth", "requests", "rest", "ranks", "memory")


_FEW_RANKS: Final = 512
_FEW_JOBS: Final = 100
_SHORT: Final = Size(ended=500, waiting=200, running=8, ranks=256)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true")
    parser.add_argument(
        "--telemetry-apart", action="store_true", help="ranks: telemetry has a Redis of its own"
    )
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=_PARTS, help="these parts")
    chosen = parser.parse_args()
    size = _SHORT if chosen.short else Size()
    with contextlib.suppress(AttributeError):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:_CORES])
    say(
        f"{size.ended} jobs have ended, {size.waiting} wait, {size.running} run; "
        f"those that wait or run have {size.ranks} ranks"
    )
    more = replace(size, ended=size.ended * _HISTORY)
    if "looks" in chosen.only:
        asyncio.run(_looks(size))
    if "history" in chosen.only:
        say(f"{more.ended} jobs have ended")
        asyncio.run(_idle_looks(more))
    if "growth" in chosen.only:
        asyncio.run(_growth(size))
    if "requests" in chosen.only:
        asyncio.run(_requests(size))
    if "rest" in chosen.only:
        for waiting in (0, min(_QUEUED_AT_POST, size.waiting)):
            asyncio.run(_rest(replace(size, ended=0, waiting=waiting)))
    if "ranks" in chosen.only:
        ranks = _FEW_RANKS if chosen.short else MANY_RANKS
        asyncio.run(measure_beating_ranks(ranks, apart=chosen.telemetry_apart))
    if "memory" in chosen.only:
        asyncio.run(measure_memory(_FEW_JOBS if chosen.short else JOBS_AN_HOUR))


@contextlib.asynccontextmanager
async def _leading(ports: Ports, redis: Redis) -> AsyncIterator[tuple[Reconciler, int]]:
    """A reconciler whose first looks are done, and its epoch; the lease is held for the whole block."""
    epoch = await ports.leadership.take("benchmark")
    if epoch is None:
        raise AssertionError("another controller leads")
    redis.persist(keys.LEADER)
    reconciler = Reconciler(ports, epoch)
    await ports.facts.prepare()
    await _settled(reconciler, redis)
    yield reconciler, epoch
    await ports.leadership.release("benchmark")


async def _settled(reconciler: Reconciler, redis: Redis) -> float:
    """Look until nothing is written any more; answers the seconds of the looks that wrote."""
    began = time.perf_counter()
    before = _versions(redis)
    while True:
        took = time.perf_counter() - began
        await reconciler.look()
        after = _versions(redis)
        if after == before:
            return took
        before = after


async def _looks(size: Size) -> None:
    async with (
        cluster(size) as (filled, ports, redis, _),
        _leading(ports, redis) as (reconciler, epoch),
    ):
        await _look_often(reconciler)
        ends = filled.running[0]
        before = _versions(redis)
        filled.end(ends)
        await _handle_all(ports, epoch)
        took = await _settled(reconciler, redis)
        say(f"{'one job ends: looks until all is written':<44}{1e3 * took:9.1f}")
        after = _versions(redis, [ends.id])
        written = sum(after[name] - before.get(name, 0) for name in after)
        say(f"{'one job ends: records written':<44}{written:9d}")


async def _idle_looks(size: Size) -> None:
    async with (
        cluster(size) as (_, ports, redis, _url),
        _leading(ports, redis) as (reconciler, _epoch),
    ):
        await _look_often(reconciler)


async def _growth(size: Size) -> None:
    """What the end of one job costs with ever more that wait, nodes, and ranks of a job."""
    few = replace(size, ended=0, waiting=min(size.waiting, 8), running=min(size.running, 8))
    nodes = replace(few, ranks=2 * NODES_A_JOB)
    by_count = {
        "jobs that wait": {
            count: replace(few, waiting=count) for count in _doubled(size.waiting // 8)
        },
        "nodes": {
            NODES_A_JOB * count: replace(nodes, running=count) for count in _doubled(size.running)
        },
        "ranks of each job": {
            count: replace(few, ranks=count) for count in _doubled(size.ranks // 4)
        },
    }
    for what, sizes in by_count.items():
        costs = {count: await _cost_of_an_end(each) for count, each in sizes.items()}
        shown = ", ".join(f"{1e3 * cost:.1f} at {count}" for count, cost in costs.items())
        say(f"processor time of facts and looks at one job's end, by {what}: {shown}")
        slope, _ = statistics.linear_regression(
            [math.log(count) for count in costs], [math.log(cost) for cost in costs.values()]
        )
        say(f"{f'exponent of that in the {what}':<44}{slope:9.2f}")


def _doubled(count: int) -> list[int]:
    return [count << times for times in range(4)]


async def _cost_of_an_end(size: Size) -> float:
    """Processor time until all is written, s: the median of four."""
    async with (
        cluster(size) as (filled, ports, redis, _),
        _leading(ports, redis) as (reconciler, epoch),
    ):
        took = []
        for job in filled.running[:4]:
            filled.end(job)
            began = time.process_time()
            await _handle_all(ports, epoch)
            await _settled(reconciler, redis)
            took.append(time.process_time() - began)
        return statistics.median(took)


async def _requests(size: Size) -> None:
    queued = min(_QUEUED_AT_POST, size.waiting // 2)
    async with cluster(replace(size, waiting=queued)) as (filled, _, redis, url):
        with controller(url) as (client, _):
            until(lambda: "leading" in client.get("/readyz").text, timeout_s=60)
            began = time.perf_counter()
            until(lambda: redis.exists(keys.JOB_INDEX), timeout_s=600)
            say(f"{'all records indexed after, s':<44}{time.perf_counter() - began:9.1f}")
            body = spec(size.ranks).model_dump(mode="json", exclude_unset=True)
            await _answered("until it has looked at everything", client, "/v1/queue", count=1)
            report(
                f"POST with {queued} queued",
                timed(lambda: _created(client, body), _SUBMISSIONS),
            )
            missing = size.waiting - queued - _SUBMISSIONS
            await filled.add_waiting(max(missing, 0))
            job_id = filled.running[1].id
            for path in (
                "/v1/jobs?state=RUNNING",
                "/v1/jobs?state=RUNNING&fields=name,state,reason,priority,owner,created_at",
                f"/v1/jobs/{job_id}",
                f"/v1/jobs/{job_id}/ranks",
                "/v1/queue",
                "/metrics",
            ):
                shown = path.replace(job_id, "{id}")
                await _answered(f"GET {shown}", client, path, count=_REQUESTS)
            small = spec(1, priority=10).model_dump(mode="json", exclude_unset=True)
            report(
                "submit → slots committed",
                timed(lambda: _seated(client, redis, small), _SUBMISSIONS),
            )


async def _rest(size: Size) -> None:
    """What a controller takes while nothing happens to the jobs that wait and run."""
    async with cluster(size) as (_, _, redis, url):
        with controller(url) as (client, process):
            until(lambda: "leading" in client.get("/readyz").text, timeout_s=60)
            until(lambda: redis.exists(keys.JOB_INDEX), timeout_s=600)
            client.get("/v1/queue").raise_for_status()
            before = process.cpu_times()
            await asyncio.sleep(_REST_S)  # the period that is measured
            after = process.cpu_times()
            used = after.user + after.system - before.user - before.system
            name = f"controller at rest with {size.waiting} queued, percent of a core"
            say(f"{name:<54}{100 * used / _REST_S:9.1f}")


def _created(client: httpx.Client, body: dict[str, Any]) -> str:
    answer = client.post("/v1/jobs", json=body)
    answer.raise_for_status()
    return str(answer.json()["id"])


def _seated(client: httpx.Client, redis: Redis, body: dict[str, Any]) -> None:
    """Submit a job for which there is room, and return once its attempt is committed."""
    job_id = _created(client, body)
    until(lambda: redis.hget(keys.job(job_id), "state") != "QUEUED", every_s=0.001, timeout_s=120)


async def _answered(name: str, client: httpx.Client, path: str, count: int) -> None:
    def ask() -> None:
        client.get(path).raise_for_status()

    report(name, timed(ask, count))


async def _handle_all(ports: Ports, epoch: int) -> None:
    while entries := await ports.facts.next(_FACTS, 0.05):
        await apply_facts(ports, entries, epoch)
        await ports.facts.acknowledge([entry.id for entry in entries])


def _versions(redis: Redis, others: Sequence[str] = ()) -> dict[str, int]:
    """The versions of all active jobs, and of these others."""
    names = sorted({str(name) for name in redis.smembers(keys.ACTIVE_JOBS)} | {*others})
    with redis.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hget(keys.job(name), "version")
        return {n: int(v) for n, v in zip(names, pipe.execute(), strict=True) if v is not None}


async def _look_often(reconciler: Reconciler) -> None:
    """Idle looks: on the clock, and what they take of the processor, which others do not add to."""
    clock: list[float] = []
    worked: list[float] = []
    while goes_on(clock, _LOOKS):
        began, busy = time.perf_counter(), time.process_time()
        await reconciler.look()
        clock.append(time.perf_counter() - began)
        worked.append(time.process_time() - busy)
    report("idle look", clock)
    report("idle look, processor time", worked)


if __name__ == "__main__":
    main()
