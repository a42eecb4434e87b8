"""Where plans are kept, and what nodes answered to probes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from services.contract.messages.probing import ModelProbed
from services.contract.words.states import PlanState
from services.controller.domain.job.effects import Send
from services.controller.domain.plans.pace import Pace
from services.controller.domain.plans.plan import Plan
from services.controller.ports.jobs import Place

Asked = Literal["cached", "pending", "asked", "too_many"]
"""The answer is there already; somebody has asked and waits; it was asked for just now; or nothing was kept, for
the owner has as many plans that wait as one may have."""


@dataclass(frozen=True)
class AmongPlans:
    """Which plans are wanted at most: in any of these states (none: all), of this owner.

    One that is PROBING by its record is always among them: it may be over by now.
    """

    states: frozenset[PlanState] = frozenset()
    owner: str | None = None

    def may_be(self, state: str) -> bool:
        """Whether one with that state in its record may be among them."""
        return not self.states or state == PlanState.PROBING or state in self.states


ALL_PLANS: Final = AmongPlans()


class PlanPage(NamedTuple):
    """Plans, newest first, and from where on there may be more; None: there are no more."""

    plans: Sequence[Plan]
    behind: Place | None


class PlanStore(Protocol):
    """Plans for a week, answers for a day. Both are forgotten by themselves."""

    async def keep(
        self, plan: Plan, question: Send, measure: Send | None, *, fresh: bool = False
    ) -> Asked:
        """Keep a new plan and put what it asks into inboxes, together.

        Args:
            plan: It.
            question: Its ``ProbeModel``. Nothing is sent if it was answered, or asked and not
                answered yet.
            measure: A ``MeasureNode``, if it is wanted; sent at most once a minute.
            fresh: Ask in any case, and forget the answer that there is.
        """
        ...

    async def load(self, plan_id: str) -> Plan:
        """One plan.

        Raises:
            NotFoundError: There is none, or none any more.
            RecordUnreadableError: There is one, but its record makes no sense here.
        """
        ...

    async def page(
        self, before: Place | None, limit: int, among: AmongPlans = ALL_PLANS
    ) -> PlanPage:
        """Up to ``limit`` plans that were made before that place, newest first.

        Fewer, or none, where many have to be looked through. One whose record makes no sense here is passed over.
        """
        ...

    async def conclude(self, plan: Plan) -> Plan:
        """Write what became of a probing plan. The first conclusion stands: that one is answered.

        Raises:
            NotFoundError: It was forgotten meanwhile.
        """
        ...

    async def keep_answer(self, answer: ModelProbed, epoch: int) -> bool:
        """Keep what the node that was asked last answered; a failure for a minute only.

        False: another node was asked, or none within a day.

        Raises:
            DeposedError: ``epoch`` is not the present one.
        """
        ...

    async def is_answered(self, probe_id: str) -> bool:
        """Whether there is an answer, readable or not."""
        ...

    async def answer(self, probe_id: str) -> ModelProbed | None:
        """The answer to a probe; None if there is none, or none any more.

        Raises:
            RecordUnreadableError: There is one that makes no sense here.
        """
        ...

    async def keep_pace(self, probe_id: str, pace: Pace) -> None:
        """Keep how long a job's steps took, with the profile of its model."""
        ...

    async def paces(self, probe_id: str) -> list[Pace]:
        """The last that were kept, newest first; those that make no sense here are passed over."""
        ...

    async def wait(self, probe_id: str, timeout_s: float) -> None:
        """Return once the probe is answered, or after ``timeout_s`` seconds."""
        ...
