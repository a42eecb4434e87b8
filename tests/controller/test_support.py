"""What a spec can say and this version cannot do."""

from typing import Any

import pytest

from services.contract.jobs.specs import JobSpec
from services.controller.domain.job.support import unsupported
from services.controller.domain.plans import default_plan

SPEC: dict[str, Any] = {
    "model": {"factory": "decoder"},
    "data": {"factory": "stdlib_bytes"},
    "train": {"steps": 1, "global_batch": 4},
}


@pytest.mark.parametrize(
    ("change", "pointer", "words"),
    [
        ({"optimizer": {"factory": "moun"}}, "/optimizer/factory", "adamw, muon, sgd"),
        (
            {"model": None, "trainable": {"factory": "gan"}},
            "/trainable/factory",
            "no built-in 'gan'; write package",
        ),
        (
            {"evaluation": {"metrics": {"factory": "f1"}}},
            "/evaluation/metrics/factory",
            "evaluation.metrics.factory: there is no built-in 'f1'; choose one of accuracy",
        ),
        (
            {
                "optimizer": {"factory": "muon"},
                "mesh": {"tp": 2},
                "resources": {"ranks": 2},
            },
            "/mesh/tp",
            "muon needs whole matrices",
        ),
    ],
)
def test_it_is_refused_at_its_place(change: dict[str, Any], pointer: str, words: str) -> None:
    (fault,) = unsupported(JobSpec.model_validate({**SPEC, **change}))
    assert fault.pointer == pointer
    assert words in fault.detail


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": {"factory": "torch.optim.Adam"}},
        {"optimizer": {"factory": "torch.optim:Adam"}},
        {"model": None, "trainable": {"factory": "mine.gan:Gan"}, "data": None},
        {"train": {"steps": 1, "precision": {"params": "fp16", "reduce": "fp16"}}},
    ],
)
def test_what_it_can_do_is_taken(change: dict[str, Any]) -> None:
    assert unsupported(JobSpec.model_validate({**SPEC, **change})) == []


def test_no_search_splits_what_muon_takes_whole() -> None:
    assert default_plan.splits_of(JobSpec.model_validate(SPEC))
    assert not default_plan.splits_of(
        JobSpec.model_validate({**SPEC, "optimizer": {"factory": "muon"}})
    )


def test_a_trainable_has_no_units_that_are_known_before() -> None:
    spec = JobSpec.model_validate(
        {"trainable": {"factory": "mine.gan:Gan"}, "train": {"steps": 1}, "plan": "default"}
    )
    assert default_plan.shard(spec).units == ()
