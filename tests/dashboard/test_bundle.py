"""The committed bundle is what the sources build to, and it stays on its origin."""

import re
import subprocess
from pathlib import Path
from typing import Final

from tests.dashboard.conftest import DASHBOARD

_BUNDLE: Final = DASHBOARD / "bundle"


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _run(*command: str, folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


def test_the_sources_pass_the_strict_type_check(installed: Path) -> None:
    _run("npm", "run", "check", folder=installed)


def test_a_rebuild_gives_the_committed_bundle_byte_for_byte(installed: Path) -> None:
    _run("npm", "run", "build", folder=installed)
    assert _contents(installed / "bundle") == _contents(_BUNDLE)


def test_the_page_loads_nothing_from_another_origin_and_runs_nothing_inline() -> None:
    page = (_BUNDLE / "index.html").read_text(encoding="utf-8")
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(addresses) >= 3
    for address in addresses:
        assert address.startswith("./assets/")
        assert (_BUNDLE / address).is_file()
    assert not re.search(r"<style|<script(?![^>]* src=)| style=| on\w+=", page)


def test_the_style_sheet_needs_no_file_beside_it() -> None:
    for sheet in _BUNDLE.glob("assets/*.css"):
        assert not re.search(r"@import|url\(", sheet.read_text(encoding="utf-8"))


def test_the_bundle_carries_the_licences_of_what_is_in_it() -> None:
    licences = (_BUNDLE / "assets/licenses.md").read_text(encoding="utf-8")
    for package in (
        "react",
        "react-dom",
        "@tanstack/react-query",
        "uplot",
        "@codemirror/view",
        "yaml",
    ):
        assert re.search(rf"^## {re.escape(package)} - ", licences, re.MULTILINE), package


def test_the_lock_file_names_versions_and_digests_and_no_host() -> None:
    lock = (DASHBOARD / "package-lock.json").read_text(encoding="utf-8")
    assert '"resolved"' not in lock
    assert lock.count('"integrity"') > 20
