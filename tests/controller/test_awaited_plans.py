"""Jobs that leave their layout open, on virtual time: planned first, then placed."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from fsdp_core.plan.model import Growth
from services.contract.api.requests import CloneRequest, JobPatch
from services.contract.api.views import StopRequest
from services.contract.jobs.specs import MAX_SPEC_BYTES, JobSpec
from services.contract.messages.commands import LaunchGang
from services.contract.messages.probing import ModelProbed, NodeMeasured, ProbeFailure, ProbeModel
from services.contract.messages.telemetry import StepRecord
from services.contract.redis import redis_keys as keys
from services.contract.words.states import ExitReason, JobState, NodeState, PlanState
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.errors import (
    NotFoundError,
    RecordUnreadableError,
    StateConflictError,
)
from services.controller.domain.job.events import (
    JobEvent,
    PatchAsked,
    PauseAsked,
    PlanAsked,
    ResumeAsked,
)
from services.controller.domain.job.job import Job, Planning
from services.controller.domain.plans import default_plan
from services.controller.domain.plans.pace import scale_of
from services.controller.domain.scheduling.node import Lease
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor, EventRecord, Stored
from services.controller.ports.machines import FactEntry, Log
from services.controller.ports.plans import PlanStore
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.clone import Cloning, clone
from services.controller.use_cases.facts import apply_facts
from services.controller.use_cases.inspect import get_diagnosis
from services.controller.use_cases.plan_jobs import Planner
from services.controller.use_cases.plan_list import PlanFilter, list_plans
from services.controller.use_cases.plans import Drawing, Wanted, begin_plan, get_plan, make_plan
from services.controller.use_cases.queue import get_queue
from services.controller.use_cases.reconcile import Reconciler
from services.controller.use_cases.submit import Submission, submit
from services.controller.use_cases.waiting import current_usages
from tests.controller.conftest import ANYTHING, job_body
from tests.controller.histories import NODE, NOW, launched, node, progressed
from tests.controller.profiles import ARGS, FACTS, answer_to

ADA = Actor("ada")
_DRAWING = Drawing(wait_s=0)


class Office:
    """A controller that leads, and a node that a test speaks for."""

    def __init__(self, *, joined: bool = True) -> None:
        self.now = NOW
        self.server = MemoryServer(lambda: self.now, epoch=1)
        self.ports = memory_ports(self.server)
        if joined:
            self.joins()
        self.new_leader()

    def joins(self, *, memory_bytes: int = 1 << 34) -> None:
        there = node()
        inventory = there.inventory.model_copy(update={"memory_bytes": memory_bytes})
        self.server.nodes[NODE] = there.model_copy(update={"inventory": inventory})
        self.server.leases[NODE] = Lease("life-1", 5_000)

    def new_leader(self) -> None:
        """Another controller leads, which remembers nothing."""
        self._planner = Planner(self.ports, 1, _DRAWING)
        self._reconciler = Reconciler(self.ports, 1)

    async def submits(self, **changes: object) -> str:
        self.now += 1
        small = {"model": {"factory": "decoder", "args": ARGS}, "plan": "auto"}
        spec = JobSpec.model_validate(job_body(**small) | changes)
        return (await submit(self.ports, Submission(spec), ADA, ANYTHING, _DRAWING)).id

    async def plans(self) -> float:
        """The loop of plans looks; after how long it would again."""
        self.now += 100
        return await self._planner.look()

    async def looks(self, times: int = 2) -> None:
        """The loops of the leader look at everything."""
        for _ in range(times):
            self.now += 100
            await self._planner.look()
            await self._reconciler.look()

    async def job(self, job_id: str) -> Job:
        return (await self.ports.jobs.load(job_id)).job

    async def happens(self, job_id: str, event: JobEvent) -> None:
        await apply_events(self.ports, job_id, [Occurrence(event, self.now)], ADA)

    async def hears(self, *facts: ModelProbed | NodeMeasured) -> None:
        for fact in facts:
            self.now += 1
            await apply_facts(
                self.ports, [FactEntry(f"{self.now}-0", fact.model_dump_json(), fact.node_id)], 1
            )

    async def answers(self, question: ProbeModel | None = None, name: str = NODE) -> None:
        """A node profiles the model as it was last asked to; the first one measures itself."""
        known = NodeMeasured(node_id=NODE, incarnation="life-1", device_type="cpu", facts=FACTS)
        await self.hears(answer_to(question or self.asked()[-1], name), known)

    async def fails(self, code: str) -> None:
        failure = ProbeFailure.model_validate({"code": code, "reason": "it went wrong so"})
        asked = self.asked()[-1].probe_id
        await self.hears(ModelProbed(probe_id=asked, node_id=NODE, took_s=3, failure=failure))

    def asked(self) -> list[ProbeModel]:
        return [c for c in self.server.commands(NODE) if isinstance(c, ProbeModel)]

    def launched(self) -> list[LaunchGang]:
        return [c for c in self.server.commands(NODE) if isinstance(c, LaunchGang)]

    async def events(self, job_id: str) -> dict[str, str]:
        """What its log tells, by kind."""
        entries = await self.ports.telemetry.read(job_id, Log.EVENTS, None, 100)
        told = [EventRecord.model_validate_json(entry.body) for entry in entries]
        return {each.kind: each.message for each in told}


def play(course: Callable[[Office], Awaitable[None]], *, joined: bool = True) -> None:
    async def run() -> None:
        await course(Office(joined=joined))

    asyncio.run(run())


def test_a_job_that_leaves_its_layout_open_is_planned_before_it_has_seats() -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits()
        assert "its layout is chosen first" in ((await office.job(job_id)).reason or "")
        await office.looks()
        waiting = await office.job(job_id)
        assert (waiting.state, office.launched()) == (JobState.QUEUED, [])
        assert f"its layout is being chosen: its model is profiled on {NODE}" == waiting.reason
        await office.answers()
        await office.looks()
        job = await office.job(job_id)
        assert job.state is JobState.PLACING
        assert job.estimate is not None
        plan = await get_plan(office.ports, job.estimate.plan_id, _DRAWING)
        assert (plan.state, plan.owner) == (PlanState.READY, "ada")
        (launch,) = office.launched()
        assert launch.plan.sharding == plan.sharding
        assert launch.spec.train.micro_batch == plan.micro_batch
        assert default_plan.shard(job.spec) == plan.sharding
        assert job.estimate.reason == plan.reason
        assert list(await office.events(job_id)) == [
            "job.queued",
            "job.planning",
            "job.planned",
            "job.placing",
        ]

    play(course)


def test_a_layout_that_is_written_out_or_the_default_waits_for_nothing() -> None:
    async def course(office: Office) -> None:
        units = {"units": [{"modules": ["blocks.*"]}]}
        for changes in (
            {"plan": "default"},
            {"mesh": {"dp_shard": 2}, "plan": units},
            {"plan": units | {"mesh": {"dp_shard": 2}}},
        ):
            await office.submits(**changes)
        await office.looks(1)
        jobs = [stored.job for stored in await office.ports.jobs.active()]
        assert sum(job.state is JobState.PLACING for job in jobs) == 2
        assert all(job.planning is None and job.asked is None for job in jobs)
        assert office.asked() == []

    play(course)


@pytest.mark.parametrize("part", [{"plan": {"units": [{"modules": ["blocks.*"]}]}}, {"mesh": {}}])
def test_what_a_spec_says_of_its_layout_is_kept_and_the_rest_is_chosen(
    part: dict[str, object],
) -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits(resources={"ranks": 1}, **part)
        await office.looks()
        await office.answers()
        await office.looks()
        job = await office.job(job_id)
        assert (job.state, job.estimate is not None) == (JobState.PLACING, True)
        if "plan" in part:
            assert isinstance(job.spec.plan, dict)
            assert [u["modules"] for u in job.spec.plan["units"]] == [["blocks.*"]]

    play(course)


@pytest.mark.parametrize("code", ["timed_out", "crashed", "raised"])
def test_a_model_that_cannot_be_profiled_runs_by_the_default_layout_and_says_why(
    code: str,
) -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits()
        await office.looks()
        await office.fails(code)
        await office.looks()
        job = await office.job(job_id)
        assert (job.state, job.estimate, job.spec.plan) == (JobState.PLACING, None, "auto")
        (launch,) = office.launched()
        assert launch.plan.sharding == default_plan.shard(job.spec)
        words = (
            "the model could not be profiled: it went wrong so; the job runs with the default "
            "layout"
        )
        assert (await office.events(job_id))["job.unplanned"] == words

    play(course)


def test_a_spec_that_the_probe_found_to_be_wrong_ends_its_job_before_it_waits_for_seats() -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits()
        await office.looks()
        await office.fails("wrong_spec")
        await office.looks()
        job = await office.job(job_id)
        assert (job.state, job.exit_reason) == (JobState.FAILED, ExitReason.USER_ERROR)
        assert job.reason == "the spec is wrong: it went wrong so"
        assert job.failure is not None
        assert (job.failure.error, job.failure.node_id) == ("it went wrong so", NODE)
        assert office.launched() == []
        with pytest.raises(NotFoundError, match="before its first attempt: the spec is wrong: it"):
            await get_diagnosis(office.ports, job_id)
        # Its user corrects the code, which is no part of the question: it is asked again.
        await office.happens(job_id, ResumeAsked())
        await office.looks(4)
        assert (await office.job(job_id)).state is JobState.QUEUED
        assert len(office.asked()) == 2
        await office.answers()
        await office.looks()
        assert (await office.job(job_id)).state is JobState.PLACING

    play(course)


def test_a_defect_of_the_search_ends_the_plan_and_not_the_job() -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits()
        await office.looks()
        answer = answer_to(office.asked()[0])
        assert answer.profile is not None
        # No root: nothing that a node of ours would tell.
        torn = answer.profile.__class__(
            **{**vars(answer.profile), "modules": answer.profile.modules[1:]}
        )
        await office.hears(answer.model_copy(update={"profile": torn}))
        office.now += 30_000
        await office.looks()
        job = await office.job(job_id)
        assert job.state is JobState.PLACING
        assert "defect" in (await office.events(job_id))["job.unplanned"]

    play(course)


def test_a_job_that_fits_by_no_layout_fails_and_says_what_would_help() -> None:
    async def course(office: Office) -> None:
        office.joins(memory_bytes=1_300_000)
        job_id = await office.submits()
        await office.looks()
        await office.answers()
        await office.looks()
        job = await office.job(job_id)
        assert (job.state, job.exit_reason) == (JobState.FAILED, ExitReason.INFEASIBLE)
        assert job.reason is not None
        for words in ("its plan is infeasible", "does not fit", "ranks", "plan: default"):
            assert words in job.reason
        assert (job.attempts, office.launched()) == ((), [])
        # There is more room now: resumed, it is planned again.
        office.joins()
        await office.happens(job_id, ResumeAsked())
        await office.looks(3)
        assert (await office.job(job_id)).state is JobState.PLACING

    play(course)


def test_a_job_waits_for_a_node_that_can_profile_it() -> None:
    async def course(office: Office) -> None:
        office.server.nodes["loom-2"] = node("loom-2")
        job_id = await office.submits()
        await office.looks()
        job = await office.job(job_id)
        assert job.state is JobState.QUEUED
        assert "no node with CPU slots is ready to profile the model" in (job.reason or "")
        office.joins()
        await office.looks()
        await office.answers()
        await office.looks()
        assert (await office.job(job_id)).state is JobState.PLACING

    play(course, joined=False)


def test_a_new_leader_goes_on_where_the_old_one_stopped_and_asks_again_for_what_is_lost() -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits()
        await office.looks()
        office.new_leader()
        await office.looks()
        assert len(office.asked()) == 1
        planning = (await office.job(job_id)).planning
        assert planning is not None
        assert planning.plan_id is not None
        # A week went by, or Redis lost it.
        office.now += keys.PLAN_TTL_S * 1000
        office.joins()
        await office.looks()
        again = (await office.job(job_id)).planning
        assert again is not None
        assert again.plan_id not in {None, planning.plan_id}
        await office.answers()
        await office.looks()
        assert (await office.job(job_id)).state is JobState.PLACING

    play(course)


def test_a_change_of_bounds_has_an_elastic_job_planned_again() -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits(resources={"world": {"min": 2, "max": 4}})
        await office.looks()
        patch = JobPatch.model_validate({"resources": {"world": {"min": 1}}})
        await office.happens(job_id, PatchAsked(patch))
        await office.looks()
        await office.answers()
        await office.looks()
        job = await office.job(job_id)
        assert job.state is JobState.PLACING
        assert job.estimate is not None
        plan = await get_plan(office.ports, job.estimate.plan_id, _DRAWING)
        assert plan.mesh is not None
        assert plan.mesh.ranks == 1
        assert job.spec.worlds == (1, 2, 4)

    play(course)


def test_a_job_that_is_paused_while_it_is_planned_goes_on_when_it_is_resumed() -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits()
        await office.looks()
        await office.happens(job_id, PauseAsked(StopRequest()))
        await office.answers()
        await office.looks()
        assert (await office.job(job_id)).state is JobState.PAUSED
        await office.happens(job_id, ResumeAsked())
        await office.looks()
        assert (await office.job(job_id)).state is JobState.PLACING

    play(course)


def test_a_clone_begins_with_what_was_asked_and_is_planned_for_its_own_ranks() -> None:
    async def course(office: Office) -> None:
        first = await office.submits()
        await office.looks()
        await office.answers()
        await office.looks()
        source = await office.job(first)
        assert (source.spec.mesh == "auto", source.asked is not None) == (False, True)
        overrides = {"resources": {"ranks": 1}, "labels": {"of": "ada"}}
        wanted = CloneRequest.model_validate({"overrides": overrides})
        made = await clone(office.ports, Cloning(first, wanted), ADA, ANYTHING)
        assert (made.spec.mesh, made.spec.plan) == ("auto", "auto")
        await office.looks()
        await office.answers()
        await office.looks()
        job = await office.job(made.id)
        assert job.state is JobState.PLACING
        assert job.plan is not None
        assert job.plan.world_size == 1

    play(course)


def test_a_planned_job_keeps_its_layout_for_all_attempts_and_requests() -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits()
        await office.looks()
        await office.answers()
        await office.looks()
        settled = (await office.job(job_id)).spec
        await office.happens(job_id, PatchAsked(JobPatch(priority=3)))
        job = await office.job(job_id)
        assert job.asked is not None
        assert (job.spec.priority, job.asked.priority) == (3, 3)
        assert (job.asked.plan, job.spec.plan) == ("auto", settled.plan)

    play(course)


def test_a_dry_run_of_an_open_layout_shows_none() -> None:
    async def course(office: Office) -> None:
        spec = JobSpec.model_validate(job_body(plan="auto"))
        shown = await submit(office.ports, Submission(spec, dry_run=True), ADA, ANYTHING, _DRAWING)
        assert shown.plan is None
        assert "POST /v1/plans" in (shown.reason or "")
        assert await office.ports.jobs.active() == []

    play(course)


def test_a_plan_for_which_the_spec_has_no_room_is_missed_and_not_made_again_forever() -> None:
    async def course(office: Office) -> None:
        def data(count: int) -> dict[str, object]:
            note = [*["x" * 4000] * 15, "x" * count]
            return {"factory": "mine.data:load", "args": {"note": note}}

        args = {"model": {"factory": "decoder", "args": ARGS}, "plan": "auto", "data": data(1)}
        small = JobSpec.model_validate(job_body(**args))
        room = MAX_SPEC_BYTES - len(json.dumps(small.model_dump()))
        job_id = await office.submits(data=data(room - 100))
        await office.looks()
        await office.answers()
        await office.looks()
        job = await office.job(job_id)
        assert (job.state, job.spec.plan, len(office.server.plans)) == (JobState.PLACING, "auto", 1)
        assert "more than 65536" in (await office.events(job_id))["job.unplanned"]

    play(course)


def test_a_job_that_was_paused_for_long_is_planned_by_what_there_is_when_it_is_resumed() -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits()
        await office.looks()
        await office.happens(job_id, PauseAsked(StopRequest()))
        # Nobody looked at its plan, which nobody answered in time.
        office.now += 600_000
        office.joins()
        await office.happens(job_id, ResumeAsked())
        await office.looks()
        await office.answers()
        await office.looks()
        job = await office.job(job_id)
        assert (job.state, job.estimate is not None) == (JobState.PLACING, True)
        assert "job.unplanned" not in await office.events(job_id)

    play(course)


def test_the_queue_foretells_no_start_of_a_job_whose_layout_is_not_chosen() -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits()
        await office.looks()
        (entry,) = (await get_queue(office.ports)).items
        assert (entry.job_id, entry.expected_start_at) == (job_id, None)
        assert "its layout is being chosen" in entry.reason

    play(course)


def test_a_look_reads_all_jobs_once_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def course(office: Office) -> None:
        for _ in range(5):
            await office.submits()
        reads = 0
        active = office.ports.jobs.active

        async def counted() -> list[Stored]:
            nonlocal reads
            reads += 1
            return await active()

        monkeypatch.setattr(office.ports.jobs, "active", counted)
        # One for what waits, one for what is taken of the nodes; then nobody is there to ask.
        assert await office.plans() == 1.0
        assert reads == 2
        office.joins()
        await office.plans()
        reads = 0
        assert await office.plans() < 1.0
        assert reads == 1

    play(course, joined=False)


def test_of_an_owners_jobs_so_many_are_profiled_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "PLANS_PROBING", 2)

    async def course(office: Office) -> None:
        office.server.nodes["away"] = node("away", gpus=2)
        for _ in range(3):  # the only node for these is away, and they take no place of others
            await office.submits(resources={"ranks": 2, "device": "cuda"})
        models = [{"factory": "decoder", "args": ARGS | {"vocab": 300 + n}} for n in range(3)]
        on_cpus = {"ranks": 2, "device": "cpu"}
        jobs = [await office.submits(model=model, resources=on_cpus) for model in models]
        for _ in range(3):
            await office.looks()
        assert len(office.asked()) == 2
        asked = [(await office.job(job_id)).planning for job_id in jobs]
        assert [planning is not None and planning.plan_id is not None for planning in asked] == [
            True,
            True,
            False,
        ]
        await office.answers(office.asked()[0])
        await office.looks()
        assert len(office.asked()) == 3
        with pytest.raises(StateConflictError, match="the models of 2 plans of ada"):
            await begin_plan(
                office.ports,
                Wanted((await office.job(jobs[0])).spec, fresh=True),
                ADA.name,
                _DRAWING,
                await current_usages(office.ports),
            )

    play(course)


def test_a_plan_for_bounds_that_were_changed_meanwhile_is_not_the_job_s() -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits(resources={"world": {"min": 2, "max": 4}})
        before = await office.job(job_id)
        patch = JobPatch.model_validate({"resources": {"world": {"min": 1}}})
        await office.happens(job_id, PatchAsked(patch))
        # It was asked for by the spec as it was read before that.
        await office.happens(job_id, PlanAsked("plan_" + "0" * 26, "asked", before.revision))
        assert (await office.job(job_id)).planning == Planning()

    play(course)


def test_a_micro_batch_that_was_chosen_gives_way_to_new_bounds() -> None:
    async def course(office: Office) -> None:
        train = {"steps": 3, "global_batch": 16}
        job_id = await office.submits(resources={"world": {"min": 2, "max": 2}}, train=train)
        await office.looks()
        await office.answers()
        await office.looks(1)
        job = await office.job(job_id)
        assert job.asked is not None
        # As if the search had taken the whole share at once.
        sharding = default_plan.shard(job.spec)
        settled = default_plan.planned(job.asked, sharding, 8)
        stored = office.server.jobs[job_id]
        office.server.jobs[job_id] = replace(
            stored, job=stored.job.model_copy(update={"spec": settled})
        )
        for bounds, worlds, micro in (
            ({"max": 8}, (2, 4, 8), 2),
            ({"min": 16, "max": 16}, (16,), 1),
        ):
            patch = JobPatch.model_validate({"resources": {"world": bounds}})
            await office.happens(job_id, PatchAsked(patch))
            spec = (await office.job(job_id)).spec
            assert (spec.worlds, spec.train.micro_batch) == (worlds, micro)

    play(course)


def test_tp_is_not_chosen_where_the_nodes_have_no_seats_for_its_groups() -> None:
    async def course(office: Office) -> None:
        # With matrices split over two ranks the fastest would fit, but only one node has two seats.
        for name, slots in ((NODE, 2), ("loom-2", 1), ("loom-3", 1)):
            there = node(name)
            memory = 800_000 if name == NODE else 1_600_000
            changes = {"memory_bytes": memory * slots, "cpu_slots": slots}
            inventory = there.inventory.model_copy(update=changes)
            office.server.nodes[name] = there.model_copy(update={"inventory": inventory})
            office.server.leases[name] = Lease("life-1", 5_000)
        train = {"steps": 3, "global_batch": 16}
        job_id = await office.submits(resources={"ranks": 4}, train=train)
        await office.looks()
        await office.answers()
        await office.looks()
        job = await office.job(job_id)
        assert job.state is JobState.PLACING
        assert job.plan is not None
        assert job.plan.sharding.mesh.tp == 1

    play(course, joined=False)


def test_what_cannot_be_read_of_a_model_is_asked_again_and_hides_no_other_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def course(office: Office) -> None:
        first = await office.submits()
        await office.looks()
        await office.answers()
        await office.looks()
        assert (await office.job(first)).estimate is not None

        async def unreadable(_probe_id: str) -> None:
            raise RecordUnreadableError("the answer cannot be read")

        monkeypatch.setattr(office.ports.plans, "answer", unreadable)
        second = await office.submits()
        for _ in range(3):
            await office.plans()
        assert len(office.asked()) == 2
        shown = await list_plans(office.ports, PlanFilter(), None, 10, _DRAWING)
        states = [plan.state for plan in shown.items]
        assert states == [PlanState.PROBING, PlanState.PROBING, PlanState.READY]
        monkeypatch.undo()
        await office.answers()
        await office.looks()
        assert (await office.job(second)).estimate is not None

    play(course)


def test_a_job_that_waits_is_planned_for_nodes_that_could_take_it_and_not_for_the_idle_one() -> (
    None
):
    async def course(office: Office) -> None:
        # The only node with seats for it is busy; the idle one has one seat and little memory.
        small = node("loom-2")
        poor = small.inventory.model_copy(update={"memory_bytes": 600_000, "cpu_slots": 1})
        await office.submits(plan="default", resources={"ranks": 4})
        await office.looks(1)
        assert len(office.launched()) == 1
        office.server.nodes["loom-2"] = small.model_copy(update={"inventory": poor})
        office.server.leases["loom-2"] = Lease("life-1", 5_000)
        job_id = await office.submits()
        await office.looks()
        asked = [c for c in office.server.commands("loom-2") if isinstance(c, ProbeModel)]
        await office.answers(asked[-1], "loom-2")
        office.now += 30_000  # what that node measures is not waited for any longer
        await office.looks()
        job = await office.job(job_id)
        assert (job.state, job.estimate is not None) == (JobState.QUEUED, True)
        assert job.estimate is not None
        plan = await get_plan(office.ports, job.estimate.plan_id, _DRAWING)
        assert plan.memory_limit_bytes is not None
        assert plan.memory_limit_bytes > 600_000

    play(course)


def test_a_job_whose_node_is_lost_while_it_profiles_asks_another_one_and_no_third() -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits()
        await office.looks()
        for name in ("loom-2", "loom-3"):
            office.server.nodes[name] = node(name)
            office.server.leases[name] = Lease("life-1", 5_000)
        office.server.nodes[NODE] = node(state=NodeState.LOST)
        del office.server.leases[NODE]
        await office.looks(3)
        waiting = await office.job(job_id)
        assert waiting.state is JobState.QUEUED
        assert "loom-2" in (waiting.reason or "")
        assert [type(c) for c in office.server.commands("loom-2")].count(ProbeModel) == 1
        office.server.nodes["loom-2"] = node("loom-2", state=NodeState.LOST)
        del office.server.leases["loom-2"]
        await office.looks(3)
        job = await office.job(job_id)
        assert job.state is JobState.PLACING
        assert "was lost" in (await office.events(job_id))["job.unplanned"]

    play(course)


def test_the_first_steps_of_a_job_correct_what_is_estimated_of_its_model() -> None:
    async def course(office: Office) -> None:
        first = await office.submits()
        await office.looks()
        await office.answers()
        await office.looks()
        job = await office.job(first)
        assert job.estimate is not None
        assert job.estimate.model_flops
        assert job.estimate.peak_flops == FACTS.matmul_flops["fp32"]
        foreseen_s = job.estimate.step_time_s or 0.0
        await office.happens(first, launched(job))
        await office.happens(first, progressed(job))
        # The first steps are slow for reasons of their own, and what is left is too few at first.
        seconds = [100 * foreseen_s] * 3 + [3 * foreseen_s] * 10
        for number, step_s in enumerate(seconds, 1):
            assert await office.ports.plans.paces(job.estimate.probe_id or "") == []
            office.server.steps[first].append(
                StepRecord(step=number, fence=1, loss=1, tokens_per_s=1, step_time_s=step_s)
            )
            await office.looks(1)
        office.new_leader()  # which does not count the same attempt again
        await office.looks()
        (pace,) = await office.ports.plans.paces(job.estimate.probe_id or "")
        assert pace.job_id == first
        assert pace.taken_s == pytest.approx(3 * foreseen_s)
        second = await office.submits(name="again")
        await office.looks(3)
        found = (await office.job(second)).estimate
        assert found is not None
        assert found.probe_id == job.estimate.probe_id
        assert (found.step_time_s, found.time_scale) == pytest.approx((3 * foreseen_s, 3))
        assert found.micro_batch == job.estimate.micro_batch
        elsewhere = pace.model_copy(update={"kind": "faster ones", "taken_s": foreseen_s / 9})
        assert scale_of([pace, elsewhere], pace.kind) == pytest.approx(3)
        assert scale_of([], pace.kind) == 1

    play(course)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"granularity": 10**300}, "not a measurement of a model"),
        ({"flops": Growth(0, 0, tuple((n, n) for n in range(50_000)))}, "50000 numbers or names"),
    ],
    ids=["a number", "megabytes of numbers"],
)
def test_a_profile_that_no_measurement_finds_is_not_planned_with(
    changes: dict[str, Any], words: str
) -> None:
    async def course(office: Office) -> None:
        job_id = await office.submits()
        await office.looks()
        told = answer_to(office.asked()[-1])
        assert told.profile is not None
        forged = replace(told.profile, **changes)
        known = NodeMeasured(node_id=NODE, incarnation="life-1", device_type="cpu", facts=FACTS)
        await office.hears(told.model_copy(update={"profile": forged}), known)
        await office.looks()
        assert words in (await office.events(job_id))["job.unplanned"]

    play(course)


class OneReader:
    """Counts how many read a node's answer at a time."""

    def __init__(self, plans: PlanStore) -> None:
        self._plans = plans
        self.readers = self.most = self.reads = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 passes through whatever it is
        return getattr(self._plans, name)

    async def answer(self, probe_id: str) -> ModelProbed | None:
        self.readers += 1
        self.reads += 1
        self.most = max(self.most, self.readers)
        try:
            for _ in range(5):  # others get their turn, if they may
                await asyncio.sleep(0)
            return await self._plans.answer(probe_id)
        finally:
            self.readers -= 1


