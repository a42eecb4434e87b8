"""The contract that landed last, as that version recorded it, against this one: each reads the other.

``landed_contract.json`` is written by ``python -m tests.contract.record_contract`` of the version that is
being replaced.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped] # it has no stubs

from services.contract.messages.base import Message, OfAttempt
from services.contract.messages.commands import Command
from tests.contract.record_contract import contract
from tests.contract.test_versions import SPOKEN

LANDED: Final[Mapping[str, Any]] = json.loads(
    (Path(__file__).parent / "landed_contract.json").read_text()
)
KINDS: Final[Mapping[str, type[Message]]] = {kind.__name__: kind for kind in SPOKEN}
# Nobody waits for an answer: that an agent of the landed version cannot read it holds up no job.
# What one does not load beforehand it loads as it launches.
UNANSWERED: Final = {"LoadCheckpoint"}


@pytest.mark.parametrize("name", LANDED)
def test_what_the_landed_version_says_is_read_here_and_nothing_of_it_is_lost(name: str) -> None:
    said = LANDED[name]["message"]
    read = KINDS[name].model_validate_json(json.dumps(said))
    assert_holds(json.loads(read.model_dump_json()), said)


@pytest.mark.parametrize("name", sorted(set(LANDED) & set(KINDS)))
def test_what_is_said_here_is_read_by_the_landed_version(name: str) -> None:
    validator = Draft202012Validator(LANDED[name]["schema"])
    said = contract()[name]["message"]
    faults = [f"{fault.json_path}: {fault.message}" for fault in validator.iter_errors(said)]
    assert faults == []


def test_a_command_that_the_landed_version_does_not_know_is_waited_for_by_nobody() -> None:
    commands = {kind.__name__ for kind in get_args(get_args(Command)[0])}
    assert commands - set(LANDED) <= UNANSWERED
    assert all(issubclass(KINDS[name], OfAttempt) for name in UNANSWERED)


def assert_holds(here: object, said: object, where: str = "") -> None:
    """Whether all that was said is here, too; what this version adds beside it is its own."""
    if isinstance(said, dict):
        assert isinstance(here, dict), where
        for name, value in said.items():
            assert name in here, f"{where}/{name}"
            assert_holds(here[name], value, f"{where}/{name}")
    elif isinstance(said, list):
        assert isinstance(here, list), where
        assert len(here) == len(said), where
        for place, value in enumerate(said):
            assert_holds(here[place], value, f"{where}/{place}")
    else:
        assert here == said, where
