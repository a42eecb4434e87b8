"""Jobs that leave their layout open, on virtual time: planned first, then placed."""

import json
from dataclasses import replace

import pytest

from services.contract.api.requests import CloneRequest, JobPatch
from services.contract.api.views import StopRequest
from services.contract.jobs.specs import MAX_SPEC_BYTES, JobSpec
from services.contract.messages.probing import ProbeModel
from services.contract.redis import redis_keys as keys
from services.contract.words.states import ExitReason, JobState, PlanState
from services.controller.domain.errors import (
    NotFoundError,
)
from services.controller.domain.job.events import (
    PatchAsked,
    PauseAsked,
    PlanAsked,
    ResumeAsked,
)
from services.controller.domain.job.job import Planning
from services.controller.domain.plans import default_plan
from services.controller.domain.scheduling.node import Lease
from services.controller.use_cases.clone import Cloning, clone
from services.controller.use_cases.inspect import get_diagnosis
from services.controller.use_cases.plans import get_plan
from services.controller.use_cases.queue import get_queue
from services.controller.use_cases.submit import Submission, submit
from tests.controller.conftest import ANYTHING, job_body
from tests.controller.histories import NODE, node
from tests.controller.planning_office import ADA, DRAWING, Office, play
from tests.controller.profiles import ARGS, answer_to


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
        plan = await get_plan(office.ports, job.estimate.plan_id, DRAWING)
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
        plan = await get_plan(office.ports, job.estimate.plan_id, DRAWING)
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
        shown = await submit(office.ports, Submission(spec, dry_run=True), ADA, ANYTHING, DRAWING)
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
        plan = await get_plan(office.ports, job.estimate.plan_id, DRAWING)
        assert plan.memory_limit_bytes is not None
        assert plan.memory_limit_bytes > 600_000

    play(course)
