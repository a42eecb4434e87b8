"""Deadlines, on virtual time: the reconciler as it looks, a clock that is moved by hand."""

import asyncio
import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contract.api.views import StopRequest
from services.contract.messages.commands import LaunchGang, StopGang
from services.contract.messages.facts import Fact
from services.contract.redis.redis_keys import NODE_LEASE_MS
from services.contract.words.states import ExitReason, JobState, NodeState
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.machines import MemoryNodes
from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.decisions.attempt_events import ANSWER_DUE_MS
from services.controller.domain.decisions.retry import BACKOFF_MS
from services.controller.domain.job.events import JobEvent, KillAsked, PauseAsked
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.node import LOST_NODE_KEPT_MS, Drain, Lease
from services.controller.ports.jobs import Stored
from services.controller.ports.machines import FactEntry
from services.controller.use_cases.facts import apply_facts
from services.controller.use_cases.reconcile import Reconciler
from tests.controller.histories import NODE, NOW, killed, new_job, node, placed, play, running

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


def test_a_job_that_changes_while_a_look_takes_seconds_does_not_show_a_clock_that_was_set_back() -> (
    None
):
    clock = NOW
    server = MemoryServer(now_ms=lambda: clock, epoch=1)
    server.nodes[NODE] = node()
    ports = memory_ports(server)

    class ChangesMeanwhile(MemoryNodes):
        async def leases(self, node_ids: Iterable[str]) -> dict[str, Lease]:
            nonlocal clock
            clock += 6_000
            changed = running().model_copy(update={"updated_ms": clock})
            server.jobs[changed.id] = Stored(changed, 1)
            return {name: Lease("life-1", 5_000) for name in node_ids}

    reconciler = Reconciler(dataclasses.replace(ports, nodes=ChangesMeanwhile(server)), 1)
    asyncio.run(reconciler.look())
    (stored,) = server.jobs.values()
    assert (stored.version, stored.job.updated_ms) == (1, clock)


LONGEST_WAIT_MS = BACKOFF_MS[-1]
SLACK_MS = 5_000
LOOK_MS = 1_000
LATER = NOW + 7_200_000


@given(back_ms=st.integers(0, LATER - NOW), waits_ms=st.integers(0, LONGEST_WAIT_MS))
def test_a_clock_that_is_set_back_makes_no_retry_wait_longer_than_the_longest_wait(
    back_ms: int, waits_ms: int
) -> None:
    failed = play(running(), [killed(running())], LATER).job
    waiting = failed.model_copy(update={"not_before_ms": LATER + waits_ms})
    placed_after_ms = until_commanded(waiting, LaunchGang, LATER - back_ms)
    assert placed_after_ms <= waits_ms + SLACK_MS + LOOK_MS


@given(
    back_ms=st.integers(0, LATER - NOW),
    asked=st.sampled_from([None, KillAsked(), PauseAsked(StopRequest(grace_s=10))]),
)
def test_a_clock_that_is_set_back_puts_off_no_command_that_is_sent_again(
    back_ms: int, asked: JobEvent | None
) -> None:
    job = play(new_job(), [placed(new_job()), *([] if asked is None else [asked])], LATER).job
    grace_ms = 0 if job.stop is None else int(job.stop.grace_s * 1_000)
    kind = LaunchGang if asked is None else StopGang
    sent_after_ms = until_commanded(job, kind, LATER - back_ms)
    assert ANSWER_DUE_MS < sent_after_ms <= ANSWER_DUE_MS + grace_ms + SLACK_MS + 2 * LOOK_MS


def until_commanded(job: Job, kind: type[LaunchGang | StopGang], now_ms: int) -> int:
    """How long it takes from then until the node is sent such a command."""
    clock = now_ms
    server = MemoryServer(now_ms=lambda: clock, epoch=1)
    server.jobs[job.id] = Stored(job, 1)
    server.nodes[NODE] = node()
    reconciler = Reconciler(memory_ports(server), 1)

    async def look() -> None:
        nonlocal clock
        while not any(isinstance(command, kind) for command in server.commands(NODE)):
            assert clock - now_ms < 10 * LONGEST_WAIT_MS
            server.leases = {NODE: Lease("life-1", 5_000)}
            clock += int(1_000 * await reconciler.look())

    asyncio.run(look())
    return clock - now_ms


async def told_now(server: MemoryServer, fact: Fact, time_ms: int) -> None:
    await apply_facts(
        memory_ports(server), [FactEntry(f"{time_ms}-0", fact.model_dump_json(), fact.node_id)], 1
    )


@given(ahead_ms=st.integers(0, LATER - NOW))
def test_a_fact_whose_place_in_the_stream_lies_ahead_happens_now(ahead_ms: int) -> None:
    server = MemoryServer(now_ms=lambda: NOW, epoch=1)
    job = running()
    server.jobs[job.id] = Stored(job, 1)
    asyncio.run(told_now(server, killed(job), NOW + ahead_ms))
    after = server.jobs[job.id].job
    assert after.state is JobState.RESTARTING
    assert after.updated_ms == NOW
    assert after.not_before_ms <= NOW + LONGEST_WAIT_MS


@pytest.mark.parametrize("drain", [None, Drain(asked_ms=NOW)])
def test_a_node_that_was_lost_for_a_week_is_forgotten_unless_it_is_to_be_drained(
    drain: Drain | None,
) -> None:
    clock = NOW
    server = MemoryServer(now_ms=lambda: clock, epoch=1)
    server.nodes[NODE] = node(state=NodeState.LOST)
    if drain is not None:
        server.drains[NODE] = drain
    reconciler = Reconciler(memory_ports(server), 1)

    async def look() -> None:
        nonlocal clock
        await reconciler.look()
        clock += LOST_NODE_KEPT_MS
        await reconciler.look()
        assert list(server.nodes) == [NODE]
        clock += 1
        await reconciler.look()

    asyncio.run(look())
    assert list(server.nodes) == ([] if drain is None else [NODE])
