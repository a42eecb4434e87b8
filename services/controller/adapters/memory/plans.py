"""Plans and answers to probes in memory."""

from services.contract.messages.probing import MeasureNode, ModelProbed
from services.contract.redis import redis_keys as keys
from services.contract.words.states import PlanState
from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.errors import no_plan
from services.controller.domain.job.effects import Send
from services.controller.domain.plans.pace import PACES_KEPT, Pace
from services.controller.domain.plans.plan import Plan
from services.controller.ports.jobs import Place
from services.controller.ports.plans import ALL_PLANS, AmongPlans, Asked, PlanPage


class MemoryPlans:
    """The port ``PlanStore``."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def keep(
        self, plan: Plan, question: Send, measure: Send | None, *, fresh: bool = False
    ) -> Asked:
        """See ``PlanStore.keep``."""
        now_ms = self._server.now_ms()
        for forgotten in [i for i, (ends, _) in self._server.plans.items() if ends <= now_ms]:
            del self._server.plans[forgotten]
        if (fresh or self._known(plan.probe_id) is None) and self._waiting_beside(
            plan
        ) >= keys.PLANS_PROBING:
            return "too_many"
        self._server.plans[plan.id] = (now_ms + keys.PLAN_TTL_S * 1000, plan)
        self._forget_oldest_of(plan)
        if measure is not None and isinstance(measure.command, MeasureNode):
            marker = keys.measuring(measure.node_id, measure.command.device_type)
            if self._mark(marker, keys.MEASURING_TTL_S * 1000):
                self._server.deliver((measure,))
        if fresh:
            self._server.answers.pop(plan.probe_id, None)
            self._server.asked.pop(keys.probe_asked(plan.probe_id), None)
        if self._known(plan.probe_id) is not None:
            return "cached"
        patience_ms = plan.answer_by_ms - plan.created_ms
        if not self._mark(keys.probe_asked(plan.probe_id), patience_ms):
            return "pending"
        self._server.probing_nodes[plan.probe_id] = question.node_id
        self._server.deliver((question,))
        return "asked"

    def _waiting_beside(self, newest: Plan) -> int:
        since_ms = newest.created_ms - (newest.answer_by_ms - newest.created_ms)
        return sum(
            plan.owner == newest.owner
            and plan.state is PlanState.PROBING
            and plan.created_ms >= since_ms
            for _, plan in self._server.plans.values()
        )

    def _forget_oldest_of(self, newest: Plan) -> None:
        """Those that are being made are kept, for jobs wait for them."""
        own = [plan for _, plan in self._server.plans.values() if plan.owner == newest.owner]
        own.sort(key=lambda plan: (plan.created_ms, plan.id))
        patience_ms = newest.answer_by_ms - newest.created_ms
        over = max(len(own) - keys.PLANS_KEPT, 0)
        done = [
            plan
            for plan in own
            if plan.state is not PlanState.PROBING
            or plan.created_ms + patience_ms < newest.created_ms
        ]
        for plan in done[:over]:
            del self._server.plans[plan.id]

    async def load(self, plan_id: str) -> Plan:
        """See ``PlanStore.load``."""
        return self._plan(plan_id)

    async def page(
        self, before: Place | None, limit: int, among: AmongPlans = ALL_PLANS
    ) -> PlanPage:
        """See ``PlanStore.page``."""
        now_ms = self._server.now_ms()
        by_place = {
            Place(plan.created_ms, plan.id): plan
            for ends_ms, plan in self._server.plans.values()
            if ends_ms > now_ms and among.may_be(plan.state) and among.owner in {None, plan.owner}
        }
        places = sorted((p for p in by_place if before is None or p < before), reverse=True)
        page = places[:limit]
        return PlanPage([by_place[p] for p in page], page[-1] if len(places) > limit else None)

    async def conclude(self, plan: Plan) -> Plan:
        """See ``PlanStore.conclude``."""
        known = self._plan(plan.id)
        if known.state is not PlanState.PROBING:
            return known
        expires_ms, _ = self._server.plans[plan.id]
        self._server.plans[plan.id] = (expires_ms, plan)
        return plan

    async def keep_answer(self, answer: ModelProbed, epoch: int) -> bool:
        """See ``PlanStore.keep_answer``."""
        self._server.refuse_deposed(epoch)
        if self._server.probing_nodes.get(answer.probe_id) != answer.node_id:
            return False
        lives_s = keys.FAILED_PROBE_TTL_S if answer.failure else keys.PROBE_TTL_S
        expires_ms = self._server.now_ms() + lives_s * 1000
        self._server.answers[answer.probe_id] = (expires_ms, answer)
        self._server.asked.pop(keys.probe_asked(answer.probe_id), None)
        await self._server.wake()
        return True

    async def is_answered(self, probe_id: str) -> bool:
        """See ``PlanStore.is_answered``."""
        return self._known(probe_id) is not None

    async def answer(self, probe_id: str) -> ModelProbed | None:
        """See ``PlanStore.answer``."""
        return self._known(probe_id)

    async def keep_pace(self, probe_id: str, pace: Pace) -> None:
        """See ``PlanStore.keep_pace``."""
        known = self._server.paces.get(probe_id, [])
        self._server.paces[probe_id] = [pace, *known][:PACES_KEPT]

    async def paces(self, probe_id: str) -> list[Pace]:
        """See ``PlanStore.paces``."""
        return list(self._server.paces.get(probe_id, ()))

    async def wait(self, probe_id: str, timeout_s: float) -> None:
        """See ``PlanStore.wait``."""
        await self._server.wait(timeout_s, lambda: self._known(probe_id) is not None)

    def _plan(self, plan_id: str) -> Plan:
        expires_ms, plan = self._server.plans.get(plan_id, (0, None))
        if plan is None or expires_ms <= self._server.now_ms():
            raise no_plan(plan_id)
        return plan

    def _known(self, probe_id: str) -> ModelProbed | None:
        expires_ms, answer = self._server.answers.get(probe_id, (0, None))
        return answer if expires_ms > self._server.now_ms() else None

    def _mark(self, marker: str, lives_ms: int) -> bool:
        """Whether the marker was not there; it is from now on."""
        if self._server.asked.get(marker, 0) > self._server.now_ms():
            return False
        self._server.asked[marker] = self._server.now_ms() + lives_ms
        return True
