"""The loop's arithmetic: masked tokens, fp16, deterministic operators, Muon, and what it exchanges."""

from collections.abc import Callable
from typing import Any

import pytest

from fsdp_core.plan.model import UnitPlan
from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import RankEvaluated, RankFailed
from tests.rank.gang import Attempt, Ranks, Trained

pytestmark = pytest.mark.ranks

Spec = Callable[..., JobSpec]
USER = "tests.rank.user_trainables"
CONSTANT = {"factory": "constant", "args": {}}
TRAIN = {"steps": 6, "global_batch": 12, "seed": 7}


def tokens(spec: Spec, data: str, **train: Any) -> JobSpec:  # noqa: ANN401 (any field)
    return spec(
        model={"factory": f"{USER}:TokenLoss", "args": {}},
        data={"factory": f"{USER}:{data}", "args": {}},
        train={**TRAIN, **train},
    )


def test_a_masked_token_weighs_nothing_however_the_batch_is_split(
    trained: Trained, spec: Spec
) -> None:
    job = tokens(spec, "Masked")
    one = trained.of(job, 1)
    others = [
        trained.of(job, 2),
        trained.of(job, 3),
        # One micro-batch of these predicts no token at all.
        trained.of(tokens(spec, "Masked", micro_batch=2), 2),
    ]
    for other in others:
        assert other.losses() == pytest.approx(one.losses(), abs=1e-5)
        assert evaluation(other) == pytest.approx(evaluation(one), abs=1e-5)
        assert norms(other) == pytest.approx(norms(one), rel=1e-4)
    assert one.losses()[6] < one.losses()[1]


def test_a_step_without_a_token_says_so(ranks: Ranks, spec: Spec) -> None:
    attempt = ranks.start(tokens(spec, "AllMasked"), 1)
    assert attempt.ended() == [1]
    assert "step 1 is the mean over no token: all labels of its batch are masked" in failure(
        attempt
    )


def test_where_all_tokens_count_the_arithmetic_is_that_without_labels(
    trained: Trained, spec: Spec
) -> None:
    whole = trained.of(tokens(spec, "Whole", micro_batch=2))
    unmasked = trained.of(tokens(spec, "Unmasked", micro_batch=2))
    assert whole.losses() == unmasked.losses()
    assert norms(whole) == norms(unmasked)


def test_micro_batches_gather_again_and_reduce_once(trained: Trained, spec: Spec) -> None:
    """Of three units the blocks are gathered twice a pass, and the root once."""
    whole = trained.of(spec())
    split = trained.of(spec(train={**TRAIN, "micro_batch": 2}))
    more = issued(split) - issued(whole)
    assert more == 6 * 2 * 5


