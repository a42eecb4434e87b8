"""Deadlines, on virtual time: the reconciler as it looks, a clock that is moved by hand."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from services.contract.redis_keys import NODE_LEASE_MS
from services.contract.states import ExitReason, JobState
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.node import Lease
from services.controller.ports.jobs import Stored
from services.controller.use_cases.reconcile import Reconciler
from tests.controller.histories import NODE, NOW, node, running

FENCED_WITHIN_MS = 6_000
BEAT_MS = 500


@given(frozen_after_ms=st.integers(7_000, 9_000), since_beat_ms=st.integers(0, BEAT_MS))
def test_a_node_that_froze_is_fenced_within_six_seconds(
    frozen_after_ms: int, since_beat_ms: int
) -> None:
    clock = NOW
    server = MemoryServer(now_ms=lambda: clock, epoch=1)
    job = running()
    server.jobs[job.id] = Stored(job, 1)
    server.nodes[NODE] = node()
    reconciler = Reconciler(memory_ports(server), 1)
    frozen_ms = NOW + frozen_after_ms
    lease_ends_ms = frozen_ms - since_beat_ms + NODE_LEASE_MS

    async def until_fenced() -> int:
        nonlocal clock
        while server.jobs[job.id].job.state is not JobState.RESTARTING:
            server.leases = {NODE: Lease("life-1", 1)} if clock < lease_ends_ms else {}
            clock += int(1_000 * await reconciler.look())
        return clock

    fenced_ms = asyncio.run(until_fenced())
    (attempt,) = server.jobs[job.id].job.attempts
    assert attempt.exit_reason is ExitReason.NODE_LOST
    assert attempt.ended_ms is not None
    assert frozen_ms < attempt.ended_ms <= fenced_ms
    assert attempt.ended_ms - frozen_ms <= FENCED_WITHIN_MS
