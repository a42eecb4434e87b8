"""The examples as the README shows them, to the figures that it gives."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from services.contract.api.views import Evaluation, JobView
from services.contract.words.states import JobState
from tests.e2e.conftest import Stack
from tests.e2e.typed import typed

pytestmark = [pytest.mark.ranks, pytest.mark.redis, pytest.mark.timeout(500)]

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
Run = Callable[..., JobView]
_PATIENCE_S: Final = 400.0  # on a busy machine each train for minutes


@pytest.fixture
def run(stack: Stack, request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Submits an example as its file says; with so many steps, but for the whole grid of tests."""

    def submitted(name: str, steps: int | None = None) -> JobView:
        job = EXAMPLES / name / "job.yaml"
        if steps is not None and request.config.getoption("--grid") != "full":
            text, found = re.subn(r"(train: \{steps:) \d+", rf"\1 {steps}", job.read_text())
            assert found == 1
            job = tmp_path / job.name
            job.write_text(text)
        done = typed(stack.url, "submit", job, "--code", EXAMPLES / name)
        assert done.returncode == 0, done.stderr
        (job_id,) = set(re.findall(r"job_\w+", done.stdout))
        ended = stack.rested(job_id, timeout_s=_PATIENCE_S)
        assert ended.state is JobState.SUCCEEDED, f"{ended.reason} {ended.failure}"
        return ended

    return submitted


def only_in_full(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--grid") != "full":
        pytest.skip(
            "make test-full: tests/rank/test_examples.py trains the same job by ranks alone"
        )


def validated(job: JobView) -> Evaluation:
    assert job.evaluation is not None
    return job.evaluation


def test_a_plain_dataset_and_model_recognise_97_of_100_digits(run: Run) -> None:
    seen = validated(run("digits", steps=200))
    accuracy = seen.metrics["accuracy"]
    assert accuracy is not None
    assert (seen.tokens, accuracy >= 0.97) == (360, True), accuracy


def test_a_loss_and_metrics_of_ones_own_find_a_formula(
    run: Run, request: pytest.FixtureRequest
) -> None:
    only_in_full(request)
    job = run("regression", steps=240)
    seen = validated(job)
    assert set(seen.metrics) == {"absolute_error", "within_0.1"}
    error, within = seen.metrics["absolute_error"], seen.metrics["within_0.1"]
    assert error is not None
    assert within is not None
    assert error < 0.15
    assert within > 0.4
    assert set(job.progress.metrics) >= set(seen.metrics)


def test_two_optimizers_bring_points_onto_a_circle(
    run: Run, request: pytest.FixtureRequest
) -> None:
    only_in_full(request)
    seen = validated(run("gan", steps=200))
    assert seen.loss is not None
    assert seen.loss < 0.4


def test_a_llama_is_exported_and_its_library_computes_the_same_with_it(
    run: Run, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers  # noqa: PLC0415 (slow to import)

    job = run("llama", steps=60)
    seen = validated(job)
    assert seen.loss is not None
    assert seen.loss < 3.2  # 5.5 for one who knows nothing
    exported = typed(stack.url, "export", job.latest_checkpoint)
    assert exported.returncode == 0, exported.stdout + exported.stderr
    view = stack.client.checkpoint(str(job.latest_checkpoint)).export
    assert view is not None
    folder = stack.home / "checkpoints" / view.folder
    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(folder).eval()
    monkeypatch.syspath_prepend(str(EXAMPLES / "llama"))
    corpus: Any = importlib.import_module("corpus")

    rows = corpus.data(**(job.spec.data.args if job.spec.data else {}))["validation"].rows
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode(tokenizer.decode(rows[0])) == rows[0].tolist()
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows).loss
    assert float(loss) == pytest.approx(seen.loss, abs=1e-5)