def test_fp16_trains_as_fp32_does_and_skips_what_overflows(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    changes = {
        "model": None,
        "data": {"factory": "tests.rank.user_vision:Pictures"},
        "loss": {"factory": "cross_entropy"},
        "checkpoint": {"every_steps": 4},
    }

    def of(trainable: str) -> JobSpec:
        named = {"trainable": {"factory": f"{USER}:{trainable}"}}
        return JobSpec.model_validate(spec().model_dump(mode="json") | changes | named)

    exact = trained.of(of("Alone")).losses()
    half = trained.of(of("Alone"), param_dtype="fp16")
    assert half.losses() == pytest.approx(exact, abs=5e-3)
    assert half.losses() != exact
    spoilt = ranks.start(of("Spoilt"), param_dtype="fp16").succeeded()
    finite = [step.step for step in spoilt.steps() if step.grad_norm == step.grad_norm]
    assert finite == [1, 2, 4, 5, 6]
    losses = spoilt.losses()
    assert losses == spoilt.losses(1)
    assert {step: losses[step] for step in (1, 2, 3)} == {
        step: half.losses()[step] for step in (1, 2, 3)
    }
    log = (spoilt.root / "rank-0.log").read_text(encoding="utf-8")
    assert "step 3: skipped, for gradients overflowed in fp16 (1 so far)" in log
    assert "the loss scale is now 32768" in log
    source = spoilt.committed(4).checkpoint_id
    resumed = ranks.start(of("Spoilt"), fence=2, resume_from=source, param_dtype="fp16")
    assert resumed.succeeded().losses() == spoilt.losses_after(4)
    log = (resumed.root / "rank-0.log").read_text(encoding="utf-8")
    assert "fp16: losses are scaled, by 32768 at first" in log


def test_deterministic_operators_are_asked_for_and_said(ranks: Ranks, spec: Spec) -> None:
    job = spec(
        model={"factory": f"{USER}:Undetermined", "args": {}},
        data={"factory": f"{USER}:Unmasked", "args": {}},
        train={**TRAIN, "deterministic": True},
    )
    attempt = ranks.start(job, 1, units=())
    assert attempt.ended() == [1]
    assert "does not have a deterministic implementation" in failure(attempt)
    log = (attempt.root / "rank-0.log").read_text(encoding="utf-8")
    assert "deterministic: operators give the same bits each time, or raise" in log


def test_muon_trains_matrices_that_one_rank_owns(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    job = spec(optimizer={"factory": "muon", "args": {"lr": 1e-2}})
    alone, two = trained.of(job, 1).losses(), trained.of(job)
    # Its steps are computed in bf16, where a different last bit of a gradient becomes visible.
    assert two.losses() == pytest.approx(alone, abs=5e-3)
    assert two.losses()[6] < two.losses()[1] - 0.05
    source = trained.committed(3, ranks, job).checkpoint_id
    resumed = ranks.start(job, fence=2, resume_from=source).succeeded()
    assert resumed.losses() == two.losses_after(3)
    other = ranks.start(job, 3, fence=3, resume_from=source).succeeded()
    assert other.losses() == pytest.approx(two.losses_after(3), abs=5e-3)


def test_owned_matrices_of_replicas_are_saved_once(ranks: Ranks, spec: Spec) -> None:
    job = spec(
        optimizer={"factory": "muon", "args": {"lr": 1e-2}},
        train={**TRAIN, "steps": 2},
        schedule=CONSTANT,
        resources={"ranks": 4},
        checkpoint={"every_steps": 1},
    ).model_copy(update={"plan": {"units": [{"modules": ["blocks.*"]}]}})
    job = JobSpec.model_validate(
        job.model_dump(mode="json") | {"mesh": {"dp_replicate": 2, "dp_shard": 2}}
    )
    whole = ranks.start(job).succeeded()
    source = whole.committed(1).checkpoint_id
    resumed = ranks.start(job, fence=2, resume_from=source).succeeded()
    assert resumed.losses() == whole.losses_after(1)


def test_an_evaluation_of_averages_leaves_no_trace_in_the_training(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    """Not even where units stay gathered after a pass."""
    gathered = (UnitPlan(("blocks.*",), reshard_after_forward=False),)
    averaged = spec(train={**TRAIN, "eval_every": 2, "ema": {"decay": 0.9}})
    run = ranks.start(averaged, units=gathered).succeeded()
    assert run.losses() == trained.of(spec()).losses()
    mine, weights = run.of_kind(0, RankEvaluated)[-1], trained.of(spec()).of_kind(0, RankEvaluated)
    assert mine.loss is not None
    assert mine.loss > (weights[-1].loss or 0.0) + 0.01


def test_groups_of_parameters_have_rates_of_their_own(ranks: Ranks, spec: Spec) -> None:
    none = [{"match": "*", "lr": 0.0}]
    job = spec(
        optimizer={"factory": "torch.optim.Adam", "args": {"lr": 1.0}, "groups": none},
        train={**TRAIN, "steps": 2, "eval_every": 1},
        schedule=CONSTANT,
    )
    attempt = ranks.start(job, 1).succeeded()
    first, second = attempt.of_kind(0, RankEvaluated)
    assert first.loss == second.loss
    wrong = spec(optimizer={"groups": [{"match": "*.bais", "lr": 0.0}]})
    refused = ranks.start(wrong, 1, fence=2)
    assert refused.ended() == [1]
    assert "optimizer.groups.0.match: '*.bais' matches no parameter" in failure(refused)


def evaluation(attempt: Attempt) -> float | None:
    (found,) = attempt.of_kind(0, RankEvaluated)
    assert found.loss is not None
    return found.loss


def norms(attempt: Attempt) -> list[float]:
    return [step.grad_norm for step in attempt.steps()]


def issued(attempt: Attempt) -> int:
    """Collectives of the engine, over the whole run."""
    board = attempt.board(0).read()
    assert board is not None
    return board.issued[0]


def failure(attempt: Attempt) -> str:
    (found,) = attempt.of_kind(0, RankFailed)
    return found.error
