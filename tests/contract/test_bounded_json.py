"""Free-form JSON of a spec: what is within its bounds, and how that is found."""

import json
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, BeforeValidator, ValidationError

from services.contract.jobs import bounded_json
from services.contract.jobs.bounded_json import JUDGED, MAX_DEPTH, bounded
from services.contract.jobs.specs import MAX_SPEC_BYTES, JobSpec

INT_END = bounded_json.INT_END
ALIAS = [0] * 60_000
TRAIN = {"train": {"steps": 3}}


class Free(BaseModel):
    value: Annotated[Any, BeforeValidator(bounded)]


def nested(levels: int, within: Any) -> Any:  # noqa: ANN401 any JSON
    for level in range(levels):
        within = [within] if level % 2 else {"a": within}
    return within


@pytest.mark.parametrize(
    "value",
    [
        *({}, [], None, "text", 1.5, True, INT_END - 1, -INT_END, [0] * 65_535),
        *(nested(MAX_DEPTH, 0), nested(MAX_DEPTH - 1, []), nested(9, {"a": (1, [2]), "b": {}})),
        {"pairs": [[number] for number in range(12_500)]},
    ],
)
def test_what_is_sound_is_found_to_be_so_without_the_places_of_its_values(
    monkeypatch: pytest.MonkeyPatch,
    value: Any,  # noqa: ANN401 any JSON
) -> None:
    """With them each record with a spec of 64 KiB takes nearly half as long again to be read."""
    assert list(bounded_json._faults(value)) == []
    monkeypatch.delattr(bounded_json, "_faults")
    assert Free.model_validate({"value": value}).value is value


@pytest.mark.parametrize(
    ("value", "code"),
    [
        *(
            (nested(MAX_DEPTH, []), "nested_too_deep"),
            (nested(MAX_DEPTH + 3, 0), "nested_too_deep"),
        ),
        *(([0] * 65_536, "too_many_values"), ([ALIAS] * 60_000, "too_many_values")),
        *((nested(9, INT_END), "int_beyond_64_bits"), ([-INT_END - 1], "int_beyond_64_bits")),
    ],
)
def test_each_fault_is_told(value: object, code: str) -> None:
    with pytest.raises(ValidationError) as told:
        Free(value=value)
    assert {fault["type"] for fault in told.value.errors()} == {code}


def test_what_was_judged_when_it_was_written_is_not_judged_again() -> None:
    """Most of the time that a stored spec of 64 KiB takes to be read."""
    args = {"deep": nested(MAX_DEPTH, []), "long": "x" * MAX_SPEC_BYTES}
    text = json.dumps(
        {"model": {"factory": "m:n", "args": args}, "data": {"factory": "m:d"}} | TRAIN
    )
    with pytest.raises(ValidationError, match="nested_too_deep"):
        JobSpec.model_validate_json(text)
    spec = JobSpec.model_validate_json(text, context=JUDGED)
    assert spec.model is not None
    assert spec.model.args == args
