"""A plan of a real agent's profile, and the job that runs it."""

import pytest

from services.cli.plan_command import planned
from services.contract.api.views import MeasuredView
from services.contract.jobs.plans import SHARDING_PLAN
from services.contract.words.states import JobState, PlanState
from tests.e2e.conftest import Stack, tiny_spec
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

OF_100_MB_A_RANK: dict[str, object] = {
    "model": {"factory": "decoder", "args": {"dim": 512, "layers": 4, "heads": 4}},
    "train": {"steps": 4, "global_batch": 4, "seed": 7},
    "plan": "auto",
}


def test_a_job_runs_the_very_plan_that_was_shown_and_tells_how_right_it_was(stack: Stack) -> None:
    plan = planned(stack.client, tiny_spec(name="planned", **OF_100_MB_A_RANK))
    assert plan.state is PlanState.READY, (plan.reason, plan.failure)
    assert plan.feasible
    assert not plan.probe.cached
    assert plan.sharding is not None
    shown = SHARDING_PLAN.dump_json(plan.sharding)

    job = stack.rested(stack.client.submit({"plan_id": plan.id}).id)
    assert job.state is JobState.SUCCEEDED, (job.reason, job.failure)
    assert job.plan is not None
    assert SHARDING_PLAN.dump_json(job.plan.sharding) == shown
    assert SHARDING_PLAN.dump_json(SHARDING_PLAN.validate_python(job.spec.plan)) == shown
    assert job.spec.train.micro_batch == plan.micro_batch
    assert job.estimate is not None
    assert job.estimate.peak == plan.memory[0].peak
    assert job.estimate.peak.total > 100_000_000
    assert job.estimate.measured_as == "resident_growth"
    # Kernels and gloo take memory that no plan predicts, and small blocks lie where freed ones lay.
    assert job.estimate.ratio is not None
    assert 0.85 < job.estimate.ratio < 1.3
    # All that the processes hold is told beside it: Python and PyTorch, and copies for checkpoints.
    assert job.estimate.measured_peak_bytes is not None
    held = max(rank.memory_bytes for rank in stack.client.ranks(job.id).items)
    assert held > job.estimate.measured_peak_bytes

    def measured() -> MeasuredView | None:
        (node,) = stack.client.nodes().items
        return node.measured.get("cpu")

    # Asked for with the first plan; a node on which ranks run says that it could not.
    found = until(measured)
    again = planned(stack.client, tiny_spec(name="again", **OF_100_MB_A_RANK))
    assert again.probe.cached
    assert found.facts is None or again.step_time is not None


def test_what_an_operator_takes_within_itself_is_estimated_and_named_apart(
    stack: Stack,
) -> None:
    model = {"factory": "recurrent_models:Recurrent", "args": {"dim": 512, "layers": 2}}
    data = {"factory": "stdlib_bytes", "args": {"seq_len": 256}}
    train = {"steps": 4, "global_batch": 32, "seed": 7}
    spec = tiny_spec(name="recurrent", model=model, data=data, train=train, plan="auto")
    plan = planned(stack.client, spec)
    assert plan.state is PlanState.READY, (plan.reason, plan.failure)
    job = stack.rested(stack.client.submit({"plan_id": plan.id}).id, timeout_s=240)
    assert job.state is JobState.SUCCEEDED, (job.reason, job.failure)
    assert job.estimate is not None
    assert plan.memory[0].peak.workspace > 10_000_000
    assert job.estimate.peak == plan.memory[0].peak
    # What the kernels of an LSTM allocate and never write has no pages, and so is not resident.
    assert job.estimate.ratio is not None
    assert 0.5 < job.estimate.ratio < 1.1


def test_a_job_that_leaves_its_layout_open_runs_the_plan_that_was_chosen_for_it(
    stack: Stack,
) -> None:
    job = stack.rested(stack.submit(name="open", **OF_100_MB_A_RANK).id, timeout_s=240)
    assert job.state is JobState.SUCCEEDED, (job.reason, job.failure)
    assert job.estimate is not None, job.reason
    plan = stack.client.get_plan(job.estimate.plan_id)
    assert (plan.state, job.plan is not None) == (PlanState.READY, True)
    assert job.plan is not None
    assert job.plan.sharding == plan.sharding
    assert job.estimate.ratio is not None
    kinds = [event.kind for event in stack.client.events(job.id).items]
    assert kinds.index("job.planned") < kinds.index("job.placing")


def test_a_model_that_cannot_be_profiled_is_trained_all_the_same(stack: Stack) -> None:
    """Its forward looks at values, which nobody has who follows it without memory."""
    model = {
        "factory": "peeking_models:PeekingDecoder",
        "args": {"dim": 32, "layers": 2, "heads": 2},
    }
    job = stack.rested(stack.submit(name="peeks", plan="auto", model=model).id, timeout_s=240)
    assert job.state is JobState.SUCCEEDED, (job.reason, job.failure)
    assert job.estimate is None
    (why,) = [
        event.message
        for event in stack.client.events(job.id).items
        if event.kind == "job.unplanned"
    ]
    assert "DataDependent" in why


def test_a_spec_that_its_probe_finds_wrong_ends_before_any_rank_is_launched(stack: Stack) -> None:
    model = {"factory": "peeking_models:PeekingDecoder", "args": {"dim": 32, "haeds": 2}}
    job = stack.rested(stack.submit(name="wrong", plan="auto", model=model).id)
    assert job.state is JobState.FAILED
    assert "haeds" in (job.reason or ""), job.reason
    assert (job.attempt, job.exit_reason) == (0, "user_error")
    kinds = [event.kind for event in stack.client.events(job.id).items]
    assert "job.placing" not in kinds
