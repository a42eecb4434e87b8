"""Nodes of pools, on virtual time: when they are asked for, when gangs run there, when they go back."""

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.contract.api.views import StopRequest
from services.contract.jobs.entry_points import EntryPoints
from services.contract.words.states import JobState, ReservationState
from services.controller.api.monitoring import Monitor
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.errors import InvalidRequestError
from services.controller.domain.job.events import CancelAsked
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.placement import (
    GangRequest,
    NodeUsage,
    NotNow,
    Placed,
    seats_for,
)
from services.controller.domain.scheduling.queue import Turn, Waiting
from services.controller.domain.scheduling.reservations import Fit, Reservation, Sighting, Want
from services.controller.loops.pools import keep_pool
from services.controller.ports.jobs import Actor
from services.controller.ports.pools import AgentProcess, RunnablePool
from services.controller.use_cases.provision import wants_of
from services.controller.use_cases.queue import get_queue, list_pools
from services.controller.use_cases.submit import Drafting, draft_job
from tests.controller.histories import new_job, node, spec
from tests.controller.virtual_pool import PooledCluster, VirtualPool, limits

DEPLOY = Path(__file__).parents[2] / "deploy"
FOUR = {"resources": {"ranks": 4}}
OVER = {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
SHORT = {"train": {"steps": 8, "global_batch": 12}}


def play(
    cluster: PooledCluster, course: Callable[[PooledCluster], Coroutine[object, object, None]]
) -> None:
    asyncio.run(course(cluster))


async def ended(cluster: PooledCluster, job_id: str, within_s: int = 200) -> JobState:
    for _ in range(within_s):
        if (await cluster.job(job_id)).state in OVER:
            break
        await cluster.seconds(1)
    job = await cluster.job(job_id)
    if job.state in OVER:
        return job.state
    raise AssertionError(f"not ended within {within_s} s: {job.state}, {job.reason}")


def states(cluster: PooledCluster) -> list[ReservationState]:
    return [each.state for each in cluster.server.reservations.values()]


def test_a_job_that_fits_no_node_gets_some_runs_there_and_they_go_back_once_idle() -> None:
    async def course(cluster: PooledCluster) -> None:
        pool = cluster.pools[0]
        job_id = await cluster.submit(**FOUR, **SHORT)
        assert await ended(cluster, job_id) is JobState.SUCCEEDED
        job = await cluster.job(job_id)
        assert set(cluster.nodes_of(job)) == {"burst-1", "burst-2"}
        assert states(cluster) == [ReservationState.READY]
        await cluster.seconds(15)
        assert states(cluster) == [ReservationState.READY]
        await cluster.seconds(20)
        assert (pool.held, cluster.server.reservations, pool.asked) == ({}, {}, 1)
        assert list(cluster.server.nodes) == ["a"]
        (given_back,) = (await list_pools(cluster.ports, {})).items[0].ended
        assert given_back.state is ReservationState.RELEASED
        assert given_back.reason == "nothing ran there for 20 s"

        again = await cluster.submit(**FOUR, **SHORT)
        assert await ended(cluster, again) is JobState.SUCCEEDED
        assert set(cluster.nodes_of(await cluster.job(again))) == {"burst-1", "burst-2"}

    play(PooledCluster({"a": 2}, limits()), course)


def test_what_fits_a_free_node_asks_no_pool() -> None:
    async def course(cluster: PooledCluster) -> None:
        job_id = await cluster.submit(**SHORT)
        assert await ended(cluster, job_id) is JobState.SUCCEEDED
        assert cluster.pools[0].asked == 0

    play(PooledCluster({"a": 2}, limits()), course)


def test_no_gang_runs_on_some_of_the_nodes_while_others_are_still_to_come() -> None:
    async def course(cluster: PooledCluster) -> None:
        cluster.pools[0].boots_within_s = 5
        wide = await cluster.submit(**FOUR, **SHORT)
        await cluster.seconds(2)
        narrow = await cluster.submit(**SHORT, resources={"ranks": 2}, priority=0)
        await cluster.seconds(6)
        assert "burst-1" in cluster.server.nodes
        assert (await cluster.job(narrow)).attempt is None
        assert await ended(cluster, wide) is JobState.SUCCEEDED
        assert await ended(cluster, narrow) is JobState.SUCCEEDED

    play(PooledCluster({}, limits(max_nodes=2)), course)


def test_a_job_that_waits_for_a_pool_says_so_in_the_pools_own_words() -> None:
    async def course(cluster: PooledCluster) -> None:
        job_id = await cluster.submit(**FOUR, **SHORT)
        await cluster.seconds(5)
        (entry,) = (await get_queue(cluster.ports)).items
        assert entry.reason == "waiting for 2 nodes of pool burst: Resources"
        (view,) = (await list_pools(cluster.ports, {"burst": "no route"})).items
        assert view.trouble == "no route"
        (reserved,) = view.reservations
        assert (reserved.job_id, reserved.state) == (job_id, ReservationState.PROVISIONING)
        cluster.pools[0].machines = 2
        assert await ended(cluster, job_id) is JobState.SUCCEEDED

    play(PooledCluster({}, limits(), machines=1), course)


def test_what_prometheus_scrapes_of_pools() -> None:
    async def course(cluster: PooledCluster) -> None:
        silent: dict[str, str] = {}
        monitor = Monitor(silent, lambda: cluster.now / 1000)
        await cluster.submit(**FOUR, **SHORT)
        await cluster.seconds(5)
        silent["cloud"] = "no route to host"
        text = (await monitor.exposition(cluster.ports)).decode()
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("meshloom_pool_") and sample.value
        }
        assert found == {
            ("meshloom_pool_reservations", "burst", "PROVISIONING"): 1,
            ("meshloom_pool_nodes", "burst", "PROVISIONING"): 2,
            ("meshloom_pool_max_nodes", "burst"): 4,
            ("meshloom_pool_max_nodes", "cloud"): 4,
            ("meshloom_pool_silent", "cloud"): 1,
        }
        shown = (DEPLOY / "grafana" / "meshloom.json").read_text()
        rules = (DEPLOY / "prometheus" / "alerts.yml").read_text()
        assert set(re.findall(r"meshloom_pool_[a-z_]+", shown + rules)) == {n for n, *_ in found}
        cluster.pools[0].machines = 2
        silent.clear()
        await cluster.seconds(10)
        text = (await monitor.exposition(cluster.ports)).decode()
        assert 'meshloom_pool_nodes{pool="burst",state="PROVISIONING"} 0.0' in text
        assert 'meshloom_pool_nodes{pool="burst",state="READY"} 2.0' in text
        assert 'meshloom_pool_silent{pool="cloud"} 0.0' in text

    play(PooledCluster({}, limits(), limits("cloud"), machines=1), course)


