"""The linters of words: that they read our lists, and refuse what the lists forbid.

That the tree passes is checked by ``make lint``.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.prefix) / "bin"


def lint(*command: str | Path) -> tuple[int, str]:
    """The exit code and the output of a linter, started where ``make lint`` starts it."""
    name, *rest = command
    done = subprocess.run(
        [BIN / name, *rest], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("page.md", "The leader reigns anew.", ["`reigns` should be `terms`", "`again`"]),
        ("module.py", "def heed_all(recieved): ...", ["`heed` should be `handle`", "`received`"]),
        ("page.md", "Whoever waits is told.", ["`Whoever` should be", "`told` should be"]),
        ("page.tsx", "<p>A node that shall compute</p>", ["`shall` should be `must`"]),
    ],
)
def test_a_banned_or_misspelled_word_is_refused(
    tmp_path: Path, name: str, text: str, words: list[str]
) -> None:
    (tmp_path / name).write_text(f"{text}\n")
    code, output = lint("typos", "--config", ROOT / "_typos.toml", tmp_path / name)
    assert code == 2
    for word in words:
        assert word in output


def test_what_the_lists_allow_passes(tmp_path: Path) -> None:
    page = tmp_path / "module.py"
    page.write_text("foreseen_s = convnet(slicings)  # whoever is told\n")
    assert lint("typos", "--config", ROOT / "_typos.toml", page) == (0, "")


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("It will be kept for ever.", "archaism"),
        ("At the end of the day it is a paradigm shift.", "cliches"),
        ("This plan is very unique.", "uncomparables"),
    ],
)
def test_a_page_with_a_cliche_is_refused(tmp_path: Path, text: str, check: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n")
    code, output = lint("proselint", "--output-format", "compact", "check", page)
    assert code == 1
    assert check in output


def test_typography_and_tables_are_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('| 2 x 2 | "straight" | 1  1 |\n')
    assert lint("proselint", "--output-format", "compact", "check", page)[0] == 0
