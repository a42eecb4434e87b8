"""Weights & Biases and MLflow in their offline modes."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import RankSeat
from services.worker.rank.metrics.points import Point
from services.worker.rank.metrics.reporter import MetricsReporter, Outlet
from services.worker.rank.metrics.trackers import Mlflow, Wandb, trackers
from tests.rank.gang import JOB
from tests.rank.test_checkpoints import seat_of

Spec = Callable[..., JobSpec]
POINTS = [
    Point(step, {"loss": 1 / step, "validation/hits (%)": step * 10.0}, 1_700_000_000.0 + step)
    for step in (1, 2, 3)
]


def seat_with(tmp_path: Path, spec: Spec, metrics: dict[str, Any]) -> RankSeat:
    given = spec().model_dump() | {"metrics": metrics, "name": "pictures"}
    seat = seat_of(tmp_path, JobSpec.model_validate(given))
    return seat.model_copy(update={"log_folder": str(tmp_path), "secrets": {"WB": "s" * 40}})


def written(outlets: Sequence[Outlet]) -> None:
    for outlet in outlets:
        outlet.write(POINTS[:1])
        outlet.write(POINTS[1:])
        outlet.close()


def test_mlflow_has_a_run_of_the_attempt_with_each_value_at_its_step(
    tmp_path: Path, spec: Spec
) -> None:
    (outlet,) = found = trackers(seat_with(tmp_path, spec, {"mlflow": {}}))
    assert isinstance(outlet, Mlflow)
    written(found)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("pictures")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("pictures-attempt-1", "FINISHED")
    assert run.data.tags["meshloom.job"] == JOB
    history = client.get_metric_history(run.info.run_id, "validation/hits ___")
    assert [(m.step, m.value) for m in history] == [(1, 10.0), (2, 20.0), (3, 30.0)]


def test_wandb_writes_a_run_of_the_attempt_for_a_later_sync(tmp_path: Path, spec: Spec) -> None:
    wanted = {"project": "p", "mode": "offline", "api_key": {"secret": "WB"}}
    (outlet,) = found = trackers(seat_with(tmp_path, spec, {"wandb": wanted}))
    assert isinstance(outlet, Wandb)
    written(found)
    (run,) = tmp_path.glob(f"wandb/offline-run-*/run-{JOB}-1.wandb")
    content = run.read_bytes()
    assert content.count(b"validation/hits (%)") >= len(POINTS)
    assert b"pictures-attempt-1" in content
    assert b"s" * 40 not in content


@pytest.mark.parametrize("missing", ["wandb", "mlflow"])
def test_a_service_whose_package_is_not_there_is_told_of_once_and_training_goes_on(
    tmp_path: Path,
    spec: Spec,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for module in (missing, "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, module, None)
    with MetricsReporter(seat_with(tmp_path, spec, {missing: {}}), lambda _: None) as reporter:
        reporter.report(1, {"x": 1.0})
    said = capfd.readouterr().err
    assert said.count(f"pip install 'meshloom[{missing}]'") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
