"""Deadlines, on virtual time: the reconciler as it looks, a clock that is moved by hand."""

import asyncio
import dataclasses
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from services.contract.redis_keys import NODE_LEASE_MS
from services.contract.states import ExitReason, JobState, NodeState
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.machines import MemoryNodes
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


@given(look_ms=st.integers(1_000, 60_000))
def test_a_node_that_froze_is_noticed_however_long_a_look_takes(look_ms: int) -> None:
    assert state_after_looks(look_ms, watched=True) is NodeState.LOST


@given(look_ms=st.integers(NODE_LEASE_MS + 1, 60_000))
def test_a_lease_that_ran_out_while_nobody_saw_redis_proves_nothing(look_ms: int) -> None:
    assert state_after_looks(look_ms, watched=False) is NodeState.READY


def state_after_looks(look_ms: int, *, watched: bool) -> NodeState:
    """The state of a node without a lease, after looks that begin so far from each other."""
    clock = NOW
    server = MemoryServer(now_ms=lambda: clock, epoch=1)
    server.nodes[NODE] = node()
    reconciler = Reconciler(memory_ports(server), 1)

    async def look_often() -> None:
        nonlocal clock
        for _ in range(8):
            await reconciler.look()
            for _ in range(look_ms // 1_000):
                clock += 1_000
                if watched:
                    await reconciler.watch()
            clock += look_ms % 1_000

    asyncio.run(look_often())
    return server.nodes[NODE].state


def test_a_node_that_joins_while_it_is_judged_is_not_lost() -> None:
    clock = NOW
    server = MemoryServer(now_ms=lambda: clock, epoch=1)
    server.nodes[NODE] = node()
    ports = memory_ports(server)
    joined = node().model_copy(update={"incarnation": "life-2", "fact_id": "2-0"})

    class JoinsMeanwhile(MemoryNodes):
        async def leases(self, node_ids: Iterable[str]) -> dict[str, Lease]:
            found = await super().leases(node_ids)
            server.nodes[NODE] = joined
            server.leases[NODE] = Lease("life-2", 5_000)
            return found

    reconciler = Reconciler(dataclasses.replace(ports, nodes=JoinsMeanwhile(server)), 1)

    async def look() -> None:
        nonlocal clock
        for _ in range(7):
            await reconciler.watch()
            clock += 1_000
        await reconciler.look()

    asyncio.run(look())
    assert server.nodes[NODE] == joined
