"""What the leader makes of facts after Redis has lost some or all of what it knew."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from services.contract.jobs.plans import GangPlan, RankPlacement
from services.contract.messages.commands import LaunchGang, PurgeJob, StopGang
from services.contract.messages.facts import (
    AGENT_DIED,
    OLDER_COPY,
    CheckpointCorrupt,
    CheckpointRetired,
    Fact,
    GangEnded,
    GangLaunched,
    JobFound,
    NodeJoined,
    RunningGang,
)
from services.contract.storage.job_cards import JobCard
from services.contract.words.ids import checkpoint_id, new_job_id
from services.contract.words.states import CheckpointState, JobState
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.decisions.attempt_events import RESENT_MOST
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.errors import StateConflictError
from services.controller.domain.job.events import GangPlaced, JobEvent, PinAsked
from services.controller.domain.job.job import Job
from services.controller.domain.plans import default_plan
from services.controller.domain.scheduling.node import Lease
from services.controller.ports.jobs import Actor, Stored
from services.controller.ports.machines import FactEntry
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.facts import apply_facts
from services.controller.use_cases.jobs import purge_job
from tests.controller import test_gang_over_nodes as wide
from tests.controller.histories import (
    NODE,
    NOW,
    STEPS,
    crashed,
    finished,
    killed,
    launched,
    linked,
    new_job,
    node,
    placed,
    progressed,
)

OTHER = wide.OTHER
ADA = Actor("ada")


class Leader:
    """A leader of a Redis that stands in one process, on virtual time."""

    def __init__(self) -> None:
        self.now = NOW
        self.server = MemoryServer(lambda: self.now)
        self.ports = memory_ports(self.server)
        self.server.epoch = 1

    async def hear(self, *facts: Fact, sender: str | None = None) -> list[FactEntry]:
        """Of their own nodes, or all from the agent of ``sender``."""
        entries = []
        for fact in facts:
            self.now += 1
            body = fact.model_dump_json()
            entries.append(FactEntry(f"{self.now}-0", body, sender or fact.node_id))
        await apply_facts(self.ports, entries, 1)
        return entries

    async def happen(self, job: Job, *events: JobEvent) -> None:
        happened = [Occurrence(event, self.now) for event in events]
        await apply_events(self.ports, job.id, happened, ADA)

    async def job(self, job_id: str) -> Job:
        return (await self.ports.jobs.load(job_id)).job

    def kills(self, name: str) -> list[tuple[str, int]]:
        sent = self.server.commands(name)
        return [(c.job_id, c.fence) for c in sent if isinstance(c, StopGang) and c.mode == "kill"]


def play(course: Callable[[Leader], Awaitable[None]]) -> None:
    async def run() -> None:
        await course(Leader())

    asyncio.run(run())


def joined(name: str, *gangs: RunningGang, life: str = "life-1", number: int = 1) -> NodeJoined:
    return NodeJoined(
        node_id=name, incarnation=life, inventory=node(name).inventory, gangs=gangs, number=number
    )


def gang(job: Job, *ranks: int, fence: int = 1) -> RunningGang:
    return RunningGang(job_id=job.id, fence=fence, ranks=ranks)


def found(
    job: Job,
    *steps: int,
    teller: str = NODE,
    opened: GangPlaced | None = None,
    is_running: bool = False,
    resume_from: str | None = None,
) -> JobFound:
    card = JobCard(
        job_id=job.id,
        spec=job.spec,
        owner="ada",
        created_ms=NOW,
        fence=1,
        plan=(opened or placed(job)).plan,
        resume_from=resume_from,
    )
    return JobFound(
        job_id=job.id,
        fence=1,
        node_id=teller,
        card=card,
        manifests={2 + i: linked(job, step).manifest for i, step in enumerate(steps)},
        is_running=is_running,
    )


def test_ranks_are_no_orphans_because_another_node_told_of_their_job_first() -> None:
    async def course(leader: Leader) -> None:
        job = new_job()
        await leader.hear(joined(OTHER), found(job, 10, teller=OTHER))
        await leader.hear(joined(NODE, gang(job, 0, 1)))
        assert leader.kills(NODE) == []
        await leader.hear(found(job, 10, is_running=True))
        assert (await leader.job(job.id)).state is JobState.RUNNING

    play(course)


def test_ranks_on_two_nodes_are_adopted_whichever_node_joins_and_tells_first() -> None:
    async def course(leader: Leader) -> None:
        job = wide.wide_job()
        seats = wide.placed_on_two(job)
        await leader.hear(joined("loom-3"), found(job, 10, teller="loom-3", opened=seats))
        await leader.hear(joined(OTHER, gang(job, 2, 3)))
        await leader.hear(found(job, 10, teller=OTHER, opened=seats, is_running=True))
        await leader.hear(joined(NODE, gang(job, 0, 1)))
        assert (await leader.job(job.id)).state is JobState.PAUSED
        await leader.hear(found(job, 10, opened=seats, is_running=True))
        adopted = await leader.job(job.id)
        assert adopted.state is JobState.RUNNING
        assert adopted.attempt is not None
        assert set(adopted.attempt.live_nodes) == {NODE, OTHER}
        assert leader.kills(NODE) == leader.kills(OTHER) == []

    play(course)


def test_ranks_of_an_older_attempt_than_the_one_found_are_orphans() -> None:
    async def course(leader: Leader) -> None:
        job = new_job()
        newer = found(job, 10, teller=OTHER).model_copy(update={"fence": 2})
        await leader.hear(joined(OTHER), newer, joined(NODE, gang(job, 0, 1)))
        assert leader.kills(NODE) == [(job.id, 1)]

    play(course)


def test_ranks_of_an_attempt_that_has_been_placed_elsewhere_are_orphans() -> None:
    """An older copy of Redis gives the number of an attempt again that it knows nothing of."""

    async def course(leader: Leader) -> None:
        job = await training(leader)
        await leader.hear(joined(OTHER, gang(job, 0, 1)), joined(NODE, gang(job, 0, 1), number=2))
        assert (leader.kills(OTHER), leader.kills(NODE)) == ([(job.id, 1)], [])

    play(course)


def test_a_job_goes_on_from_later_commits_that_an_older_copy_of_redis_does_not_know() -> None:
    """Retention has removed the one that it knows, as the attempt that is to load it finds."""

    async def course(leader: Leader) -> None:
        job = await training(leader)
        await leader.hear(linked(job, 10), killed(job))
        leader.now += 3_600_000
        await leader.happen(job, placed(job))
        known = checkpoint_id(job.id, 10, 1)
        assert (await leader.job(job.id)).attempts[-1].resumed_from == known
        told = found(job, 30, 40, resume_from=known)
        lacks = CheckpointCorrupt(
            job_id=job.id,
            fence=2,
            node_id=NODE,
            checkpoint_id=known,
            file="chain",
            reason="it is not committed",
        )
        await leader.hear(
            told.model_copy(update={"fence": 2}),
            launched(job, 2),
            lacks,
            crashed(job, "ChainError: it is not committed", 2, step=10),
        )
        later = await leader.job(job.id)
        assert (later.state, later.restarts) == (JobState.RESTARTING, 1)  # of the kill alone
        await leader.happen(job, placed(job))
        assert (await leader.job(job.id)).attempts[-1].resumed_step == 40

    play(course)


def test_a_job_goes_on_from_what_an_older_copy_of_storage_has_though_it_was_removed_since() -> None:
    async def course(leader: Leader) -> None:
        job = await training(leader)
        await leader.hear(*(linked(job, step) for step in range(10, 60, 10)))
        book = (await leader.job(job.id)).checkpoints.values()
        removed = [c.id for c in book if c.state == CheckpointState.DELETING]
        assert checkpoint_id(job.id, 10, 1) in removed
        about = {"job_id": job.id, "fence": 1, "node_id": NODE}
        await leader.hear(
            *(CheckpointRetired.model_validate({**about, "checkpoint_id": c}) for c in removed)
        )
        # What is told late, of before a removal, brings nothing back.
        await leader.hear(found(job, 10, 50), found(job, 10))
        assert removed[0] not in (await leader.job(job.id)).checkpoints

        await leader.hear(killed(job))
        leader.now += 3_600_000
        await leader.happen(job, placed(job))
        await leader.hear(found(job, 10).model_copy(update={"fence": 2}))
        again = (await leader.job(job.id)).checkpoints[removed[0]]
        assert (again.step, again.state, again.pinned) == (10, CheckpointState.COMMITTED, True)

    play(course)


def test_what_a_found_clone_begins_with_is_held_for_it_again() -> None:
    async def course(leader: Leader) -> None:
        source = new_job()
        clone = source.model_copy(update={"id": new_job_id(NOW, bytes(9) + b"\2")})
        begun = checkpoint_id(source.id, 50, 1)
        await leader.hear(joined(NODE), found(source, 50), found(clone, resume_from=begun))
        assert (await leader.job(source.id)).holds == {begun: (clone.id,)}
        # A clone of a job that nobody knows is found all the same.
        orphan = source.model_copy(update={"id": new_job_id(NOW, bytes(9) + b"\3")})
        elsewhere = checkpoint_id(new_job_id(NOW, bytes(9) + b"\4"), 50, 1)
        await leader.hear(found(orphan, resume_from=elsewhere))
        assert (await leader.job(orphan.id)).resume_point.checkpoint_id == elsewhere

    play(course)


def test_a_found_job_is_purged_with_its_files_and_only_once_nothing_of_it_is_pinned() -> None:
    async def course(leader: Leader) -> None:
        job = new_job()
        await leader.hear(joined(NODE), found(job, STEPS))
        leader.server.leases[NODE] = Lease("life-1", 5_000)
        refused = None
        try:
            await purge_job(leader.ports, job.id, ADA)
        except StateConflictError as error:
            refused = str(error)
        assert "unpin them first" in str(refused)
        await leader.happen(job, PinAsked(checkpoint_id(job.id, STEPS, 1), pin=False))
        view = await purge_job(leader.ports, job.id, ADA)
        assert view is not None
        assert view.state is JobState.SUCCEEDED
        assert [type(c) for c in leader.server.commands(NODE)] == [PurgeJob]

    play(course)


def test_an_end_that_was_lost_is_asked_for_at_the_nodes_next_join() -> None:
    async def course(leader: Leader) -> None:
        job = await training(leader)
        await leader.hear(joined(NODE, gang(job, 0, 1), number=2))
        assert leader.kills(NODE) == []
        await leader.hear(joined(NODE, number=3))
        assert leader.kills(NODE) == [(job.id, 1)]
        await leader.hear(finished(job, step=5, drained=True), joined(NODE, number=4))
        assert leader.kills(NODE) == [(job.id, 1)]
        assert (await leader.job(job.id)).state is JobState.PAUSED

    play(course)


def test_of_a_gang_over_two_nodes_only_the_part_whose_end_was_lost_is_asked_for() -> None:
    async def course(leader: Leader) -> None:
        job = wide.wide_job()
        await leader.hear(joined(NODE), joined(OTHER))
        await leader.ports.jobs.create(first_decision(job), ADA, None)
        parts: list[GangLaunched] = [wide.launched(job, NODE), wide.launched(job, OTHER)]
        await leader.happen(job, wide.placed_on_two(job))
        # The other node has not launched its part yet: its word may be older than that.
        await leader.hear(parts[0], joined(OTHER, number=2))
        assert leader.kills(OTHER) == []
        await leader.hear(parts[1], joined(NODE, gang(job, 0, 1), number=2))
        await leader.hear(joined(OTHER, number=3))
        assert (leader.kills(NODE), leader.kills(OTHER)) == ([], [(job.id, 1)])
        end: GangEnded = wide.ended(job, OTHER, signal=9)
        await leader.hear(end, joined(OTHER, number=4))
        assert leader.kills(OTHER) == [(job.id, 1)]

    play(course)


def test_a_join_that_comes_twice_says_nothing_of_a_gang_launched_behind_it() -> None:
    async def course(leader: Leader) -> None:
        job = new_job()
        await leader.hear(joined(NODE))
        await leader.ports.jobs.create(first_decision(job), ADA, None)
        await leader.happen(job, placed(job))
        told: list[Fact] = [joined(NODE, number=2), launched(job)]
        entries = await leader.hear(*told)
        await apply_facts(
            leader.ports, entries, 1
        )  # the next leader, if this one acknowledged nothing
        await leader.hear(*told)  # written twice, for the agent missed Redis's answer
        assert leader.kills(NODE) == []
        assert (await leader.job(job.id)).state is JobState.STARTING

    play(course)


def test_a_node_with_ranks_of_whose_launch_redis_lost_the_answer_is_asked_for_it_again() -> None:
    """Their job would be PLACING for as long as they commit: what is overdue is counted from the last command."""

    async def course(leader: Leader) -> None:
        job = new_job()
        await leader.hear(joined(NODE))
        await leader.ports.jobs.create(first_decision(job), ADA, None)
        await leader.happen(job, placed(job))
        (asked,) = launches(leader)
        await leader.hear(joined(NODE, number=2))
        assert launches(leader) == [asked]
        await leader.hear(joined(NODE, gang(job, 0, 1), number=3))
        assert launches(leader) == [asked, asked]
        await leader.hear(launched(job), joined(NODE, number=4))
        assert launches(leader) == [asked, asked]
        assert (await leader.job(job.id)).state is JobState.STARTING

    play(course)


def test_of_a_gang_that_has_launched_one_node_is_asked_whether_it_trains_until_it_does() -> None:
    """An agent tells of the first step once: where Redis lost that, the job would be STARTING for as long as it trains."""

    async def course(leader: Leader) -> None:
        job = wide.wide_job()
        await leader.hear(joined(NODE), joined(OTHER))
        await leader.ports.jobs.create(first_decision(job), ADA, None)
        await leader.happen(job, wide.placed_on_two(job))
        await leader.hear(wide.launched(job, NODE), wide.launched(job, OTHER))
        asked = [len(launches(leader, name)) for name in (NODE, OTHER)]
        living = [gang(job, 0, 1), gang(job, 2, 3)]
        again = [joined(NODE, living[0], number=2), joined(OTHER, living[1], number=2)]
        await leader.hear(*again)
        assert [len(launches(leader, name)) for name in (NODE, OTHER)] == [asked[0] + 1, asked[1]]
        # So does the agent answer where its ranks have made a step.
        await leader.hear(wide.launched(job, NODE), progressed(job, 7))
        assert (await leader.job(job.id)).state is JobState.RUNNING
        await leader.hear(*(each.model_copy(update={"number": 3}) for each in again))
        assert [len(launches(leader, name)) for name in (NODE, OTHER)] == [asked[0] + 1, asked[1]]

    play(course)


@pytest.mark.parametrize("head_is_known", [True, False])
def test_of_a_gang_over_many_nodes_that_all_join_at_once_each_is_asked_once(
    *, head_is_known: bool
) -> None:
    """Were all asked as each joins, 21 of them would count as never answering, and the gang be killed."""

    async def course(leader: Leader) -> None:
        names = [f"loom-{number}" for number in range(1, RESENT_MOST + 5)]
        job = new_job(resources={"ranks": len(names)}, train={"steps": STEPS, "global_batch": 24})
        await leader.hear(*map(joined, names))
        await leader.ports.jobs.create(first_decision(job), ADA, None)
        await leader.happen(job, placed_one_each(job, names))
        answers = [
            GangLaunched(
                job_id=job.id,
                fence=1,
                node_id=name,
                pids={rank: 100},
                store=None if rank else wide.STORE,
            )
            for rank, name in enumerate(names)
        ]
        if head_is_known:
            await leader.hear(answers[0])
        await leader.hear(*(joined(n, gang(job, r), number=2) for r, n in enumerate(names)))
        others = len(names) - 1
        if not head_is_known:
            assert [len(launches(leader, name)) for name in names] == [2, *[0] * others]
            await leader.hear(answers[0])
        asked = [1, *[2] * others] if head_is_known else [2, *[1] * others]
        assert [len(launches(leader, name)) for name in names] == asked
        assert [leader.kills(name) for name in names] == [[]] * len(names)
        await leader.hear(*answers[1:])
        assert (await leader.job(job.id)).state is JobState.STARTING

    play(course)


def placed_one_each(job: Job, names: Sequence[str]) -> GangPlaced:
    seats = tuple(
        RankPlacement(rank=rank, node_id=name, local_rank=0, device="cpu")
        for rank, name in enumerate(names)
    )
    plan = GangPlan(device_type="cpu", sharding=default_plan.shard(job.spec), ranks=seats)
    return GangPlaced(plan, dict.fromkeys(names, "life-1"))


def launches(leader: Leader, name: str = NODE) -> list[LaunchGang]:
    return [sent for sent in leader.server.commands(name) if isinstance(sent, LaunchGang)]


def test_the_end_of_an_earlier_attempt_of_the_same_number_costs_no_restart() -> None:
    """An older copy of Redis gives numbers again: an agent answers such a launch with what it has on record."""

    async def course(leader: Leader) -> None:
        job = await training(leader)
        await leader.hear(crashed(job, "boom"))
        await leader.happen(job, placed(job))
        await leader.hear(crashed(job, "boom", 2))
        waits = await leader.job(job.id)
        # The first attempt's alone is counted.
        assert (waits.state, waits.restarts) == (JobState.RESTARTING, 1)
        assert OLDER_COPY in str(waits.reason)
        assert waits.attempts[-1].exits == ()
        leader.now += 60_000
        await leader.happen(job, placed(job))
        await leader.hear(launched(job, 3), progressed(job, 1, 3))
        assert (await leader.job(job.id)).state is JobState.RUNNING

    play(course)


def test_a_launch_in_which_the_agent_dies_counts_as_a_restart() -> None:
    """The next agent tells of its ranks first, and only then that it joined; of the launch nobody told."""

    async def course(leader: Leader) -> None:
        job = new_job(faults={"max_restarts": 2})
        await leader.hear(joined(NODE))
        await leader.ports.jobs.create(first_decision(job), ADA, None)
        for fence in (1, 2, 3):
            await leader.happen(job, placed(job))
            await leader.hear(crashed(job, AGENT_DIED, fence))
            leader.now += 3_600_000
        assert (await leader.job(job.id)).state is JobState.FAILED

    play(course)


def test_what_an_earlier_attempt_of_the_same_number_finished_is_finished() -> None:
    async def course(leader: Leader) -> None:
        job = await training(leader)
        await leader.hear(killed(job))
        leader.now += 60_000
        await leader.happen(job, placed(job))
        await leader.hear(linked(job, STEPS, 2), finished(job, 2))
        assert (await leader.job(job.id)).state is JobState.SUCCEEDED

    play(course)


def test_nodes_that_join_together_cost_one_look_at_the_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a restart of Redis all of them join at once."""

    async def course(leader: Leader) -> None:
        job = await training(leader)
        looks = 0
        active = leader.ports.jobs.active

        async def counted() -> list[Stored]:
            nonlocal looks
            looks += 1
            return await active()

        monkeypatch.setattr(leader.ports.jobs, "active", counted)
        others = [joined(f"loom-{number}") for number in range(2, 40)]
        await leader.hear(*others, joined(NODE, gang(job, 0, 1), number=2), *others)
        assert (looks, leader.kills(NODE)) == (2, [])
        # Of two words the later one counts; an earlier life of the agent is over all the same.
        await leader.hear(joined(NODE, life="life-2"), joined(NODE, life="life-2", number=2))
        assert (await leader.job(job.id)).attempts[-1].lost_nodes == (NODE,)
        assert looks == 4

    play(course)


async def training(leader: Leader) -> Job:
    job = new_job()
    await leader.hear(joined(NODE))
    await leader.ports.jobs.create(first_decision(job), ADA, None)
    await leader.happen(job, placed(job))
    await leader.hear(launched(job))
    return job
