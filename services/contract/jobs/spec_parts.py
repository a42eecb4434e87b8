"""The parts of a job spec: factories, the loop, resources, checkpoints, metrics."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from services.contract.jobs.bounded_json import bounded
from services.contract.jobs.secret_references import SECRET_NAME

_MOST: Final = 1_000_000_000
MOST_RANKS: Final = 65_536

Precision = Literal["fp32", "bf16", "fp16"]
FactoryName = Annotated[
    str,
    StringConstraints(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*(:[A-Za-z_][A-Za-z0-9_]*)?$",
        max_length=200,
    ),
]
LabelKey = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$")]


class SpecPart(BaseModel):
    """Never changed; unknown fields are refused, and so are numbers that are none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Factory(SpecPart):
    """A built-in by its short name, or ``package.module:callable``, with keyword arguments."""

    factory: FactoryName
    args: Annotated[dict[str, JsonValue], BeforeValidator(bounded)] = Field(default_factory=dict)


class ParameterGroup(SpecPart):
    """Options of the optimizer for the parameters whose names ``match``, such as ``weight_decay``.

    ``match`` is a pattern in which ``*`` stands for any characters, dots too; a parameter belongs to
    the first group that matches it, and to the optimizer's own groups if none does.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, JsonValue]

    match: Annotated[str, StringConstraints(min_length=1, max_length=200)]

    @property
    def options(self) -> dict[str, JsonValue]:
        """What holds for the group, by the optimizer's names."""
        return dict(self.__pydantic_extra__)


class OptimizerSpec(Factory):
    """An optimizer, and what is different for some of the parameters."""

    groups: Annotated[tuple[ParameterGroup, ...], BeforeValidator(bounded)] = Field(
        default=(), max_length=100
    )


class EmaSpec(SpecPart):
    """An exponential moving average of the weights, with which validation is done.

    After every ``every`` steps it becomes ``decay`` of itself and ``1 - decay`` of the weights.
    """

    decay: float = Field(default=0.999, ge=0, lt=1)
    every: int = Field(default=1, ge=1, le=_MOST)


class PrecisionSpec(SpecPart):
    """Element types: of the gathered parameters and of the gradient reduction.

    With fp16 anywhere in them or in the plan, losses are scaled so that gradients do not underflow.
    """

    params: Precision = "fp32"
    reduce: Precision = "fp32"


MetricName = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class _ByMetric(SpecPart):
    """By which figure of evaluations something is decided, and whether less or more of it is better.

    ``loss`` is the validation loss; other names are those of metrics that the loss gives beside it.
    """

    metric: MetricName = "loss"
    mode: Literal["min", "max"] = "min"

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Whether ``value`` is better ``than`` another by more than ``by``."""
        return value < than - by if self.mode == "min" else value > than + by


class EarlyStopSpec(_ByMetric):
    """Ends the run, as one that succeeded, once evaluations no longer get better.

    That is after ``patience`` evaluations in a row of which none was better than the best one before
    them by more than ``min_delta``.
    """

    patience: int = Field(ge=1, le=_MOST)
    min_delta: float = Field(default=0.0, ge=0)


class KeepBestSpec(_ByMetric):
    """Retention keeps the ``count`` best checkpoints too, each by the evaluation of its step."""

    count: int = Field(default=1, ge=1, le=1_000)


class TrainSpec(SpecPart):
    """The loop: how many steps, how large a batch over all ranks, how exact."""

    steps: int = Field(ge=1, le=_MOST)
    global_batch: int = Field(default=32, ge=1, le=_MOST)
    micro_batch: Annotated[int, Field(ge=1, le=_MOST)] | Literal["auto"] = "auto"
    clip_norm: float | None = Field(default=1.0, gt=0)
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    precision: PrecisionSpec = PrecisionSpec()
    eval_every: int = Field(default=0, ge=0, le=_MOST, description="0: only after the last step")
    ema: EmaSpec | None = Field(default=None, description="null: no average of the weights is kept")
    deterministic: bool = Field(
        default=False, description="only operators that give the same bits each time; slower"
    )
    early_stop: EarlyStopSpec | None = Field(
        default=None, description="null: all steps are made; needs eval_every"
    )

    @field_validator("early_stop")
    @classmethod
    def _has_evaluations(
        cls, value: EarlyStopSpec | None, info: ValidationInfo
    ) -> EarlyStopSpec | None:
        if value is not None and info.data.get("eval_every") == 0:
            raise ValueError(
                "it is decided by evaluations, and there are none before the last step: set "
                "train.eval_every"
            )
        return value


class WorldSpec(SpecPart):
    """An elastic job's bounds: it goes on with as many ranks, in between, as there is room for."""

    min: int = Field(default=1, ge=1, le=MOST_RANKS)
    max: int = Field(ge=1, le=MOST_RANKS)

    @model_validator(mode="after")
    def _are_in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is more than max, which is {self.max}")
        return self