def a_profiled_model(office: Office) -> tuple[Ports, OneReader, JobSpec]:
    """Ports that count who reads what a node answered, and a spec of whose model the profile is known."""
    seen: Any = OneReader(office.ports.plans)
    spec = JobSpec.model_validate(job_body(model={"factory": "decoder", "args": ARGS}, plan="auto"))
    return replace(office.ports, plans=seen), seen, spec


def test_however_many_ask_for_plans_one_answer_is_read_at_a_time_and_once_for_each() -> None:
    async def course(office: Office) -> None:
        await office.submits()
        await office.looks()
        await office.answers()
        ports, seen, spec = a_profiled_model(office)
        drawing = Drawing(wait_s=0)
        asked = (make_plan(ports, Wanted(spec), ADA, ANYTHING, drawing) for _ in range(8))
        made = await asyncio.gather(*asked)
        assert {plan.state for plan in made} == {PlanState.READY}
        assert (seen.reads, seen.most) == (8, 1)

    play(course)


def test_a_list_waits_for_no_plan_that_is_being_worked_out_and_another_owner_for_one() -> None:
    async def course(office: Office) -> None:
        await office.submits()
        await office.looks()
        await office.answers()
        ports, seen, spec = a_profiled_model(office)
        drawing = Drawing(wait_s=0)
        done: list[str] = []

        async def makes(owner: str) -> None:
            await make_plan(ports, Wanted(spec), Actor(owner), ANYTHING, drawing)
            done.append(owner)

        async def states() -> list[PlanState]:
            page = await list_plans(ports, PlanFilter(), None, 10, drawing)
            return [plan.state for plan in page.items]

        async with asyncio.TaskGroup() as group:
            async with drawing.hands.of("cleo"):
                for owner in ("ada", "ada", "ada", "bob"):
                    group.create_task(makes(owner))
                while (shown := await states()).count(PlanState.PROBING) < 4:  # noqa: ASYNC110 virtual time
                    await asyncio.sleep(0)
                assert len(shown) == 5
            assert (seen.reads, done) == (0, [])
        assert sorted(done) == ["ada", "ada", "ada", "bob"]
        assert done.index("bob") < 2

    play(course)
