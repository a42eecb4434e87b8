"""What the parts of ``benchmarks.control_plane`` share: a filled Redis, a controller's process, printed times."""

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
from redis import Redis

from benchmarks.simulated_cluster import SimulatedCluster
from services.controller.adapters.redis import redis_ports
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Quota
from services.local.embedded_redis import EmbeddedRedis
from tests.waiting import until

_LONGEST_S: Final = 15.0
# One owner has them all, and more have ended than one may keep by default.
_QUOTA: Final = Quota(not_ended=1_000_000, kept=1_000_000)
_FEWEST: Final = 3


@dataclass(frozen=True)
class Size:
    """How many jobs have ended, wait and run; how many ranks those have that wait or run."""

    ended: int = 10_000
    waiting: int = 1_000
    running: int = 64
    ranks: int = 1_024


@contextlib.asynccontextmanager
async def cluster(size: Size) -> AsyncIterator[tuple[SimulatedCluster, Ports, Redis, str]]:
    """A Redis with such a cluster; nobody leads."""
    with (
        tempfile.TemporaryDirectory(prefix="meshloom-plane-") as folder,
        EmbeddedRedis.start(Path(folder)) as server,
        Redis.from_url(server.url, decode_responses=True) as redis,
    ):
        async with redis_ports(server.url, quota=_QUOTA) as ports:
            cluster = SimulatedCluster(redis, ports, size.ranks)
            epoch = await ports.leadership.take("seeder")
            if epoch is None:
                raise AssertionError("another controller leads")
            redis.config_set("auto-aof-rewrite-percentage", 0)
            redis.config_set("appendfsync", "no")
            await cluster.fill(epoch, ended=size.ended, waiting=size.waiting, running=size.running)
            redis.config_set("appendfsync", "always")
            await ports.leadership.release("seeder")
            yield cluster, ports, redis, server.url


@contextlib.contextmanager
def controller(
    redis_url: str, telemetry_url: str | None = None
) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    """A client of a controller in a process of its own, and that process, as long as the block lasts."""
    environment = os.environ | {  # noqa: TID251 what the controller's process inherits
        "MESHLOOM_REDIS_URL": redis_url,
        "MESHLOOM_TELEMETRY_REDIS_URL": "" if telemetry_url in {None, redis_url} else telemetry_url,
        "MESHLOOM_PORT": "0",
        "MESHLOOM_RATE_PER_S": "1000000",
        "MESHLOOM_RATE_BURST": "1000000",
    }
    # Into a file: nobody reads a pipe here, and a full one would stop the controller.
    with (
        tempfile.NamedTemporaryFile("r+", prefix="meshloom-plane-", suffix=".log") as log,
        subprocess.Popen(
            [sys.executable, "-m", "services.controller"], env=environment, stderr=log.fileno()
        ) as process,
    ):
        try:
            url = until(lambda: _url_in(Path(log.name).read_text(encoding="utf-8")))
            with httpx.Client(base_url=url, timeout=120) as client:
                yield client, psutil.Process(process.pid)
        finally:
            process.terminate()


def _url_in(log: str) -> str | None:
    for line in log.splitlines():
        told: dict[str, Any] = json.loads(line) if line.endswith("}") else {}
        if told.get("event") == "listening":
            return str(told["url"])
    return None


def goes_on(took: Sequence[float], count: int) -> bool:
    """Whether there are to be more: so many in all, fewer where they take long, but some."""
    return len(took) < count and (sum(took) < _LONGEST_S or len(took) < _FEWEST)


def timed(work: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of so many calls; of fewer, where they take long."""
    took: list[float] = []
    while goes_on(took, count):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return took


def report(name: str, took: Sequence[float]) -> None:
    """Print the median and the 99th percentile of these seconds, in ms."""
    times = sorted(1e3 * t for t in took)
    p99 = times[min(math.ceil(0.99 * len(times)), len(times)) - 1]
    say(f"{name:<44}{statistics.median(times):9.1f}  p99 {p99:9.1f}  ({len(times)} times)")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
