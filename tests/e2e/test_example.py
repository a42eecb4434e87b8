"""What a newcomer's first command does: the example, from nothing to its figures."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.local.settings import child_environment
from tests.e2e.conftest import free_port

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib-gpt.yaml"
WHOLE = 480
# Fewer do not learn more than a table of pairs, which only the whole example has to.
STEPS = 64


@pytest.mark.timeout(500)
def test_the_example_soon_learns_more_than_a_table_of_bytes_and_says_so(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_whole = request.config.getoption("--grid") == "full"
    steps = WHOLE if is_whole else STEPS
    spec, found = re.subn(rf"(train: \{{steps:) {WHOLE}\b", rf"\1 {steps}", EXAMPLE.read_text())
    assert found == 1
    example = tmp_path / EXAMPLE.name
    example.write_text(spec)
    done = subprocess.run(
        [sys.executable, "-m", "services.local", "run", example],
        env=child_environment(
            MESHLOOM_HOME=str(tmp_path), MESHLOOM_PORT=str(free_port()), COLUMNS="200"
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=480,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = re.search(
        r"validation +([\d.]+) nats \(unigram ([\d.]+), bigram [\d.]+\)", done.stdout
    )
    assert figures is not None, done.stdout
    validation, unigram = map(float, figures.groups())
    assert validation < (1.9 if is_whole else unigram - 0.5)
    assert re.search(r"tokens/s +[\d,]+", done.stdout)
    assert re.search(rf"committed checkpoint ckpt_\S+: step {steps}, 2 shards", done.stdout)
    assert re.search(r"dashboard http://127\.0\.0\.1:\d+/#/jobs/job_", done.stdout)
