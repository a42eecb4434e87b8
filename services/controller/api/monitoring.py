"""What Prometheus scrapes at ``/metrics``."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.contract.words.states import JobState
from services.controller.ports.coordination import Ports

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_CHEAP_S: Final = 0.05
_REST: Final = 20
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Monitor:
    """The controller's figures, in a registry of their own.

    Args:
        now: A clock that never goes back, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._turn = asyncio.Lock()
        self._counted_at = -math.inf
        self._rests_until = -math.inf
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "meshloom_http_requests",
            "Requests answered",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "meshloom_http_request_seconds",
            "Seconds until the answer began",
            ["method", "route"],
            registry=self._registry,
        )
        self._jobs = Gauge("meshloom_jobs", "Jobs by state", ["state"], registry=self._registry)
        self._ranks = Gauge(
            "meshloom_ranks",
            "Ranks of living attempts by device",
            ["device"],
            registry=self._registry,
        )

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request; ``route`` is the pattern, so that ids make no series.

        A method may be any word: those that no route knows are one series.
        """
        method = method if method in _METHODS else "other"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    async def exposition(self, ports: Ports) -> bytes:
        """The figures as text. Raises StoreUnavailableError.

        Anybody may ask, and to count takes as long as there are jobs: who asks meanwhile gets what is being
        counted, and counting takes a twentieth of the time at most.
        """
        asked_at = self._now()
        async with self._turn:
            began = self._now()
            if self._counted_at < asked_at and began >= self._rests_until:
                await self._count(ports)
                self._counted_at, took_s = began, self._now() - began
                self._rests_until = began if took_s < _CHEAP_S else began + _REST * took_s
        return generate_latest(self._registry)

    async def _count(self, ports: Ports) -> None:
        for state, count in (await ports.jobs.counts()).items():
            self._jobs.labels(JobState(state).value).set(count)
        ranks = {"cpu": 0, "cuda": 0}
        for stored in await ports.jobs.active():
            plan, attempt = stored.job.plan, stored.job.attempt
            if plan is not None and attempt is not None and attempt.live_nodes:
                ranks[plan.device_type] += plan.world_size
        for device, count in ranks.items():
            self._ranks.labels(device).set(count)
