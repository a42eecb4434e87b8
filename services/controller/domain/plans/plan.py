"""A plan's record, and what becomes of it by an answer or by the clock.

A plan is PROBING until the node that was asked has answered, or has let its time go by. Whoever
looks at it next concludes it: nothing is lost with a controller, for all that a plan waits for is in
the store.
"""

from dataclasses import dataclass
from typing import Final

from fsdp_core.plan.model import ModelProfile, OptimizerFacts
from services.contract.api.plan_views import JobEstimate, PlanFailure, PlanOutcome
from services.contract.jobs.specs import CarriedSpec
from services.contract.messages.probing import DeviceType, ModelProbed, ProbeFailure
from services.contract.messages.rank_pipe import ThroughputUnit
from services.contract.words.bounds import ERROR_CHARACTERS, shortened
from services.contract.words.ids import NodeId, PlanId, ProbeId
from services.contract.words.states import NodeState, PlanState
from services.controller.domain.record import Record, is_ahead
from services.controller.domain.scheduling.node import Node

_ADVICE: Final = {
    "timed_out": "the model is too large to be followed in that time: raise MESHLOOM_PROBE_TIMEOUT_S "
    "of the controller, or use plan: default, which needs no profile",
    "out_of_memory": "following the model took too much memory: use a node with more, or use "
    "plan: default, which needs no profile",
    "crashed": "run the model's factory alone on that node to see why its process dies; see also "
    "the agent's log",
    "refused": "see the reason: the node cannot build this model",
    "raised": "the model may still train: a job runs with the default layout; set mesh and "
    "train.micro_batch to choose another",
    "wrong_spec": "correct the spec, or the code that it names: the job would fail in the same way",
    "search_failed": "this is a defect of Meshloom: report it with the controller's log; a plan that "
    "is written out, or plan: default, needs no search",
    "no_answer": "check whether the node's agent is alive (meshloom nodes), then retry",
}


class Plan(Record):
    """All that is known of a plan. Times in milliseconds of Redis's clock.

    ``answer_by_ms``: when the probe is given up. ``measured_by_ms``: until when the plan waits for
    what the node measures of itself, too; 0: not at all. ``cached``: the answer was there before it
    was asked for.
    """

    id: PlanId
    state: PlanState = PlanState.PROBING
    spec: CarriedSpec
    owner: str = "local"
    device_type: DeviceType
    probe_id: ProbeId
    node_id: NodeId
    cached: bool = False
    took_s: float | None = None
    created_ms: int
    answer_by_ms: int
    measured_by_ms: int = 0
    failure: PlanFailure | None = None
    outcome: PlanOutcome = PlanOutcome()

    @property
    def reason(self) -> str:
        """Why it stands where it stands, in a sentence."""
        if self.failure is not None:
            return self.failure.reason
        if self.state is PlanState.PROBING:
            return f"its model is profiled on {self.node_id}"
        return "; ".join(self.outcome.reasons)

    @property
    def estimate(self) -> JobEstimate | None:
        """What a job that runs it may be compared with."""
        found = self.outcome
        if not found.memory or found.micro_batch is None:
            return None
        fullest = max(found.memory, key=lambda each: each.peak.total)
        return JobEstimate(
            plan_id=self.id,
            reason=self.reason,
            peak=fullest.peak,
            where=fullest.where,
            unit=fullest.unit,
            host_bytes=fullest.host_bytes,
            micro_batch=found.micro_batch,
            step_time_s=None if found.step_time is None else found.step_time.total_s,
            time_scale=1.0 if found.step_time is None else found.step_time.scale,
            probe_id=self.probe_id,
            model_flops=found.model_flops,
            peak_flops=found.peak_flops,
        )


@dataclass(frozen=True)
class StillProbing:
    """Nothing is due yet."""


@dataclass(frozen=True)
class Profiled:
    """All is there that the plan is worked out from: on which node, and what was found."""

    node_id: NodeId
    took_s: float
    profile: ModelProfile
    optimizer: OptimizerFacts
    sequence_tokens: int
    throughput_unit: ThroughputUnit = "tokens"


def judge(
    plan: Plan, answer: ModelProbed | None, node: Node | None, now_ms: int
) -> StillProbing | Profiled | Plan:
    """What a probing plan waits for, or what became of it.

    Args:
        plan: It.
        answer: To its probe, if there is one.
        node: That was asked, with what it told last of its devices; a failure that it told before
            the plan was made does not count.
        now_ms: The present.
    """
    if answer is None:
        if node is None or node.state is NodeState.LOST:
            return fail(plan, "no_answer", f"{plan.node_id} was lost before it answered")
        if now_ms < plan.answer_by_ms and not is_ahead(plan.created_ms, now_ms):
            return StillProbing()
        waited_s = (plan.answer_by_ms - plan.created_ms) / 1000
        return fail(plan, "no_answer", f"{plan.node_id} did not answer within {waited_s:.0f} s")
    if answer.profile is None or answer.optimizer is None or answer.sequence_tokens is None:
        failed = answer.failure or ProbeFailure(code="crashed", reason="the answer is empty")
        plan = plan.model_copy(update={"took_s": answer.took_s, "node_id": answer.node_id})
        return fail(plan, failed.code, failed.reason, failed.traceback)
    measured = None if node is None else node.measured.get(plan.device_type)
    is_told = measured is not None and (
        measured.facts is not None or measured.at_ms >= plan.created_ms
    )
    may_wait = now_ms < plan.measured_by_ms and not is_ahead(plan.created_ms, now_ms)
    if not is_told and may_wait:
        return StillProbing()
    return Profiled(
        answer.node_id,
        answer.took_s,
        answer.profile,
        answer.optimizer,
        answer.sequence_tokens,
        answer.throughput_unit,
    )


def fail(plan: Plan, code: str, reason: str, traceback: str | None = None) -> Plan:
    """The plan, FAILED, with what to do about it."""
    reason = shortened(reason, ERROR_CHARACTERS)
    failure = PlanFailure.model_validate(
        {"code": code, "reason": reason, "advice": _ADVICE[code], "traceback": traceback}
    )
    return plan.model_copy(update={"state": PlanState.FAILED, "failure": failure})


def conclude(plan: Plan, found: Profiled, outcome: PlanOutcome) -> Plan:
    """The plan, worked out."""
    return plan.model_copy(
        update={
            "state": PlanState.READY,
            "took_s": found.took_s,
            "node_id": found.node_id,
            "outcome": outcome,
        }
    )
