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


@pytest.mark.timeout(500)
def test_the_example_learns_to_less_than_1_9_nats_and_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.local", "run", EXAMPLE],
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
        r"validation +([\d.]+) nats \(unigram [\d.]+, bigram ([\d.]+)\)", done.stdout
    )
    assert figures is not None, done.stdout
    validation, bigram = map(float, figures.groups())
    assert validation < 1.9 < bigram
    assert re.search(r"tokens/s +[\d,]+", done.stdout)
    assert re.search(r"committed checkpoint ckpt_\S+: step 480, 2 shards", done.stdout)
    assert re.search(r"dashboard http://127\.0\.0\.1:\d+/#/jobs/job_", done.stdout)
