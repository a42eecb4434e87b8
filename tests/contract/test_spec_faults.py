"""Every fault of a spec is told at once, in words for people, and with what was meant."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from services.contract.api import requests
from services.contract.api.access import TokenRequest
from services.contract.api.fault_words import FORMS
from services.contract.api.pointers import faults_of
from services.contract.api.spec_faults import hidden_faults
from services.contract.jobs.specs import JobSpec
from services.contract.jobs.traces import TraceRequest
from services.contract.words.error_values import did_you_mean
from services.contract.words.problems import MOST_FAULTS
from services.controller.domain.job.support import unsupported

GOOD: dict[str, Any] = {
    "name": "good",
    "model": {"factory": "decoder"},
    "data": {"factory": "stdlib_bytes"},
    "train": {"steps": 10, "global_batch": 8},
    "resources": {"ranks": 2},
}


def faults(spec: object) -> dict[str, str]:
    try:
        JobSpec.model_validate(spec)
        found = []
    except ValidationError as error:
        found = faults_of(error.errors(include_url=False), spec, JobSpec)
    return {each.pointer: each.detail for each in [*found, *hidden_faults(spec, found)]}


def test_faults_of_fields_hide_neither_unknown_built_ins_nor_batches_that_do_not_divide() -> None:
    spec = GOOD | {
        "name": "my job",
        "models": {},
        "model": {"factory": "decodr"},
        "train": {"steps": 0, "global_batch": 7},
        "optimizer": {"factory": "adamw", "args": {"lr": "fast", "weigt_decay": 0.1}},
        "priority": "high",
    }
    found = faults(spec)
    assert set(found) == {
        "/name",
        "/models",
        "/model/factory",
        "/train/steps",
        "/train/global_batch",
        "/optimizer/args/lr",
        "/optimizer/args/weigt_decay",
        "/priority",
    }
    assert found["/models"] == "there is no field 'models' here; did you mean 'model'?"
    assert "did you mean 'decoder'?" in found["/model/factory"]
    assert found["/train/steps"] == "must be at least 1, not 0"
    assert "7 does not divide by the 2 data-parallel ranks" in found["/train/global_batch"]
    assert found["/optimizer/args/lr"] == "must be a number, not 'fast'"
    assert "did you mean 'weight_decay'?" in found["/optimizer/args/weigt_decay"]
    assert found["/priority"] == "must be a whole number, not 'high'"
    assert found["/name"].startswith("must be 1 to 63 letters, digits")


@pytest.mark.parametrize(
    ("change", "pointer", "words"),
    [
        ({"train": {"step": 10}}, "/train/step", "did you mean 'steps'?"),
        ({"train": {"step": 10}}, "/train/steps", "this field is required"),
        ({"train": {"steps": 2.5}}, "/train/steps", "must be a whole number, not 2.5"),
        ({"train": 5}, "/train", "must be a mapping of names to values, not 5"),
        ({"train": {"steps": 1, "micro_batch": 0}}, "/train/micro_batch", "at least 1, not 0"),
        ({"checkpoint": {"mode": "asink"}}, "/checkpoint/mode", "did you mean 'async'?"),
        ({"resources": {"device": "gpu"}}, "/resources/device", "must be one of"),
        ({"resources": {"world": {"max": 4, "mim": 2}}}, "/resources/world/mim", "'min'"),
        ({"labels": {"a b": "c"}}, "/labels/a b", "must be 1 to 63 letters"),
        ({"model": {"factory": "a:b:c"}}, "/model/factory", "package.module:callable"),
        ({"model": None}, "/model", "this field is required"),
        ({"mesh": {"dp_shard": 3}}, "/mesh", "but resources.ranks is 2"),
        ({"code": "sha256:x"}, "/code", "the digest of uploaded code"),
        ({"optimizer": {"factory": "adamw", "lr": 1}}, "/optimizer/lr", "there is no field 'lr'"),
    ],
)
def test_a_fault_says_what_must_be_there_and_what_is(
    change: dict[str, Any], pointer: str, words: str
) -> None:
    found = faults(GOOD | change)
    assert words in found[pointer], found


@pytest.mark.parametrize(
    ("change", "pointers"),
    [
        ({}, set()),
        # What the mesh is for is not known while the number of ranks is wrong: nothing is said of it.
        ({"resources": {"ranks": "two"}, "mesh": {"dp_shard": 4}}, {"/resources/ranks"}),
        ({"train": {"steps": 1, "global_batch": "x"}}, {"/train/global_batch"}),
        ({"mesh": {"dp_shard": 4}, "train": {"steps": 1, "global_batch": 3}}, {"/mesh", "/train/global_batch"}),
        ({"plan_id": "x"}, {"/plan_id"}),
    ],
)  # fmt: skip
def test_no_fault_is_told_that_there_is_not(change: dict[str, Any], pointers: set[str]) -> None:
    assert set(faults(GOOD | change)) == pointers


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": {"wandb": {"api_key": "abcdefgh"}}},
        {"metrics": {"mlflow": {"password": "abcdefgh", "trackin_uri": "x"}}},
        {"priority": "hf_abcdefghabcdefgh"},
        {"optimizer": {"factory": "adamw", "args": {"api_token": "abcdefgh"}}},
    ],
)
def test_what_may_be_a_credential_is_not_shown(change: dict[str, Any]) -> None:
    found = faults(GOOD | change)
    assert found
    assert "abcdefgh" not in str(found.values())


@pytest.mark.parametrize("spec", [None, [], "text", {"train": []}, {"": {"": 1}}, {"model": []}])
def test_whatever_comes_is_judged(spec: object) -> None:
    assert faults(spec)


def test_every_pattern_has_words() -> None:
    models: list[type[BaseModel]] = [JobSpec, TokenRequest, TraceRequest]
    models += [requests.JobPatch, requests.CloneRequest]
    patterns = {found for model in models for found in _patterns(model.model_json_schema())}
    assert len(patterns) > 6
    assert patterns <= set(FORMS)


def _patterns(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        names = schema.get("patternProperties", {})
        yield from names
        for each in schema.values():
            yield from _patterns(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _patterns(each)


def test_of_ever_so_many_arguments_that_a_built_in_lacks_only_those_that_are_listed_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def counted(word: str, known: Iterable[str]) -> str:
        asked.append(word)
        return did_you_mean(word, known)

    monkeypatch.setattr("services.contract.jobs.built_ins.did_you_mean", counted)
    body = {
        "model": {"factory": "decoder", "args": {f"a{number}": 0 for number in range(4_000)}},
        "data": {"factory": "stdlib_bytes"},
        "train": {"steps": 1},
    }
    faults = [*unsupported(JobSpec.model_validate(body)), *hidden_faults(body, ())]
    assert faults[-1].code == "more_faults"
    assert len(asked) < 3 * MOST_FAULTS


class ComparedName(str):
    """A field's name that counts how often such names are compared."""

    __slots__ = ()
    __hash__ = str.__hash__
    times = 0

    def __eq__(self, other: object) -> bool:
        ComparedName.times += 1
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def test_ever_so_many_wrong_fields_of_the_loop_are_not_all_looked_through_for_each_of_them() -> (
    None
):
    fields: dict[str, int] = {ComparedName(f"k{number}"): 0 for number in range(20_000)}
    spec = GOOD | {"train": {"steps": 10, **fields}}
    before = ComparedName.times
    assert "/train/k0" in faults(spec)
    assert ComparedName.times - before < 3 * len(fields)
    assert len(spec["train"]) == 1 + len(fields)