def test_nodes_that_do_not_come_in_time_are_given_up_and_asked_of_the_next_pool() -> None:
    async def course(cluster: PooledCluster) -> None:
        first, second = cluster.pools
        first.machines = 0
        job_id = await cluster.submit(**SHORT)
        assert await ended(cluster, job_id) is JobState.SUCCEEDED
        assert (first.asked, second.asked, first.held) == (1, 1, {})
        assert set(cluster.nodes_of(await cluster.job(job_id))) == {"cloud-1"}

    play(PooledCluster({}, limits(ready_timeout_s=30), limits("cloud")), course)


def test_a_pool_that_refuses_is_told_and_asked_again_later() -> None:
    async def course(cluster: PooledCluster) -> None:
        (pool,) = cluster.pools
        pool.refuses = "no such partition"
        job_id = await cluster.submit(**SHORT)
        await cluster.seconds(20)
        assert (pool.held, cluster.server.reservations) == ({}, {})
        pool.refuses = None
        assert await ended(cluster, job_id) is JobState.SUCCEEDED

    play(PooledCluster({}, limits()), course)


@pytest.mark.parametrize("seconds", [0, 1, 2, 3, 4])
def test_a_job_that_no_longer_waits_leaves_no_nodes_behind(seconds: int) -> None:
    async def course(cluster: PooledCluster) -> None:
        job_id = await cluster.submit(**FOUR, **SHORT)
        await cluster.seconds(seconds)
        await cluster._happen(job_id, CancelAsked(StopRequest()))
        await cluster.seconds(40)
        assert (cluster.pools[0].held, cluster.server.reservations) == ({}, {})
        assert not cluster.server.nodes

    play(PooledCluster({}, limits()), course)


