"""The site of the documentation: it builds without a warning, and pages name what there is."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from services.contract.words.states import ExitReason, FailureClass
from tests.docs.generated_pages import DOCS

ROOT: Final = DOCS.parent


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        # It would print an advertisement of its successor.
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # noqa: TID251 (a child's environment)
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    for page in ("index", "getting-started/index", "reference/job-spec/index", "adr/index"):
        assert (tmp_path / f"{page}.html").stat().st_size > 0


def test_troubleshooting_has_every_exit_reason_and_failure_class() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    by_reason, _, by_class = text.partition("## By failure class")
    named = re.compile(r"`([a-z_]+)`")
    first_cells = [
        re.findall(r"^\| (`[^|]*`) \|", part, re.MULTILINE) for part in (by_reason, by_class)
    ]
    reasons, classes = ({n for cell in cells for n in named.findall(cell)} for cells in first_cells)
    assert reasons == {reason.value for reason in ExitReason}
    assert classes == {kind.value for kind in FailureClass}


def test_every_test_that_a_page_names_exists() -> None:
    written = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    files = {path.name for path in (ROOT / "tests").rglob("test_*")}
    known = files | set(re.findall(r"\b(?:def|async def) (test_\w+)", written))
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        named = set(re.findall(r"\btest_\w+(?:\.py)?", page.read_text(encoding="utf-8")))
        assert named <= known | {name.removesuffix(".py") for name in files}, page


def test_every_decision_is_listed() -> None:
    listed = re.findall(r"\]\((0\S+\.md)\)", (DOCS / "adr/README.md").read_text(encoding="utf-8"))
    assert listed == sorted(page.name for page in (DOCS / "adr").glob("0*.md"))
