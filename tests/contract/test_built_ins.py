"""The names that the controller accepts are those that the ranks know."""

from services.contract.jobs.built_ins import BUILT_IN_NAMES
from services.worker.rank import registry


def test_the_ranks_know_exactly_the_names_that_are_promised() -> None:
    assert {field: frozenset(made) for field, made in registry.BUILT_INS.items()} == dict(
        BUILT_IN_NAMES
    )
