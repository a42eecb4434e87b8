"""The committed bundle is what the sources build to, and it stays on its origin."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

_DASHBOARD: Final = Path(__file__).parents[2] / "services/controller/dashboard"
_BUNDLE: Final = _DASHBOARD / "bundle"
OFFLINE: Final = re.compile(
    r"\b(ENOTFOUND|ECONNREFUSED|ECONNRESET|EAI_AGAIN|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH)\b"
)


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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with what they need, outside of the repository."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node.js is not installed: the bundle cannot be rebuilt and compared")
    copy = tmp_path_factory.mktemp("rebuild") / "dashboard"
    shutil.copytree(_DASHBOARD, copy, ignore=shutil.ignore_patterns("node_modules", "bundle"))
    done = subprocess.run(
        [npm, "ci", "--ignore-scripts", "--prefer-offline"],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode != 0 and (why := OFFLINE.search(done.stderr)):
        pytest.skip(f"npm cannot reach its registry ({why[0]}): the bundle cannot be rebuilt")
    assert done.returncode == 0, done.stderr
    return copy


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
    for package in ("react", "react-dom", "@tanstack/react-query", "uplot"):
        assert re.search(rf"^## {re.escape(package)} - ", licences, re.MULTILINE), package


def test_the_lock_file_names_versions_and_digests_and_no_host() -> None:
    lock = (_DASHBOARD / "package-lock.json").read_text(encoding="utf-8")
    assert '"resolved"' not in lock
    assert lock.count('"integrity"') > 20
