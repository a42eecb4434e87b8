"""What Prometheus scrapes at ``/metrics``."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.contract.words.states import JobState, NodeState
from services.controller.api.job_series import job_series
from services.controller.ports.coordination import Ports
from services.controller.use_cases.figures import cluster_figures, job_figures

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_CHEAP_S: Final = 0.05
_REST: Final = 20
_LOOK_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_LAG_BUCKETS_S: Final = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Monitor:
    """The controller's figures, in a registry of their own.

    Args:
        silent_pools: Why pools do not answer this controller, by name; read at each count.
        now: A clock that never goes back, in seconds.
    """

    def __init__(
        self,
        silent_pools: Mapping[str, str] = MappingProxyType({}),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._silent_pools = silent_pools
        self._now = now
        self._turn = asyncio.Lock()
        self._counted_at = -math.inf
        self._rests_until = -math.inf
        self._text = b""
        self._written_at = -math.inf
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
        self._queued = self._gauge("meshloom_queue_jobs", "Jobs that wait for slots")
        self._queue_age = self._gauge(
            "meshloom_queue_oldest_seconds", "How long the job waits that waits longest"
        )
        self._nodes = self._gauge("meshloom_nodes", "Nodes by state", "state")
        self._slots = self._gauge("meshloom_slots", "Slots of nodes that live", "device")
        self._slots_free = self._gauge(
            "meshloom_slots_free", "Slots that a gang could have now", "device"
        )
        self._pool_reservations = self._gauge(
            "meshloom_pool_reservations", "Reservations of a pool by state", "pool", "state"
        )
        self._pool_nodes = self._gauge(
            "meshloom_pool_nodes",
            "Nodes of a pool by the state of their reservation",
            "pool",
            "state",
        )
        self._pool_most_nodes = self._gauge(
            "meshloom_pool_max_nodes", "Nodes that a pool may have at a time", "pool"
        )
        self._pool_silent = self._gauge(
            "meshloom_pool_silent",
            "1 while a pool does not answer the controller that leads",
            "pool",
        )
        self._leading = self._gauge("meshloom_leading", "1 while this controller leads")
        self._looks = Histogram(
            "meshloom_look_seconds",
            "Seconds that a look of the reconciler at all jobs and nodes takes",
            buckets=_LOOK_BUCKETS_S,
            registry=self._registry,
        )
        self._fact_lag = Histogram(
            "meshloom_fact_lag_seconds",
            "Seconds from the arrival of an agent's fact until it is handled",
            buckets=_LAG_BUCKETS_S,
            registry=self._registry,
        )

    def _gauge(self, name: str, told: str, *labels: str) -> Gauge:
        return Gauge(name, told, labels, registry=self._registry)

    def looked(self, seconds: float) -> None:
        """A look of the reconciler took so long."""
        self._looks.observe(seconds)

    def fact_handled(self, seconds: float) -> None:
        """A fact was handled so long after it arrived."""
        self._fact_lag.observe(seconds)

    def leads(self, is_leading: bool) -> None:  # noqa: FBT001 its only argument
        """Whether this controller leads now."""
        self._leading.set(is_leading)

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
        counted, and counting takes a twentieth of the time at most. Writing takes a hundredth of a second: who
        asks meanwhile gets what is being written.
        """
        asked_at = self._now()
        async with self._turn:
            began = self._now()
            if self._counted_at < asked_at and began >= self._rests_until:
                await self._count(ports)
                self._counted_at, took_s = began, self._now() - began
                self._rests_until = began if took_s < _CHEAP_S else began + _REST * took_s
            if self._written_at < asked_at:
                # All who ask in this round of the loop wait for the same text.
                await asyncio.sleep(0)
                self._written_at = self._now()
                self._text = generate_latest(self._registry)
            return self._text

    async def job_exposition(self, ports: Ports) -> bytes:
        """The same, and behind it the series of running jobs. Raises StoreUnavailableError."""
        text = await self.exposition(ports)
        return text + job_series(*await job_figures(ports))

    async def _count(self, ports: Ports) -> None:
        figures = await cluster_figures(ports)
        for state, count in figures.jobs.items():
            self._jobs.labels(JobState(state).value).set(count)
        for device, count in figures.ranks.items():
            self._ranks.labels(device).set(count)
        self._queued.set(figures.queued)
        self._queue_age.set(figures.queue_age_s)
        for node_state in NodeState:
            self._nodes.labels(node_state.value).set(figures.nodes.get(node_state.value, 0))
        for device in figures.slots:
            self._slots.labels(device).set(figures.slots[device])
            self._slots_free.labels(device).set(figures.slots_free[device])
        for pool in figures.pools:
            for name, count in pool.reservations.items():
                self._pool_reservations.labels(pool.name, name).set(count)
                self._pool_nodes.labels(pool.name, name).set(pool.nodes[name])
            self._pool_most_nodes.labels(pool.name).set(pool.max_nodes)
            self._pool_silent.labels(pool.name).set(pool.name in self._silent_pools)
