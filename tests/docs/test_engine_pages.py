"""The pages about the engine run: their snippets print what they say, their names exist.

A page with Python declares its ranks, `<!-- runs on 2 ranks -->`. Its ```python blocks run one
after the other in one namespace, in each of that many ranks, whose process group is there. A
```text block right behind one is what rank 0 prints.
"""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.gang import Gangs, RankContext

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "engine").glob("*.md"))

BLOCK = re.compile(
    r"^```python\n(.*?)^```\n(?:\n*^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL
)
RANKS = re.compile(r"<!-- runs on (\d+) ranks? -->")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
NAMED_TEST = re.compile(r"`(test_\w+)`")
NAMED_PATH = re.compile(r"`((?:fsdp_core|tests|docs)/[\w/.]*)`")


@dataclass(frozen=True)
class Snippet:
    """One block of a page.

    Attributes:
        line: Of the page, where it begins.
        source: Python.
        printed: What the page says it prints; None: the page does not say.
    """

    line: int
    source: str
    printed: str | None


def snippets_of(page: Path) -> list[Snippet]:
    text = page.read_text()
    return [
        Snippet(text.count("\n", 0, found.start(1)), found[1], found[2])
        for found in BLOCK.finditer(text)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("page", [p for p in PAGES if snippets_of(p)], ids=lambda page: page.stem)
def test_every_snippet_runs_and_prints_what_the_page_says(gangs: Gangs, page: Path) -> None:
    ranks = RANKS.search(page.read_text())
    assert ranks is not None, f"{page.name} does not declare on how many ranks it runs"
    printed = gangs(int(ranks[1])).run(run_page, str(page))[0]
    for snippet, output in zip(snippets_of(page), printed, strict=True):
        if snippet.printed is not None:
            assert output == snippet.printed, f"{page.name}:{snippet.line}"


def run_page(_: RankContext, page: str) -> list[str]:
    """What each snippet printed."""
    # Dataclasses look their module up by this name.
    namespace: dict[str, object] = {"__name__": "__main__"}
    outputs = []
    for snippet in snippets_of(Path(page)):
        at_its_line = "\n" * snippet.line + snippet.source
        with redirect_stdout(io.StringIO()) as output:
            exec(compile(at_its_line, page, "exec"), namespace)  # noqa: S102 - our own pages
        outputs.append(output.getvalue())
    return outputs


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for target in LINK.findall(page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_test_and_path_that_a_page_names_exists() -> None:
    known = set[str]()
    for path in (ROOT / "tests").rglob("test_*.py"):
        known |= {path.stem, *re.findall(r"def (test_\w+)", path.read_text())}
    for page in PAGES:
        text = page.read_text()
        assert set(NAMED_TEST.findall(text)) <= known, page.name
        missing = [path for path in NAMED_PATH.findall(text) if not (ROOT / path).exists()]
        assert not missing, page.name


def test_every_page_is_in_the_index() -> None:
    index = set(LINK.findall((ROOT / "docs" / "engine" / "README.md").read_text()))
    assert {page.name for page in PAGES if page.name != "README.md"} <= index
