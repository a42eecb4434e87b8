"""Services of the user's that take metrics: Weights & Biases and MLflow, if the spec names them.

They are imported and asked by the thread that writes metrics, so that neither an import nor a
network that hangs keeps the training waiting.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from services.contract.jobs.spec_parts import MlflowSpec, SecretReference, WandbSpec
from services.contract.messages.rank_pipe import RankSeat
from services.worker.rank.metrics.points import Point, thinned

_POINTS_AT_ONCE: Final = 100
_MLFLOW_AT_ONCE: Final = 1_000
_MLFLOW_NAMES: Final = frozenset("_-./ ")


class TrackerMissingError(ImportError):
    """The spec names a service whose package the node does not have."""


class Wandb:
    """A run of Weights & Biases for each attempt, grouped by job.

    Args:
        seat: Of rank 0.
        spec: What the job wants of it.
    """

    name = "wandb"

    def __init__(self, seat: RankSeat, spec: WandbSpec) -> None:
        self._seat = seat
        self._spec = spec
        self._wandb: Any = None
        self._run: Any = None

    def write(self, points: Sequence[Point]) -> None:
        """Logs them by their steps; of more than 100 a second, 100."""
        if self._run is None:
            self._run = self._begun()
        for point in thinned(points, _POINTS_AT_ONCE):
            self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        """Ends the run, and waits for the package's own process to have written it."""
        if self._run is not None:
            self._run.finish()
            # In offline mode ``finish`` only asks that process, which would end with the rank.
            self._wandb.teardown()

    def _begun(self) -> Any:  # noqa: ANN401 the package has no types here
        self._wandb = wandb = _imported("wandb", "wandb")
        seat, spec = self._seat, self._spec
        arguments = {"base_url": spec.base_url, "api_key": _value(spec.api_key, seat.secrets)}
        settings = wandb.Settings(
            console="off",
            silent=True,
            x_disable_stats=True,
            **{name: value for name, value in arguments.items() if value is not None},
        )
        return wandb.init(
            project=spec.project,
            entity=spec.entity,
            mode=spec.mode,
            tags=list(spec.tags),
            group=seat.job_id,
            name=_run_name(seat),
            id=f"{seat.job_id}-{seat.fence}",
            resume="allow",
            dir=seat.log_folder,
            config=_told_of(seat),
            settings=settings,
        )


class Mlflow:
    """A run of MLflow for each attempt, with the job as a tag.

    Args:
        seat: Of rank 0.
        spec: What the job wants of it.
    """

    name = "mlflow"

    def __init__(self, seat: RankSeat, spec: MlflowSpec) -> None:
        self._seat = seat
        self._spec = spec
        self._client: Any = None
        self._entities: Any = None
        self._run_id = ""

    def write(self, points: Sequence[Point]) -> None:
        """Logs them by their steps; of more than 100 a second, 100."""
        if self._client is None:
            self._begin()
        metrics = [
            self._entities.Metric(_mlflow_name(name), value, int(point.time_s * 1000), point.step)
            for point in thinned(points, _POINTS_AT_ONCE)
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), _MLFLOW_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MLFLOW_AT_ONCE])

    def close(self) -> None:
        """Ends the run."""
        if self._client is not None:
            self._client.set_terminated(self._run_id)

    def _begin(self) -> None:
        seat, spec = self._seat, self._spec
        for variable, reference in (
            ("MLFLOW_TRACKING_TOKEN", spec.token),
            ("MLFLOW_TRACKING_USERNAME", spec.username),
            ("MLFLOW_TRACKING_PASSWORD", spec.password),
        ):
            value = _value(reference, seat.secrets)
            if value is not None:
                os.environ[variable] = value  # noqa: TID251 written: the package reads it nowhere else
        tracking = _imported("mlflow.tracking", "mlflow")
        self._entities = _imported("mlflow.entities", "mlflow")
        uri = spec.tracking_uri or (Path(seat.log_folder) / "mlruns").as_uri()
        if uri.startswith("file:"):
            # It keeps files for those who say so; everything else takes a server or a database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # noqa: TID251 as above
        client = tracking.MlflowClient(tracking_uri=uri)
        name = spec.experiment or seat.spec.name
        known = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if known is None else known.experiment_id
        tags = {f"meshloom.{key}": str(value) for key, value in _told_of(seat).items()}
        run = client.create_run(experiment, run_name=_run_name(seat), tags=tags)
        self._run_id = run.info.run_id
        self._client = client


def trackers(seat: RankSeat) -> list[Wandb | Mlflow]:
    """Those that the spec names."""
    wanted = seat.spec.metrics
    found: list[Wandb | Mlflow] = []
    if wanted is not None and wanted.wandb is not None:
        found.append(Wandb(seat, wanted.wandb))
    if wanted is not None and wanted.mlflow is not None:
        found.append(Mlflow(seat, wanted.mlflow))
    return found


def _imported(module: str, extra: str) -> Any:  # noqa: ANN401 the package need not be there
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TrackerMissingError(
            f"this node has no package {extra}: pip install 'meshloom[{extra}]' there ({error})"
        ) from error


def _value(reference: SecretReference | None, secrets: Mapping[str, str]) -> str | None:
    return None if reference is None else secrets[reference.secret]


def _run_name(seat: RankSeat) -> str:
    return f"{seat.spec.name}-attempt-{seat.fence}"


def _told_of(seat: RankSeat) -> dict[str, object]:
    return {"job": seat.job_id, "attempt": seat.fence, "ranks": seat.plan.world_size}


def _mlflow_name(name: str) -> str:
    """It takes letters, digits and some signs."""
    return "".join(c if c.isalnum() or c in _MLFLOW_NAMES else "_" for c in name)
