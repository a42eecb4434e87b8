"""A spec is judged whole, and every fault is named."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.contract.jobs.specs import JobSpec
from services.contract.words.ids import checkpoint_id, job_of_checkpoint, new_job_id

SPEC: dict[str, Any] = {
    "model": {"factory": "decoder"},
    "data": {"factory": "stdlib_bytes"},
    "train": {"steps": 10},
}


def test_model_data_and_steps_are_enough() -> None:
    spec = JobSpec.model_validate(SPEC)
    assert spec.resources.ranks == 1
    assert spec.mesh == "auto"
    assert spec.checkpoint.keep_last == 2


def test_all_faults_are_named_at_once() -> None:
    faulty = {
        **SPEC,
        "train": {"steps": 0, "clip_norm": -1},
        "resources": {"ranks": 0},
        "colour": "red",
    }
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(faulty)
    places = {".".join(map(str, error["loc"])) for error in caught.value.errors()}
    assert places == {"train.steps", "train.clip_norm", "resources.ranks", "colour"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mesh": {"dp_shard": 3}, "resources": {"ranks": 2}}, "3 ranks, but resources.ranks is 2"),
        ({"train": {"steps": 1, "global_batch": 7}, "resources": {"ranks": 2}}, "nearest"),
        ({"train": {"steps": 1, "global_batch": 8, "micro_batch": 3}}, "does not divide"),
        ({"train": {"steps": float("nan")}}, "steps"),
        ({"model": {"factory": "os.system; rm"}}, "factory"),
        ({"name": "../../etc"}, "name"),
        ({"faults": {"on_replica_loss": "continue"}}, "mesh.dp_replicate to 2 or more"),
        (
            {"faults": {"on_replica_loss": "continue"}, "mesh": {"dp_shard": 1}},
            "mesh.dp_replicate to 2 or more",
        ),
        (
            {
                "faults": {"on_replica_loss": "continue"},
                "entrypoint": {"script": "train.py"},
                "model": None,
                "data": None,
                "train": {"steps": 1},
            },
            "not possible with an entrypoint",
        ),
        (
            {
                "faults": {"on_replica_loss": "continue"},
                "resources": {"world": {"max": 4}},
                "mesh": {"dp_shard": 2},
            },
            "not possible with resources.world",
        ),
    ],
)
def test_a_contradiction_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        JobSpec.model_validate({**SPEC, **change})


def test_an_elastic_job_names_the_worlds_that_share_its_batch_out() -> None:
    def worlds(world: dict[str, int], **changes: object) -> tuple[int, ...]:
        spec = JobSpec.model_validate({**SPEC, "resources": {"world": world}, **changes})
        return tuple(spec.worlds)

    assert worlds({"min": 2, "max": 8}) == (2, 4, 8)
    assert worlds({"max": 9}, train={"steps": 1, "global_batch": 12}) == (1, 2, 3, 4, 6)
    micro = {"steps": 1, "global_batch": 12, "micro_batch": 2}
    assert worlds({"max": 9}, train=micro) == (1, 2, 3, 6)
    # Copies of the parameters are never parted, and ranks of one tp group see the same batch.
    assert worlds({"max": 16}, mesh={"dp_shard": 2, "tp": 2}) == (4, 8, 16)
    assert worlds({"min": 3, "max": 65_536}, mesh={"tp": 2})[-1] == 64
    assert JobSpec.model_validate({**SPEC, "resources": {"ranks": 2}}).worlds == (2,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"resources": {"world": {"min": 5, "max": 7}}}, r"possible are 1, 2, 4, 8, 16, 32"),
        (
            {
                "resources": {"world": {"max": 8}},
                "mesh": {"dp_shard": 3},
                "train": {"steps": 1, "micro_batch": 3},
            },
            "no number is possible",
        ),
        ({"resources": {"world": {"min": 3, "max": 2}}}, "min: 3 is more than max"),
        ({"resources": {"world": {"max": 2}, "ranks": 2}}, "give one of them"),
        ({"resources": {"world": {"max": 4}}, "mesh": {"dp_replicate": 2}}, "leave it out"),
        ({"resources": {"world": {"min": "few", "max": 4}}}, "valid integer"),
    ],
)
def test_bounds_that_no_number_of_ranks_fits_are_refused(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        JobSpec.model_validate({**SPEC, **change})


def test_a_spec_travels_with_ranks_or_bounds_never_with_both() -> None:
    fixed = JobSpec.model_validate(SPEC)
    assert '"resources":{"ranks":1,"device":"auto"}' in fixed.model_dump_json()
    elastic = JobSpec.model_validate({**SPEC, "resources": {"world": {"min": 2, "max": 4}}})
    assert elastic.resources.ranks == 2
    written = elastic.model_dump(mode="json")
    assert written["resources"] == {"device": "auto", "world": {"min": 2, "max": 4}}
    assert JobSpec.model_validate(written) == elastic
    assert JobSpec.model_validate_json(elastic.model_dump_json(exclude_unset=True)) == elastic


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("change", "place", "code"),
    [
        (
            {"model": {"factory": "m", "args": nested(33)}},
            ("model", "args", "a"),
            "nested_too_deep",
        ),
        ({"plan": nested(5000)}, ("plan", "a"), "nested_too_deep"),
        (
            {"data": {"factory": "d", "args": {"x": [0, 1 << 63]}}},
            ("data", "args", "x", 1),
            "int_beyond_64_bits",
        ),
        ({"plan": {"units": -(10**400)}}, ("plan", "units"), "int_beyond_64_bits"),
        ({"train": {"steps": 1, "global_batch": 10**400 + 1}}, ("train", "global_batch"), "less_"),
        ({"checkpoint": {"keep_last": 10**400}}, ("checkpoint", "keep_last"), "less_"),
        ({"checkpoint": {"every_steps": 10**400}}, ("checkpoint", "every_steps"), "less_"),
        ({"faults": {"max_restarts": 10**400}}, ("faults", "max_restarts"), "less_"),
        ({"faults": {"hang_timeout_s": 0}}, ("faults", "hang_timeout_s"), "greater_"),
        ({"mesh": {"dp_shard": 10**400}}, ("mesh", "dp_shard"), "less_"),
        ({"model": {"factory": "m", "args": {"x": "\ud800" * 30_000}}}, (), "spec_too_large"),
        (
            {"model": {"factory": "m", "args": {"x": [0] * 70_000}}},
            ("model", "args"),
            "too_many_values",
        ),
    ],
)
def test_what_no_reader_could_bear_is_refused_at_its_place(
    change: dict[str, Any], place: tuple[str | int, ...], code: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate({**SPEC, **change})
    first = caught.value.errors()[0]
    assert tuple(part for part in first["loc"] if part in place) == place
    assert first["type"].startswith(code)


def test_the_deepest_spec_that_is_taken_can_be_read_back() -> None:
    deepest = {"factory": "m", "args": nested(32)}
    spec = JobSpec.model_validate({**SPEC, "model": deepest, "plan": nested(32)})
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@given(
    st.integers(0, (1 << 48) - 1),
    st.integers(0, (1 << 48) - 1),
    st.binary(min_size=10, max_size=10),
)
def test_job_ids_sort_by_time(first_ms: int, second_ms: int, randomness: bytes) -> None:
    first, second = new_job_id(first_ms, randomness), new_job_id(second_ms, randomness)
    assert (first < second) == (first_ms < second_ms)


@given(st.integers(0, 999_999_999), st.integers(0, 999_999_999), st.integers(1, 9999))
def test_checkpoint_ids_sort_by_step_and_name_their_job(one: int, other: int, fence: int) -> None:
    job = new_job_id(1_700_000_000_000, bytes(10))
    a, b = checkpoint_id(job, one, fence), checkpoint_id(job, other, fence)
    assert (a < b) == (one < other)
    assert job_of_checkpoint(a) == job


def test_a_job_names_a_model_or_a_trainable() -> None:
    trainable = {"factory": "mine.gan:Gan"}
    spec = JobSpec.model_validate({"trainable": trainable, "train": {"steps": 1}})
    assert (spec.model, spec.data) == (None, None)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    with_data = JobSpec.model_validate({**SPEC, "model": None, "trainable": trainable})
    assert with_data.data is not None


@pytest.mark.parametrize(
    ("change", "place", "kind"),
    [
        ({"model": None}, "model", "missing"),
        ({"data": None}, "data", "missing"),
        ({"trainable": {"factory": "mine.gan:Gan"}}, "model", "one_of_both"),
        (
            {"trainable": {"factory": "no good"}, "model": None},
            "trainable",
            "string_pattern_mismatch",
        ),
    ],
)
def test_a_job_without_a_model_or_with_two_is_refused_at_its_place(
    change: dict[str, Any], place: str, kind: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        JobSpec.model_validate({**SPEC, **change})
    found = {(str(error["loc"][0]), error["type"]) for error in refused.value.errors()}
    assert found == {(place, kind)}


def test_a_group_of_parameters_has_options_in_plain_json() -> None:
    groups = [{"match": "*.bias", "weight_decay": 0.0, "betas": [0.9, 0.99]}]
    spec = JobSpec.model_validate({**SPEC, "optimizer": {"factory": "adamw", "groups": groups}})
    assert spec.model_dump(mode="json")["optimizer"]["groups"] == groups
    assert spec.optimizer.groups[0].options == {"weight_decay": 0.0, "betas": [0.9, 0.99]}
    deep: Any = 0
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ValidationError, match="nested deeper"):
        JobSpec.model_validate(
            {**SPEC, "optimizer": {"factory": "adamw", "groups": [{"match": "*", "lr": deep}]}}
        )