class ResourceSpec(SpecPart):
    """How many ranks, on what kind of device (``auto``: GPUs where a node has them).

    Either ``ranks``, a fixed number, or ``world``, the bounds of an elastic job, of which ``ranks``
    then is the lower one. As JSON there is only the one that was given.
    """

    ranks: int = Field(default=1, ge=1, le=MOST_RANKS)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    world: WorldSpec | None = None
    memory_gib: Annotated[float, Field(gt=0, le=1 << 20)] | None = Field(
        default=None, description="host memory that a rank may take; beyond it allocations fail"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_of_both(cls, given: object) -> object:
        if not isinstance(given, Mapping) or given.get("world") is None:
            return given
        if "ranks" in given:
            raise ValueError(
                "ranks: a job has so many ranks, or is elastic between the bounds of world; "
                "give one of both (in a merge-patch, take the other one away with null)"
            )
        world = given["world"]
        least = world.get("min", 1) if isinstance(world, Mapping) else getattr(world, "min", 1)
        is_number = isinstance(least, int) and 1 <= least <= MOST_RANKS
        return {**given, "ranks": least if is_number else 1}

    # A return type would take the place of the fields in the JSON schema.
    @model_serializer(mode="wrap")
    def _leave_the_other_out(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # noqa: ANN202 (see above)
        fields = handler(self)
        fields.pop("world" if self.world is None else "ranks", None)
        if self.memory_gib is None:
            fields.pop("memory_gib", None)
        return fields


class MeshSpec(SpecPart):
    """Sizes of the mesh axes; their product is the number of ranks.

    Of an elastic job ``dp_replicate`` is left out: it grows and shrinks with the number of ranks.
    """

    dp_replicate: int = Field(default=1, ge=1, le=MOST_RANKS)
    dp_shard: int = Field(default=1, ge=1, le=MOST_RANKS)
    tp: int = Field(default=1, ge=1, le=MOST_RANKS)

    @property
    def size(self) -> int:
        """How many ranks the mesh has."""
        return self.dp_replicate * self.dp_shard * self.tp


class CheckpointSpec(SpecPart):
    """When to checkpoint and how many to keep (the last step is always checkpointed)."""

    every_steps: int = Field(default=0, ge=0, le=_MOST, description="0: only after the last step")
    keep_last: int = Field(default=2, ge=1, le=_MOST)
    mode: Literal["sync", "async"] = "async"
    keep_best: KeepBestSpec | None = Field(
        default=None,
        description="keeps the best ones beside the last; evaluates before each checkpoint that is due",
    )


class EvaluationSpec(SpecPart):
    """What evaluations measure beside the loss.

    ``metrics`` names a callable from the model's output and a batch to a dict of numbers, each the mean
    over the batch.
    """

    metrics: Factory
    at_steps: bool = Field(default=False, description="measured in each training step, too")


class FaultSpec(SpecPart):
    """What to do when something breaks.

    ``on_nan``: a loss or gradient that is no finite number ends the job (``stop``), or its attempt,
    and the next one goes on from the last committed checkpoint (``rollback``, a counted restart).
    ``hang_timeout_s``: for how long no rank may make progress between steps; ``auto`` is 5 s or
    three usual steps, whichever is longer.
    """

    max_restarts: int = Field(default=3, ge=0, le=_MOST)
    on_nan: Literal["stop", "rollback"] = "stop"
    hang_timeout_s: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"


class SecretReference(SpecPart):
    """A secret by name: the value lies in a file on the nodes."""

    secret: Annotated[str, StringConstraints(pattern=f"^{SECRET_NAME.pattern}$")]


_Word = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class WandbSpec(SpecPart):
    """Weights & Biases takes the metrics too; nodes need ``meshloom[wandb]``.

    Each attempt is a run, in a group that is the job. ``offline`` writes into the folder ``wandb`` beside the
    logs, for ``wandb sync``.
    """

    project: _Word | None = None
    entity: _Word | None = None
    mode: Literal["online", "offline"] = "online"
    base_url: _Word | None = None
    api_key: SecretReference | None = None
    tags: tuple[_Word, ...] = Field(default=(), max_length=16)


class MlflowSpec(SpecPart):
    """MLflow takes the metrics too; nodes need ``meshloom[mlflow]``.

    Each attempt is a run of the experiment, the job's name unless another is given. Without a
    ``tracking_uri`` it writes into the folder ``mlruns`` beside the logs, which programs of MLflow
    read where ``MLFLOW_ALLOW_FILE_STORE=true`` is set.
    """

    tracking_uri: _Word | None = None
    experiment: _Word | None = None
    token: SecretReference | None = None
    username: SecretReference | None = None
    password: SecretReference | None = None


class MetricsSpec(SpecPart):
    """Where the metrics go beside the API, JSON lines and TensorBoard's event files."""

    wandb: WandbSpec | None = None
    mlflow: MlflowSpec | None = None
