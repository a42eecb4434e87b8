"""The page on changes lists the files that its examples are really in."""

import re
from pathlib import Path
from typing import Final, NamedTuple

import pytest

_ROOT: Final = Path(__file__).parents[2]
_PAGE: Final = (_ROOT / "docs/changing.md").read_text(encoding="utf-8")
# Written by a command, or what people may add for the example beside it.
_APART: Final = ("services/controller/dashboard/", "services/cli/")


class Way(NamedTuple):
    """One section: its example as a pattern, how many files it may be in, and the listed ones."""

    title: str
    example: str
    most: int
    files: frozenset[str]


def _ways() -> list[Way]:
    ways = []
    for section in _PAGE.split("\n## ")[1:]:
        told = re.search(r"^Example: `(.+)`, at most (\d+) files\.$", section, re.MULTILINE)
        assert told is not None, section
        files = frozenset(re.findall(r"^\| `(\S+)` \|", section, re.MULTILINE))
        ways.append(Way(section.partition("\n")[0], told[1], int(told[2]), files))
    return ways


@pytest.mark.parametrize("way", _ways(), ids=lambda way: way.title)
def test_an_example_is_in_the_files_that_are_listed_and_in_no_other(way: Way) -> None:
    pattern = re.compile(rf"\b(?:{way.example})\b")
    found = {
        name
        for package in ("services", "meshloom", "fsdp_core")
        for path in (_ROOT / package).rglob("*.py")
        if not (name := str(path.relative_to(_ROOT))).startswith(_APART)
        and pattern.search(path.read_text(encoding="utf-8"))
    }
    assert found == way.files
    assert len(found) <= way.most


def test_every_file_folder_and_symbol_that_the_page_names_is_there() -> None:
    roots = [_ROOT, _ROOT / "docs", _ROOT / "tests/controller"]
    roots += [_ROOT / "services/controller", _ROOT / "services/worker"]
    roots += [_ROOT / "services/controller/domain/decisions", _ROOT / "services/cli"]
    named = re.findall(r"`([\w/-]+\.(?:py|md))`|\]\(([\w-]+\.md)\)|`(\w+/\w+)`", _PAGE)
    assert len(named) > 20
    missing = [name for names in named if (name := "".join(names)) and not _is_in(roots, name)]
    assert not missing


def _is_in(roots: list[Path], name: str) -> bool:
    return any((root / name).exists() for root in roots)
