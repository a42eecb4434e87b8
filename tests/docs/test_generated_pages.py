"""Pages that are made from the code are as new as the code."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.contract.jobs.specs import JobSpec
from services.controller.domain.job.lifecycle import EDGES
from tests.docs.generated_pages import DOCS, PAGES, READERS


@pytest.mark.parametrize(
    ("page", "made"), PAGES.items(), ids=[str(page.relative_to(DOCS)) for page in PAGES]
)
def test_a_page_is_the_one_that_the_code_makes(page: Path, made: Callable[[], str]) -> None:
    assert page.read_text(encoding="utf-8") == made(), (
        "the code changed; run `python -m tests.docs.generated_pages`"
    )


def test_every_field_of_a_spec_and_every_setting_is_described() -> None:
    schema = JobSpec.model_json_schema()
    bare = [
        f"{part}.{name}"
        for part, fields in {"JobSpec": schema, **schema["$defs"]}.items()
        for name, field in fields.get("properties", {}).items()
        if "description" not in field
    ]
    bare += [
        f"{reader}: {name}"
        for reader, settings in READERS
        for name, field in settings.model_fields.items()
        if not field.description
    ]
    assert not bare


def test_no_move_is_told_twice_and_each_has_its_cause() -> None:
    pairs = [(edge.source, edge.target) for edge in EDGES]
    assert len(pairs) == len(set(pairs))
    assert all(edge.cause for edge in EDGES)