def test_with_one_node_lost_all_of_the_reservation_goes_and_the_job_gets_others() -> None:
    async def course(cluster: PooledCluster) -> None:
        (pool,) = cluster.pools
        job_id = await cluster.submit(**FOUR, checkpoint={"every_steps": 5, "keep_last": 2})
        await cluster.at_size(job_id, 4)
        await cluster.seconds(7)
        pool.lose("burst-2")
        assert await ended(cluster, job_id) is JobState.SUCCEEDED
        job = await cluster.job(job_id)
        assert job.attempts[-1].fence == 2
        assert pool.asked == 2
        assert len(pool.held) == 1
        (view,) = (await list_pools(cluster.ports, {})).items
        (lost,) = view.ended
        assert (lost.state, lost.reason) == (ReservationState.LOST, "burst-2 was lost")
        assert (lost.job_id, lost.node_ids) == (job_id, ("burst-1", "burst-2"))

    play(PooledCluster({}, limits()), course)


@pytest.mark.parametrize(
    ("is_told_late", "reason"),
    [(False, "the pool took its nodes back: preempted"), (True, "burst-2 was lost: preempted")],
)
def test_why_nodes_were_lost_is_told_in_the_pools_own_words(
    *, is_told_late: bool, reason: str
) -> None:
    async def course(cluster: PooledCluster) -> None:
        (pool,) = cluster.pools
        job_id = await cluster.submit(**FOUR, checkpoint={"every_steps": 5, "keep_last": 2})
        await cluster.at_size(job_id, 4)
        if is_told_late:
            pool.trouble = "no route to host"
            pool.lose("burst-2")
            while ReservationState.RELEASING not in states(cluster):
                await cluster.seconds(1)
            pool.trouble = None
            pool.end("burst-1", "preempted")
        else:
            pool.end("burst-1", "preempted")
        assert await ended(cluster, job_id) is JobState.SUCCEEDED
        (view,) = (await list_pools(cluster.ports, {})).items
        assert [(each.state, each.reason) for each in view.ended] == [
            (ReservationState.LOST, reason)
        ]

    play(PooledCluster({}, limits()), course)


def test_a_gang_moves_with_a_checkpoint_to_other_nodes_when_its_agents_are_to_end() -> None:
    async def course(cluster: PooledCluster) -> None:
        job_id = await cluster.submit(**FOUR, train={"steps": 60, "global_batch": 12})
        await cluster.at_size(job_id, 4)
        await cluster.seconds(5)
        for name in ("burst-1", "burst-2"):
            cluster.leaving(name, 50)
        assert await ended(cluster, job_id) is JobState.SUCCEEDED
        job = await cluster.job(job_id)
        assert set(cluster.nodes_of(job)) == {"burst-3", "burst-4"}
        assert job.attempts[-1].resumed_from is not None
        assert job.restarts == 0

    play(PooledCluster({}, limits()), course)


@pytest.mark.parametrize("second", range(0, 40, 2))
def test_a_new_leader_goes_on_whatever_the_last_one_was_about_to_do(second: int) -> None:
    async def course(cluster: PooledCluster) -> None:
        job_id = await cluster.submit(**FOUR, **SHORT)
        await cluster.seconds(second)
        cluster.new_leader()
        assert await ended(cluster, job_id) is JobState.SUCCEEDED
        await cluster.seconds(40)
        assert (cluster.pools[0].held, cluster.server.reservations) == ({}, {})
        assert cluster.pools[0].asked == 1

    play(PooledCluster({}, limits()), course)


def test_a_request_of_which_no_record_tells_is_found_and_given_back_once_it_is_idle() -> None:
    async def course(cluster: PooledCluster) -> None:
        (pool,) = cluster.pools
        job_id = await cluster.submit(**FOUR, train={"steps": 60, "global_batch": 12})
        await cluster.at_size(job_id, 4)
        cluster.server.reservations.clear()
        await cluster.seconds(3)
        assert states(cluster) == [ReservationState.READY]
        assert await ended(cluster, job_id) is JobState.SUCCEEDED
        assert (await cluster.job(job_id)).fence == 1
        await cluster.seconds(40)
        assert (pool.held, cluster.server.reservations, pool.asked) == ({}, {}, 1)

    play(PooledCluster({}, limits()), course)


