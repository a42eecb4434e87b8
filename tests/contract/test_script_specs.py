"""A spec of a script: what it may leave out, and what it may not say."""

import sys
from typing import Any

import pytest
from pydantic import ValidationError

from services.contract.api.pointers import pointer_of
from services.contract.jobs.entry_points import entry_points, factories_of
from services.contract.jobs.specs import JobSpec
from services.contract.messages.commands import LaunchGang
from tests.contract.test_versions import of_yesterday

SCRIPT: dict[str, Any] = {"entrypoint": {"script": "runs/train.py", "args": ["--lr", "1e-3"]}}


def faults(spec: dict[str, Any]) -> dict[str, str]:
    """By pointer."""
    with pytest.raises(ValidationError) as refused:
        JobSpec.model_validate(spec)
    return {pointer_of(fault["loc"]): fault["msg"] for fault in refused.value.errors()}


def test_a_script_needs_no_model_no_data_and_no_steps() -> None:
    spec = JobSpec.model_validate(SCRIPT)
    assert (spec.steps, spec.leaves_layout_open, spec.worlds) == (None, False, (1,))
    assert list(factories_of(spec)) == []
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert JobSpec.model_validate(SCRIPT | {"train": {"steps": 7}}).steps == 7
    elastic = {"resources": {"world": {"min": 2, "max": 7}}, "mesh": {"tp": 2}}
    assert list(JobSpec.model_validate(SCRIPT | elastic).worlds) == [2, 4, 6]


def test_the_numbers_of_ranks_of_a_script_take_no_room_however_many_there_are() -> None:
    """A thousand such answers are kept: written out, they had two gigabytes."""
    world = {"resources": {"world": {"min": 1, "max": 65_536}}}
    worlds = JobSpec.model_validate(SCRIPT | world).worlds
    assert (len(worlds), worlds[0], worlds[-1]) == (65_536, 1, 65_536)
    assert sys.getsizeof(worlds) < 200


def test_what_only_our_loop_reads_is_refused_by_its_name() -> None:
    loops = {
        "model": {"factory": "decoder"},
        "data": {"factory": "stdlib_bytes"},
        "loss": {"factory": "mse"},
        "optimizer": {"factory": "sgd"},
        "schedule": {"factory": "warmup_cosine"},
        "plan": {"units": []},
        "evaluation": {"metrics": {"factory": "accuracy"}},
        "train": {"steps": 5, "global_batch": 64, "seed": 1, "clip_norm": None},
    }
    found = faults(SCRIPT | loops)
    assert found.keys() == {
        *(f"/{name}" for name in loops if name != "train"),
        "/train/global_batch",
        "/train/seed",
        "/train/clip_norm",
    }
    assert (
        found["/loss"] == "loss is read only by Meshloom's loop; a script does this itself: leave "
        "it out"
    )


@pytest.mark.parametrize(
    "script",
    ["../train.py", "/etc/train.py", "a/../../train.py", "train", ".hidden/train.py", "a//b.py"],
)
def test_a_script_is_a_path_that_leads_nowhere_else(script: str) -> None:
    assert faults({"entrypoint": {"script": script}}).keys() == {"/entrypoint/script"}


def test_an_entry_point_is_a_script_or_a_module_and_without_one_a_model_is_needed() -> None:
    assert "give either script" in faults({"entrypoint": {}})["/entrypoint"]
    both = {"entrypoint": {"script": "a.py", "module": "a"}}
    assert "give either script" in faults(both)["/entrypoint"]
    assert faults({"train": {"steps": 1}}).keys() == {"/model", "/data"}


@pytest.mark.parametrize(
    ("entrypoint", "allowed"),
    [
        ({"script": "runs/train.py"}, True),
        ({"script": "runs/deep/train.py"}, True),
        ({"module": "runs.train"}, True),
        ({"script": "runs.py"}, True),
        ({"script": "runs2/train.py"}, False),
        ({"script": "runs.d/train.py"}, False),
        ({"module": "runs2.train"}, False),
    ],
)
def test_a_script_is_allowed_by_the_parts_of_its_path(
    entrypoint: dict[str, str], *, allowed: bool
) -> None:
    spec = JobSpec.model_validate({"entrypoint": entrypoint})
    assert entry_points(["runs"], otherwise_any=False).allows_script_of(spec) is allowed
    assert not entry_points(None, otherwise_any=False).allows_script_of(spec)
    assert entry_points(None, otherwise_any=True).allows_script_of(spec)


def test_an_agent_that_knows_no_scripts_refuses_one() -> None:
    said = JobSpec.model_validate(SCRIPT).model_dump(mode="json")
    renamed = {"of_tomorrow" if name == "entrypoint" else name: v for name, v in said.items()}
    with pytest.raises(ValidationError) as refused:
        LaunchGang.model_validate(of_yesterday(LaunchGang) | {"spec": renamed})
    assert {fault["loc"][-1] for fault in refused.value.errors()} <= {
        "model",
        "data",
        "of_tomorrow",
    }
