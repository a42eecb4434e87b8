"""What nodes are asked of models for plans, and what becomes of their answers, on virtual time."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from fsdp_core.plan.model import Growth
from services.contract.jobs.specs import JobSpec
from services.contract.messages.probing import ModelProbed, NodeMeasured, ProbeModel
from services.contract.messages.telemetry import StepRecord
from services.contract.redis import redis_keys as keys
from services.contract.words.states import JobState, NodeState, PlanState
from services.controller.domain.errors import (
    RecordUnreadableError,
    StateConflictError,
)
from services.controller.domain.plans.pace import scale_of
from services.controller.domain.scheduling.node import Lease
from services.controller.domain.scheduling.placement import NodeUsage
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor, Stored
from services.controller.ports.plans import PlanStore
from services.controller.use_cases import plan_list, plans
from services.controller.use_cases.plan_jobs import Planner
from services.controller.use_cases.plan_list import PlanFilter, list_plans
from services.controller.use_cases.plans import Drawing, Wanted, begin_plan, make_plan
from services.controller.use_cases.waiting import current_usages
from tests.controller.conftest import ANYTHING, job_body
from tests.controller.histories import NODE, launched, node, progressed
from tests.controller.planning_office import ADA, DRAWING, Office, play
from tests.controller.profiles import ARGS, FACTS, answer_to


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
                DRAWING,
                await current_usages(office.ports),
            )

    play(course)


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
        shown = await list_plans(office.ports, PlanFilter(), None, 10, DRAWING)
        states = [plan.state for plan in shown.items]
        assert states == [PlanState.PROBING, PlanState.PROBING, PlanState.READY]
        monkeypatch.undo()
        await office.answers()
        await office.looks()
        assert (await office.job(second)).estimate is not None

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
        ({"device_type": "c" * 2_049}, "a name of 2049 characters at /profile/device_type"),
    ],
    ids=["a number", "megabytes of numbers", "a long name"],
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


@pytest.mark.parametrize(
    ("pattern", "many", "event", "words"),
    [
        ("none.*", [f"m{'x' * 400}{n}" for n in range(50)], "job.failed", "characters cut"),
        (
            "many.*",
            [f"many.{'x' * 1_000}{n}" for n in range(2_000)],
            "job.unplanned",
            "KiB to tell, more than the 2048 KiB",
        ),
    ],
    ids=["a reason", "units"],
)
def test_what_a_plan_tells_is_bounded_however_many_modules_it_would_name(
    pattern: str, many: list[str], event: str, words: str
) -> None:
    """Its reason stands in the job's record and in lists, and lists read all plans: of 8 MiB each they end no more."""

    async def course(office: Office) -> None:
        job_id = await office.submits(plan={"units": [{"modules": [pattern]}]})
        await office.looks()
        told = answer_to(office.asked()[-1])
        assert told.profile is not None
        known = told.profile
        forged = replace(known, modules=(*known.modules, *many), stops=(*known.stops, *many))
        await office.hears(
            told.model_copy(update={"profile": forged}),
            NodeMeasured(node_id=NODE, incarnation="life-1", device_type="cpu", facts=FACTS),
        )
        await office.looks()
        message = (await office.events(job_id))[event]
        assert words in message
        assert len(message) < 5_000
        record = (await office.job(job_id)).model_dump_json()
        (plan,) = (await office.ports.plans.page(None, 10)).plans
        assert max(len(record), len(plan.model_dump_json())) < 20_000

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


async def a_profiled_model(office: Office) -> tuple[Ports, OneReader, JobSpec, Drawing]:
    """Ports that count who reads what a node answered, and a spec of whose model the profile is known; a job waits for it."""
    await office.submits()
    await office.plans()
    await office.answers()
    seen: Any = OneReader(office.ports.plans)
    spec = JobSpec.model_validate(job_body(model={"factory": "decoder", "args": ARGS}, plan="auto"))
    return replace(office.ports, plans=seen), seen, spec, Drawing(wait_s=0)


def test_however_many_ask_for_plans_one_answer_is_read_at_a_time_and_once_for_each() -> None:
    async def course(office: Office) -> None:
        ports, seen, spec, drawing = await a_profiled_model(office)
        asked = (make_plan(ports, Wanted(spec), ADA, ANYTHING, drawing) for _ in range(8))
        made = await asyncio.gather(*asked)
        assert {plan.state for plan in made} == {PlanState.READY}
        assert (seen.reads, seen.most) == (8, 1)

    play(course)


def test_however_many_ask_for_plans_all_jobs_are_read_by_turns_of_the_owners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading: list[str] = []
    most = 0

    async def read_slowly(ports: Ports) -> tuple[NodeUsage, ...]:
        nonlocal most
        reading.append("")
        most = max(most, len(reading))
        for _ in range(5):  # others get their turn, if they may
            await asyncio.sleep(0)
        reading.pop()
        return await current_usages(ports)

    monkeypatch.setattr(plans, "current_usages", read_slowly)

    async def course(office: Office) -> None:
        ports, _, spec, drawing = await a_profiled_model(office)
        asked = (make_plan(ports, Wanted(spec), ADA, ANYTHING, drawing) for _ in range(8))
        made = await asyncio.gather(*asked)
        assert {plan.state for plan in made} == {PlanState.READY}
        # One for those that are asked for, one for the plan that is worked out.
        assert most <= 2

    play(course)


def test_a_list_waits_for_no_plan_that_is_being_worked_out_and_another_owner_for_one() -> None:
    async def course(office: Office) -> None:
        ports, seen, spec, drawing = await a_profiled_model(office)
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


def test_a_job_waits_for_one_of_the_plans_that_its_owner_asks_for_and_so_do_others_jobs() -> None:
    async def course(office: Office) -> None:
        ports, _, spec, drawing = await a_profiled_model(office)
        planner = Planner(ports, 1, drawing)
        done: list[str] = []

        async def makes() -> None:
            await make_plan(ports, Wanted(spec), ADA, ANYTHING, drawing)
            done.append("a plan that was asked for")

        async def looks() -> None:
            await planner.look()
            done.append("the plan of a job")

        async with asyncio.TaskGroup() as group:
            async with drawing.hands.of("cleo"):
                for _ in range(4):
                    group.create_task(makes())
                for _ in range(50):
                    await asyncio.sleep(0)
                group.create_task(looks())
                for _ in range(50):
                    await asyncio.sleep(0)
            assert done == []
        assert len(done) == 5
        assert done.index("the plan of a job") < 2

    play(course)


def test_a_list_does_not_wait_for_a_plan_that_takes_long_and_that_plan_is_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lists run one at a time: each viewer would wait for a search of each one before."""
    may_end, work_out = threading.Event(), plans._work_out

    def works_out(*args: Any) -> Any:  # noqa: ANN401 passes through whatever it is
        assert may_end.wait(30)
        return work_out(*args)

    async def course(office: Office) -> None:
        ports, _, _, drawing = await a_profiled_model(office)

        async def states() -> list[PlanState]:
            page = await list_plans(ports, PlanFilter(), None, 10, drawing)
            return [plan.state for plan in page.items]

        for _ in range(2):
            assert await states() == [PlanState.PROBING]
            assert drawing.hands.is_taken
        may_end.set()
        await asyncio.gather(*drawing.left_behind)
        assert await states() == [PlanState.READY]

    monkeypatch.setattr(plans, "_work_out", works_out)
    monkeypatch.setattr(plan_list, "_WORKS_FOR_S", 0.5)
    play(course)