def test_of_two_reservations_of_one_node_the_one_whose_agent_came_first_goes_on() -> None:
    async def course(cluster: PooledCluster) -> None:
        (pool,) = cluster.pools
        job_id = await cluster.submit(**FOUR, train={"steps": 60, "global_batch": 12})
        await cluster.at_size(job_id, 4)
        # As asked for by a controller of whose record Redis knows nothing; its agent does not get the lease.
        agents = dict.fromkeys(["burst-1"], AgentProcess(("agent",), {}))
        pool.machines = len(pool.held)
        await pool.provision("zz-doubled", agents)
        await cluster.seconds(3)
        assert "zz-doubled" in cluster.server.reservations
        pool.held["zz-doubled"].ended = "FAILED"
        await cluster.seconds(3)
        assert "zz-doubled" not in cluster.server.reservations
        assert "burst-1" in cluster.server.nodes
        assert await ended(cluster, job_id) is JobState.SUCCEEDED
        assert (await cluster.job(job_id)).fence == 1

    play(PooledCluster({}, limits(max_nodes=2), machines=2), course)


def test_what_others_named_in_ways_that_are_not_ours_stops_no_round() -> None:
    async def course(cluster: PooledCluster) -> None:
        (pool,) = cluster.pools
        agent = AgentProcess(("agent",), {})
        for name, node_id in (("\x1b[2J", "burst-9"), ("a", "burst-\x1b[2J"), ("b", "burst-²")):
            await pool.provision(name, {node_id: agent})
            pool.held[name].booted = 1  # nothing of ours begins there
        job_id = await cluster.submit(**FOUR)
        assert await ended(cluster, job_id) is JobState.SUCCEEDED
        assert {each.id for each in cluster.server.reservations.values()} == {
            name for name in pool.held if len(name) > 1 and name.isprintable()
        }

    play(PooledCluster({}, limits()), course)


def test_a_pool_that_does_not_answer_stops_nothing_that_runs() -> None:
    async def course(cluster: PooledCluster) -> None:
        (pool,) = cluster.pools
        job_id = await cluster.submit(**FOUR, train={"steps": 60, "global_batch": 12})
        await cluster.at_size(job_id, 4)
        pool.trouble = "no route to host"
        assert await ended(cluster, job_id) is JobState.SUCCEEDED
        assert (await cluster.job(job_id)).fence == 1
        await cluster.seconds(40)
        assert states(cluster) == [ReservationState.RELEASING]
        pool.trouble = None
        await cluster.seconds(10)
        assert (pool.held, cluster.server.reservations) == ({}, {})

    play(PooledCluster({}, limits()), course)


def test_a_request_for_nodes_that_the_file_no_longer_allows_is_given_up() -> None:
    async def course(cluster: PooledCluster) -> None:
        record = Reservation(
            id="nodes-of-before",
            pool="burst",
            node_ids=("burst-1", "burst-9"),
            state=ReservationState.REQUESTED,
            job_id=None,
            reason="",
            requested_ms=cluster.now,
        )
        await cluster.ports.reservations.put(record, 1, None)
        await cluster.seconds(3)
        assert (cluster.pools[0].asked, cluster.server.reservations) == (0, {})

    play(PooledCluster({}, limits()), course)


