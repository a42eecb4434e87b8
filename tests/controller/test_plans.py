"""Plans on virtual time: asked for, profiled by a node, worked out, and all that may go wrong."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.contract.api.plan_views import PlanView
from services.contract.jobs.specs import JobSpec
from services.contract.messages.facts import NodeJoined
from services.contract.messages.probing import (
    MeasureNode,
    ModelProbed,
    NodeMeasured,
    ProbeFailure,
    ProbeModel,
)
from services.contract.redis import redis_keys as keys
from services.contract.words.states import NodeState, PlanState
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.errors import StateConflictError
from services.controller.domain.scheduling.node import Lease
from services.controller.ports.jobs import Actor
from services.controller.ports.machines import FactEntry
from services.controller.use_cases.facts import apply_facts
from services.controller.use_cases.plans import Drawing, Wanted, get_plan, make_plan
from tests.controller.conftest import ANYTHING, job_body
from tests.controller.histories import NODE, NOW, node
from tests.controller.profiles import ARGS, FACTS, answer_to

ADA = Actor("ada")


def body(**changes: object) -> dict[str, object]:
    return job_body(model={"factory": "decoder", "args": ARGS}, plan="auto") | changes


class Office:
    """Controllers on one store, and a node that a test speaks for."""

    def __init__(self) -> None:
        self.now = NOW
        self.server = MemoryServer(lambda: self.now)
        self.server.epoch = 1
        self.server.nodes[NODE] = node()
        self.server.leases[NODE] = Lease("life-1", 5_000)
        self.ports = memory_ports(self.server)
        # A request that does not wait: what follows is told by the test.
        self.drawing = Drawing(wait_s=0)

    async def plans(self, *, fresh: bool = False, **changes: object) -> PlanView:
        wanted = Wanted(JobSpec.model_validate(body(**changes)), fresh)
        return await make_plan(self.ports, wanted, ADA, ANYTHING, self.drawing)

    async def looks(self, plan: PlanView) -> PlanView:
        return await get_plan(self.ports, plan.id, self.drawing)

    async def hears(self, *facts: ModelProbed | NodeMeasured | NodeJoined) -> None:
        for fact in facts:
            self.now += 1
            await apply_facts(
                self.ports, [FactEntry(f"{self.now}-0", fact.model_dump_json(), fact.node_id)], 1
            )

    def asked(self, name: str = NODE) -> list[ProbeModel]:
        return [c for c in self.server.commands(name) if isinstance(c, ProbeModel)]


def play(course: Callable[[Office], Awaitable[None]]) -> None:
    async def run() -> None:
        await course(Office())

    asyncio.run(run())


def measured(name: str = NODE) -> NodeMeasured:
    return NodeMeasured(node_id=name, incarnation="life-1", device_type="cpu", facts=FACTS)


def test_a_plan_waits_for_its_profile_and_for_what_the_node_measures() -> None:
    async def course(office: Office) -> None:
        plan = await office.plans()
        assert (plan.state, plan.feasible) == (PlanState.PROBING, None)
        assert NODE in plan.reason
        (question,) = office.asked()
        assert question.probe_id == plan.probe.id
        assert question.owner == plan.owner
        assert MeasureNode(device_type="cpu") in office.server.commands(NODE)
        await office.hears(answer_to(question))
        assert (await office.looks(plan)).state is PlanState.PROBING
        await office.hears(measured())
        made = await office.looks(plan)
        assert (made.state, made.feasible) == (PlanState.READY, True)
        assert made.step_time is not None
        assert (await office.looks(plan)) == made

    play(course)


def test_a_node_that_cannot_measure_costs_a_plan_its_seconds_only() -> None:
    async def course(office: Office) -> None:
        plan = await office.plans()
        await office.hears(answer_to(office.asked()[0]))
        office.now += 30_000
        made = await office.looks(plan)
        assert (made.state, made.step_time) == (PlanState.READY, None)
        failed = NodeMeasured(
            node_id=NODE, incarnation="life-1", device_type="cpu", failure="too busy"
        )
        await office.hears(failed)
        before = len(office.server.commands(NODE))
        again = await office.plans()
        assert (again.state, again.probe.cached) == (PlanState.READY, True)
        assert len(office.server.commands(NODE)) == before

    play(course)


def test_one_question_serves_all_who_ask_the_same() -> None:
    async def course(office: Office) -> None:
        first, second = await office.plans(), await office.plans(name="other", priority=3)
        (question,) = office.asked()
        # Told twice, as facts may be.
        await office.hears(answer_to(question), answer_to(question), measured(), measured())
        for plan in (first, second):
            assert (await office.looks(plan)).state is PlanState.READY
        third = await office.plans(train={"steps": 7})
        assert (third.state, third.probe.cached) == (PlanState.READY, True)
        other = await office.plans(model={"factory": "decoder", "args": ARGS | {"layers": 4}})
        assert other.state is PlanState.PROBING
        assert len(office.asked()) == 2

    play(course)


def test_a_fresh_plan_has_the_model_profiled_again() -> None:
    async def course(office: Office) -> None:
        await office.plans()
        await office.hears(answer_to(office.asked()[0]), measured())
        fresh = await office.plans(fresh=True)
        assert (fresh.state, fresh.probe.cached) == (PlanState.PROBING, False)
        assert len(office.asked()) == 2
        await office.hears(answer_to(office.asked()[1]))
        assert (await office.looks(fresh)).state is PlanState.READY

    play(course)


@pytest.mark.parametrize(
    "code", ["timed_out", "out_of_memory", "crashed", "refused", "raised", "wrong_spec"]
)
def test_a_probe_that_fails_fails_its_plans_and_says_what_to_do(code: str) -> None:
    async def course(office: Office) -> None:
        plan = await office.plans()
        failure = ProbeFailure.model_validate({"code": code, "reason": "it went wrong so"})
        told = ModelProbed(probe_id=plan.probe.id, node_id=NODE, took_s=3, failure=failure)
        await office.hears(told)
        failed = await office.looks(plan)
        assert failed.state is PlanState.FAILED
        assert failed.failure is not None
        assert (failed.failure.code, failed.failure.reason) == (code, "it went wrong so")
        assert failed.failure.advice
        assert failed.probe.took_s == 3
        soon = await office.plans()
        assert soon.state is PlanState.FAILED
        office.now += keys.FAILED_PROBE_TTL_S * 1000
        later = await office.plans()
        assert later.state is PlanState.PROBING
        assert len(office.asked()) == 2
        assert (await office.looks(plan)) == failed

    play(course)


def test_a_plan_whose_probe_nobody_answers_fails_when_its_time_is_over() -> None:
    async def course(office: Office) -> None:
        plan = await office.plans()
        office.now += 239_999
        assert (await office.looks(plan)).state is PlanState.PROBING
        office.now += 1
        failed = await office.looks(plan)
        assert failed.failure is not None
        assert failed.failure.code == "no_answer"
        assert "240 s" in failed.failure.reason
        await office.hears(answer_to(office.asked()[0]))
        assert (await office.looks(plan)) == failed
        # The late answer serves the next one.
        assert (await office.plans()).probe.cached

    play(course)


def test_a_plan_whose_node_is_lost_fails_at_once_unless_it_had_answered() -> None:
    async def course(office: Office) -> None:
        plan = await office.plans()
        office.server.nodes[NODE] = node(state=NodeState.LOST)
        failed = await office.looks(plan)
        assert failed.failure is not None
        assert "was lost" in failed.failure.reason
        office.server.nodes[NODE] = node()
        second = await office.plans(fresh=True)
        await office.hears(answer_to(office.asked()[1]), measured())
        office.server.nodes[NODE] = node(state=NodeState.LOST)
        assert (await office.looks(second)).state is PlanState.READY

    play(course)


def test_a_controller_that_is_started_again_goes_on_with_its_plans() -> None:
    async def course(office: Office) -> None:
        plan = await office.plans()
        office.ports, office.drawing = memory_ports(office.server), Drawing(wait_s=0)
        await office.hears(answer_to(office.asked()[0]), measured())
        assert (await office.looks(plan)).state is PlanState.READY

    play(course)


def test_whoever_looks_at_once_gets_one_and_the_same_plan() -> None:
    async def course(office: Office) -> None:
        plan = await office.plans()
        await office.hears(answer_to(office.asked()[0]), measured())
        looks = await asyncio.gather(*(office.looks(plan) for _ in range(4)))
        assert {look.model_dump_json() for look in looks} == {looks[0].model_dump_json()}
        assert looks[0].state is PlanState.READY

    play(course)


def test_the_least_busy_node_that_is_ready_is_asked() -> None:
    async def course(office: Office) -> None:
        office.server.nodes |= {name: node(name) for name in ("a-silent", "b-free", "c-free")}
        office.server.leases |= {name: Lease("life-1", 5_000) for name in ("b-free", "c-free")}
        assert (await office.plans()).probe.node_id == "b-free"
        office.server.leases = {}
        with pytest.raises(StateConflictError, match="start an agent") as refused:
            await office.plans()
        assert refused.value.code == "no_node_to_probe"

    play(course)


def test_a_gang_that_no_nodes_could_seat_is_planned_and_told_to_be_infeasible() -> None:
    async def course(office: Office) -> None:
        plan = await office.plans(resources={"ranks": 16})
        await office.hears(answer_to(office.asked()[0]), measured())
        made = await office.looks(plan)
        assert (made.state, made.feasible) == (PlanState.READY, False)
        assert "16 CPU slots" in made.reasons[0]
        assert any("fewer ranks" in words for words in made.advice)
        assert made.mesh is not None
        assert made.mesh.ranks == 16

    play(course)
