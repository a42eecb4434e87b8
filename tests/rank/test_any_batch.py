"""Ranks train on batches of any nesting, by the loss that the model, the spec or the user has."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.contract.jobs.spec_parts import Factory
from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import (
    RankEvaluated,
    RankFailed,
    RankMetrics,
    RankVote,
)
from services.worker.rank.models.loss import next_token_accuracy
from services.worker.rank.registry import FactoryError, function
from tests.rank.gang import Ranks, Trained

pytestmark = pytest.mark.ranks

Spec = Callable[..., JobSpec]
USER = "tests.rank.user_vision"
EQUAL: list[tuple[str, str, dict[str, Any] | None]] = [
    ("Classifier", "tuple", {"factory": "cross_entropy"}),
    ("Classifier", "dict", {"factory": "cross_entropy"}),
    ("WithLoss", "dict", None),
    ("OfPictures", "dataclass", {"factory": f"{USER}:smoothed"}),
    ("Classifier", "tuple", {"factory": f"{USER}:smoothed", "args": {"smoothing": 0.0}}),
]


def of(spec: Spec, model: str, kind: str, loss: dict[str, Any] | None) -> JobSpec:
    plain = spec(optimizer={"args": {"lr": 0.05}}).model_dump()
    return JobSpec.model_validate(
        plain
        | {
            "model": {"factory": f"{USER}:{model}"},
            "data": {"factory": f"{USER}:Pictures", "args": {"kind": kind}},
            "loss": loss,
        }
    )


def test_the_way_to_the_loss_does_not_show_in_it(trained: Trained, spec: Spec) -> None:
    runs = [trained.of(of(spec, *way)) for way in EQUAL]
    first = runs[0].losses()
    assert first[6] < first[1] - 0.05
    assert [run.losses() for run in runs] == [first] * len(EQUAL)


def test_validation_weighs_batches_by_their_samples(trained: Trained, spec: Spec) -> None:
    two = trained.of(of(spec, *EQUAL[0])).of_kind(0, RankEvaluated)
    three = trained.of(of(spec, *EQUAL[0]), 3).of_kind(0, RankEvaluated)
    assert two[-1].tokens == three[-1].tokens == 11
    assert two[-1].loss == pytest.approx(three[-1].loss, abs=1e-5)


def test_each_checkpoint_that_may_be_the_best_is_evaluated_before(
    trained: Trained, spec: Spec
) -> None:
    wanted = of(spec, "Classifier", "tuple", {"factory": f"{USER}:measured"})
    best = {"metric": "z_hits", "mode": "max"}
    keeping = wanted.checkpoint.model_validate({"every_steps": 3, "keep_best": best})
    run = trained.of(wanted.model_copy(update={"checkpoint": keeping}))
    assert [each.step for each in run.of_kind(0, RankEvaluated)] == [3, 6]
    votes = run.of_kind(1, RankVote)
    assert [vote.step for vote in votes] == [3, 6]
    assert all(0 <= (vote.evaluation["z_hits"] or 0) <= 1 for vote in votes)
    assert votes[1].evaluation["loss"] == run.of_kind(0, RankEvaluated)[1].loss
    assert run.losses() == trained.of(of(spec, *EQUAL[0])).losses()


def measuring(spec: JobSpec, metrics: str, *, at_steps: bool = False, **args: int) -> JobSpec:
    named = {"factory": metrics, "args": args}
    return JobSpec.model_validate(
        {**spec.model_dump(), "evaluation": {"metrics": named, "at_steps": at_steps}}
    )


def test_metrics_of_evaluations_are_means_over_all_validation_samples(
    trained: Trained, spec: Spec
) -> None:
    plain = of(spec, *EQUAL[0])
    wanted = measuring(plain, f"{USER}:within", best=4)
    hits = measuring(plain, f"{USER}:within", best=1)
    runs = [trained.of(wanted), trained.of(hits), trained.of(hits, 3)]
    told = [run.of_kind(0, RankEvaluated)[-1].metrics for run in runs]
    accuracy = trained.of(plain).of_kind(0, RankEvaluated)[-1].metrics["accuracy"]
    # Of batches of 6, 4 and 1: what is a mean over samples weighs by them.
    assert told[0] == {"accuracy": accuracy, "top_4": 1.0, "samples": (36 + 16 + 1) / 11}
    assert [each["top_1"] for each in told[1:]] == [accuracy, pytest.approx(accuracy)]
    # Nothing else of the run is changed, and steps do not measure them.
    assert [run.losses() for run in runs[:2]] == [trained.of(plain).losses()] * 2
    points = [point for each in runs[0].of_kind(0, RankMetrics) for point in each.points]
    assert not any("top_4" in point.values for point in points)
    assert any("validation/top_4" in point.values for point in points)


def test_metrics_may_be_measured_at_each_step_too(trained: Trained, spec: Spec) -> None:
    run = trained.of(measuring(of(spec, "WithLoss", "dict", None), "accuracy", at_steps=True))
    points = [point for each in run.of_kind(0, RankMetrics) for point in each.points]
    measured = [point.values["accuracy"] for point in points if "accuracy" in point.values]
    assert len(measured) == 6
    assert run.losses() == trained.of(of(spec, *EQUAL[0])).losses()
    logged = trained.of(of(spec, *EQUAL[0])).of_kind(0, RankMetrics)
    same = [p.values["accuracy"] for each in logged for p in each.points if "accuracy" in p.values]
    assert measured == same


def test_tokens_that_are_predicted_well_are_counted_as_the_loss_counts_them() -> None:
    logits = torch.eye(4)[torch.tensor([[1, 2, 3, 0], [1, 1, 3, 3]])]
    tokens = torch.tensor([[0, 1, 2, 2, 3], [1, 1, 1, 0, 3]])
    assert next_token_accuracy(logits, tokens)["accuracy"] == pytest.approx(5 / 8)
    labels = torch.tensor([[9, 1, -100, 3], [9, -100, -100, 0]])
    masked = {"input_ids": labels.clamp(0), "labels": labels}
    assert next_token_accuracy(logits, masked)["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": {"factory": "tests.rank.user_models:OwnLoss"}}, "OwnLoss computes its loss"),
        (
            {"evaluation": {"metrics": {"factory": f"{USER}:nothing"}}},
            r"must return a dict of numbers.* this is a NoneType",
        ),
        (
            {"evaluation": {"metrics": {"factory": f"{USER}:smoothed"}}},
            r"none of them called 'loss'; this is a dict of shapes",
        ),
        (
            {
                "data": {"factory": "tests.rank.user_sets:pictures", "args": {"count": 12}},
                "evaluation": {"metrics": {"factory": "accuracy"}},
            },
            r"evaluation: it needs evaluations, and the data has no validation part",
        ),
    ],
)
def test_metrics_that_cannot_be_say_why(
    ranks: Ranks, spec: Spec, changed: dict[str, Any], message: str
) -> None:
    base = measuring(of(spec, *EQUAL[0]), "accuracy").model_dump()
    if "model" in changed:
        base = measuring(spec(model=changed["model"] | {"args": {}}), "accuracy").model_dump()
    attempt = ranks.start(JobSpec.model_validate({**base, **changed}), 1, units=())
    assert attempt.ended() == [1]
    (failure,) = attempt.of_kind(0, RankFailed)
    assert re.search(message, failure.error), failure.error


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (("Classifier", "tuple", None), "Classifier has no method loss.*name one in the spec"),
        (("Classifier", "tuple", {"factory": f"{USER}:nothing"}), "one number.*this is NoneType"),
        (("OfPictures", "dataclass", {"factory": "mse"}), "last element of a tuple"),
    ],
)
def test_a_loss_that_is_none_says_what_to_name(
    ranks: Ranks, spec: Spec, way: tuple[str, str, dict[str, Any] | None], message: str
) -> None:
    attempt = ranks.start(of(spec, *way), 1)
    assert attempt.ended() == [1]
    (failure,) = attempt.of_kind(0, RankFailed)
    assert "LossError: loss: " in failure.error
    with pytest.raises(ValueError, match=message):
        raise ValueError(failure.error)


def test_a_loss_is_called_with_output_and_batch() -> None:
    made = function("loss", Factory(factory="mse"), 2)
    assert made.__name__ == "mse"
    with pytest.raises(FactoryError, match=r"loss\.args: mse: .*; it takes nothing"):
        function("loss", Factory(factory="mse", args={"reduction": "sum"}), 2)