def test_whatever_a_pool_says_ends_no_term() -> None:
    class Told(dict[str, str]):
        something = asyncio.Event()

        def __setitem__(self, name: str, why: str) -> None:
            super().__setitem__(name, why)
            self.something.set()

    class Confused(VirtualPool):
        async def sightings(self) -> Sequence[Sighting]:
            raise KeyError("stats")

    async def course(cluster: PooledCluster) -> None:
        pool = RunnablePool(Confused(cluster, limits(), 1), {})
        silent = Told()
        keeping = asyncio.create_task(keep_pool(cluster.ports, 1, pool, silent))
        waiting = asyncio.create_task(silent.something.wait())
        await asyncio.wait([keeping, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert not keeping.done()
        assert silent == {"burst": "KeyError: 'stats'"}
        keeping.cancel()

    play(PooledCluster({}, limits()), course)


def test_the_queue_is_served_in_order_and_no_more_nodes_are_held_than_may_be() -> None:
    async def course(cluster: PooledCluster) -> None:
        (pool,) = cluster.pools
        small = [await cluster.submit(**SHORT) for _ in range(3)]
        wide = await cluster.submit(**SHORT, resources={"ranks": 6})
        late = await cluster.submit(**SHORT)
        most = 0
        starts: list[str] = []
        for _ in range(120):
            await cluster.seconds(1)
            most = max(most, sum(len(held.nodes) for held in pool.held.values()))
            names = [n for each in cluster.server.reservations.values() for n in each.node_ids]
            assert len(names) == len(set(names))
            for job_id in (*small, wide, late):
                if (await cluster.job(job_id)).attempts and job_id not in starts:
                    starts.append(job_id)
        assert most <= 4
        assert set(starts[:3]) == set(small)
        assert len(starts) == 5

    play(PooledCluster({}, limits()), course)


@pytest.mark.parametrize(
    ("gang", "fit"),
    [
        (GangRequest(1), Fit("cpu", 1)),
        (GangRequest(7), Fit("cpu", 3)),
        (GangRequest(8, together=2), Fit("cpu", 4)),
        (GangRequest(13), None),
        (GangRequest(2, "cuda"), None),
        (GangRequest(8, together=4), None),
    ],
)
def test_a_gang_takes_so_many_nodes(gang: GangRequest, fit: Fit | None) -> None:
    assert limits(cpu_slots=3).fit(gang) == fit


def test_a_job_is_refused_only_if_no_pool_could_take_it() -> None:
    async def course(cluster: PooledCluster) -> None:
        drafting = Drafting(Actor("ada"), EntryPoints())
        _, outcome = await draft_job(cluster.ports, spec(**{**FOUR, "plan": "default"}), drafting)
        assert isinstance(outcome, NotNow)
        assert outcome.reason == "no known node can take it; pool burst is asked for nodes"
        with pytest.raises(InvalidRequestError, match="ranks need"):
            await draft_job(cluster.ports, spec(resources={"ranks": 12}, plan="default"), drafting)

    play(PooledCluster({"a": 1}, limits()), course)


def test_jobs_that_ask_for_the_same_are_tried_on_the_nodes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands may wait for a hundred nodes, and the event loop waits for that."""
    tried: list[GangRequest] = []

    def counted(gang: GangRequest, usages: Sequence[NodeUsage]) -> Placed | None:
        tried.append(gang)
        return seats_for(gang, usages)

    monkeypatch.setattr("services.controller.use_cases.provision.seats_for", counted)
    jobs = [
        new_job(resources={"ranks": ranks}).model_copy(update={"id": f"job_{number:026}"})
        for number, ranks in enumerate([4] * 20 + [1] * 20 + [6] * 20)
    ]
    turns = [Turn(job, Waiting("it waits")) for job in jobs]
    wants = wants_of(jobs, turns, [NodeUsage(node("a", slots=2))])
    assert [want.job_id for want in wants] == [job.id for job in (*jobs[:20], *jobs[40:])]
    assert [gang.ranks for gang in tried] == [4, 1, 6]


def test_what_jobs_want_of_pools_is_worked_out_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two thousand gangs, each of another size, stopped it for one to three seconds on a hundred nodes."""
    threads: list[int] = []

    def noted(
        jobs: Sequence[Job], turns: Sequence[Turn], usages: Sequence[NodeUsage]
    ) -> tuple[Want, ...]:
        threads.append(threading.get_ident())
        return wants_of(jobs, turns, usages)

    monkeypatch.setattr("services.controller.use_cases.reconcile.wants_of", noted)

    async def course(cluster: PooledCluster) -> None:
        job_id = await cluster.submit(**FOUR, **SHORT)
        assert await ended(cluster, job_id) is JobState.SUCCEEDED

    play(PooledCluster({"a": 2}, limits()), course)
    assert threads
    assert threading.get_ident() not in threads


def test_a_job_whose_layout_is_open_gets_a_node_on_which_it_can_be_planned() -> None:
    async def course(cluster: PooledCluster) -> None:
        job, _ = await draft_job(
            cluster.ports, spec(plan="auto", mesh="auto"), Drafting(Actor("ada"), EntryPoints())
        )
        assert job.planning is not None

        await cluster.ports.jobs.create(first_decision(job), Actor("ada"), None)
        await cluster.seconds(6)
        assert states(cluster) == [ReservationState.READY]

    play(PooledCluster({}, limits()), course)
