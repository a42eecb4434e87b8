"""Ranks train on batches of any nesting, by the loss that the model, the spec or the user has."""

from collections.abc import Callable
from typing import Any

import pytest

from services.contract.messages.rank_pipe import RankEvaluated, RankFailed, RankVote
from services.contract.specs import Factory, JobSpec
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
