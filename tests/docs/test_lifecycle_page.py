"""The page on a job's life says what the table of states says.

Regenerate it with ``python -m tests.docs.test_lifecycle_page``.
"""

from pathlib import Path

from services.controller.domain.job.lifecycle import EDGES
from services.controller.domain.job.lifecycle_page import lifecycle_page

PAGE = Path(__file__).parents[2] / "docs/lifecycle.md"


def test_the_page_on_a_jobs_life_is_the_one_that_the_table_makes() -> None:
    assert PAGE.read_text() == lifecycle_page(), (
        "the table of states changed; run `python -m tests.docs.test_lifecycle_page`"
    )


def test_no_move_is_told_twice_and_each_has_its_cause() -> None:
    pairs = [(edge.source, edge.target) for edge in EDGES]
    assert len(pairs) == len(set(pairs))
    assert all(edge.cause for edge in EDGES)


if __name__ == "__main__":
    PAGE.write_text(lifecycle_page())
