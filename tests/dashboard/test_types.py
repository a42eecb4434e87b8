"""The dashboard's TypeScript types are those that the generator writes from the frozen OpenAPI document."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.dashboard.conftest import OFFLINE

_ROOT: Final = Path(__file__).parents[2]
_DASHBOARD: Final = _ROOT / "services/controller/dashboard"
_TYPES: Final = _DASHBOARD / "src/api/types.ts"
_DOCUMENT: Final = _ROOT / "tests/controller/openapi.json"
_AGAIN: Final = "run `npm --prefix services/controller/dashboard run types`"


def test_the_generator_writes_them_byte_for_byte(tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("Node.js is not installed: the types cannot be generated and compared")
    generator = tmp_path / "typegen"
    shutil.copytree(
        _DASHBOARD / "typegen", generator, ignore=shutil.ignore_patterns("node_modules")
    )
    done = subprocess.run(
        [npm, "ci", "--ignore-scripts", "--prefer-offline"],
        cwd=generator,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode != 0 and (why := OFFLINE.search(done.stderr)):
        pytest.skip(f"npm cannot reach its registry ({why[0]}): the types cannot be generated")
    assert done.returncode == 0, done.stderr
    made = tmp_path / "types.ts"
    subprocess.run(
        [node, "generate.mjs", str(_DOCUMENT), str(made)], cwd=generator, check=True, timeout=240
    )
    assert made.read_text(encoding="utf-8") == _TYPES.read_text(encoding="utf-8"), _AGAIN
