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

    factory: FactoryName = Field(
        description="A built-in's short name, or module:callable of your code."
    )
    args: Annotated[dict[str, JsonValue], BeforeValidator(bounded)] = Field(
        default_factory=dict, description="Keyword arguments of the callable."
    )


class ParameterGroup(SpecPart):
    """Options of the optimizer for the parameters whose names ``match``, such as ``weight_decay``.

    ``match`` is a pattern in which ``*`` stands for any characters, dots too; a parameter belongs to
    the first group that matches it, and to the optimizer's own groups if none does.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, JsonValue]

    match: Annotated[str, StringConstraints(min_length=1, max_length=200)] = Field(
        description="Pattern of parameter names; * matches any characters, dots included."
    )

    @property
    def options(self) -> dict[str, JsonValue]:
        """What holds for the group, by the optimizer's names."""
        return dict(self.__pydantic_extra__)


class OptimizerSpec(Factory):
    """An optimizer, and options for some of the parameters."""

    groups: Annotated[tuple[ParameterGroup, ...], BeforeValidator(bounded)] = Field(
        default=(),
        max_length=100,
        description="Different options for some parameters; the first group that matches applies.",
    )


class EmaSpec(SpecPart):
    """An exponential moving average of the weights, with which validation is done.

    After every ``every`` steps it becomes ``decay`` of itself and ``1 - decay`` of the weights.
    """

    decay: float = Field(
        default=0.999,
        ge=0,
        lt=1,
        description="The average becomes decay of itself plus 1 - decay of the weights.",
    )
    every: int = Field(
        default=1, ge=1, le=_MOST, description="Steps between updates of the average."
    )


class PrecisionSpec(SpecPart):
    """Element types: of the gathered parameters and of the gradient reduction.

    With fp16 anywhere in them or in the plan, losses are scaled so that gradients do not underflow.
    """

    params: Precision = Field(
        default="fp32", description="Element type of gathered parameters and of the computation."
    )
    reduce: Precision = Field(
        default="fp32", description="Element type in which gradients are reduced."
    )


MetricName = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class _ByMetric(SpecPart):
    """By which figure of evaluations something is decided, and whether less or more of it is better.

    ``loss`` is the validation loss; other names are those of metrics that the loss gives beside it.
    """

    metric: MetricName = Field(
        default="loss",
        description="The validation metric that decides; loss is the validation loss.",
    )
    mode: Literal["min", "max"] = Field(
        default="min", description="min: lower is better; max: higher is better."
    )

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Whether ``value`` is better ``than`` another by more than ``by``."""
        return value < than - by if self.mode == "min" else value > than + by


class EarlyStopSpec(_ByMetric):
    """Ends the run successfully once evaluations no longer improve.

    That is after ``patience`` evaluations in a row of which none was better than the best one before
    them by more than ``min_delta``.
    """

    patience: int = Field(
        ge=1,
        le=_MOST,
        description="Evaluations in a row without an improvement after which training ends.",
    )
    min_delta: float = Field(
        default=0.0, ge=0, description="An improvement must be larger than this."
    )


class KeepBestSpec(_ByMetric):
    """Retention also keeps the ``count`` best checkpoints, by the evaluation at their step."""

    count: int = Field(
        default=1, ge=1, le=1_000, description="How many of the best checkpoints to keep."
    )


class TrainSpec(SpecPart):
    """The training loop: steps, batch sizes, precision, evaluation."""

    steps: int = Field(
        ge=1, le=_MOST, description="Optimizer steps; required unless an entrypoint counts its own."
    )
    global_batch: int = Field(
        default=32,
        ge=1,
        le=_MOST,
        description="Samples of a step over all ranks; the data-parallel ranks must divide it.",
    )
    micro_batch: Annotated[int, Field(ge=1, le=_MOST)] | Literal["auto"] = Field(
        default="auto",
        description="Samples of one forward and backward on a rank; auto: the planner chooses.",
    )
    clip_norm: float | None = Field(
        default=1.0,
        gt=0,
        description="Gradients are clipped to this norm; null: they are not clipped.",
    )
    seed: int = Field(
        default=0, ge=0, lt=1 << 31, description="Seed of initial weights, data order and dropout."
    )
    precision: PrecisionSpec = Field(
        default=PrecisionSpec(), description="Element types; float16 adds loss scaling."
    )
    eval_every: int = Field(
        default=0,
        ge=0,
        le=_MOST,
        description="Steps between evaluations; 0: only after the last step.",
    )
    ema: EmaSpec | None = Field(
        default=None,
        description="An exponential moving average of the weights, used for validation; null: none.",
    )
    deterministic: bool = Field(
        default=False, description="Only operators that give the same bits each time; slower."
    )
    early_stop: EarlyStopSpec | None = Field(
        default=None,
        description="Ends training when evaluations stop improving; needs eval_every. null: all steps are made.",
    )

    @field_validator("early_stop")
    @classmethod
    def _has_evaluations(
        cls, value: EarlyStopSpec | None, info: ValidationInfo
    ) -> EarlyStopSpec | None:
        if value is not None and info.data.get("eval_every") == 0:
            raise ValueError(
                "evaluations decide it, and the only one is after the last step: set "
                "train.eval_every"
            )
        return value


class WorldSpec(SpecPart):
    """An elastic job's bounds: it runs with as many ranks between them as fit."""

    min: int = Field(
        default=1, ge=1, le=MOST_RANKS, description="The fewest ranks with which the job runs."
    )
    max: int = Field(ge=1, le=MOST_RANKS, description="The most ranks.")

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

    ranks: int = Field(
        default=1,
        ge=1,
        le=MOST_RANKS,
        description="A fixed number of ranks; give either ranks or world.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: GPUs where a node has them, else CPUs."
    )
    world: WorldSpec | None = Field(
        default=None, description="Bounds of an elastic job, which shrinks and grows between them."
    )
    memory_gib: Annotated[float, Field(gt=0, le=1 << 20)] | None = Field(
        default=None,
        description="Host memory that a rank may take, in GiB; allocations beyond it fail. null: no limit.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_of_both(cls, given: object) -> object:
        if not isinstance(given, Mapping) or given.get("world") is None:
            return given
        if "ranks" in given:
            raise ValueError(
                "ranks: a job has a fixed number of ranks, or is elastic within world; give one of "
                "them (in a merge-patch, set the other to null)"
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

    dp_replicate: int = Field(
        default=1,
        ge=1,
        le=MOST_RANKS,
        description="Copies of the sharded model (HSDP); leave it out of an elastic job.",
    )
    dp_shard: int = Field(
        default=1, ge=1, le=MOST_RANKS, description="Ranks over which one copy is sharded."
    )
    tp: int = Field(
        default=1,
        ge=1,
        le=MOST_RANKS,
        description="Ranks over which single matrices are split (tensor parallelism).",
    )

    @property
    def size(self) -> int:
        """How many ranks the mesh has."""
        return self.dp_replicate * self.dp_shard * self.tp


class CheckpointSpec(SpecPart):
    """When to checkpoint and how many to keep (the last step is always checkpointed)."""

    every_steps: int = Field(
        default=0,
        ge=0,
        le=_MOST,
        description="Steps between checkpoints; 0: only after the last step.",
    )
    keep_last: int = Field(
        default=2,
        ge=1,
        le=_MOST,
        description="How many of the newest committed checkpoints retention keeps: at most 8,192, "
        "with at most 65,536 shards (one for each rank) together.",
    )
    mode: Literal["sync", "async"] = Field(
        default="async",
        description="async: training continues while files are written; sync: it waits.",
    )
    keep_best: KeepBestSpec | None = Field(
        default=None,
        description="Keeps the best checkpoints in addition; evaluates before each checkpoint.",
    )


class EvaluationSpec(SpecPart):
    """What evaluations measure in addition to the loss.

    ``metrics`` names a callable from the model's output and a batch to a dict of numbers, each the mean
    over the batch.
    """

    metrics: Factory = Field(
        description="A callable (output, batch) that returns a dict of numbers, each the mean over the batch."
    )
    at_steps: bool = Field(default=False, description="Compute them at each training step, too.")


class FaultSpec(SpecPart):
    """What to do when something breaks.

    ``on_nan``: a loss or gradient that is no finite number ends the job (``stop``), or its attempt,
    and the next one goes on from the last committed checkpoint (``rollback``, a counted restart).
    ``hang_timeout_s``: for how long no rank may make progress between steps; ``auto`` is 5 s or
    three usual steps, whichever is longer. ``on_replica_loss``: with ``continue`` replicas that live
    train on without a lost one, which gets its state back from their memory.
    """

    max_restarts: int = Field(
        default=3, ge=0, le=_MOST, description="Failed attempts after which the job fails."
    )
    on_nan: Literal["stop", "rollback"] = Field(
        default="stop",
        description="When a loss or gradient is not finite: stop fails the job; rollback restarts from the last commit (counted).",
    )
    hang_timeout_s: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        default="auto",
        description="Seconds without progress on any rank that count as a hang; auto: 5 s or three usual steps, whichever is longer.",
    )
    on_replica_loss: Literal["continue"] | None = Field(
        default=None,
        description="continue: when a replica (mesh.dp_replicate) is lost, the others train on and it returns; null: the attempt ends and the job restarts.",
    )

    # A return type would take the place of the fields in the JSON schema.
    @model_serializer(mode="wrap")
    def _leave_out_what_is_unset(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # noqa: ANN202 (see above)
        fields = handler(self)
        if self.on_replica_loss is None:
            fields.pop("on_replica_loss", None)
        return fields


class SecretReference(SpecPart):
    """A secret by name: its value is in a file on the nodes."""

    secret: Annotated[str, StringConstraints(pattern=f"^{SECRET_NAME.pattern}$")] = Field(
        description="The name of a file in the nodes' MESHLOOM_SECRETS_DIR."
    )


_Word = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class WandbSpec(SpecPart):
    """Sends the metrics to Weights & Biases too; nodes need ``meshloom[wandb]``.

    Each attempt is a run, in a group that is the job. ``offline`` writes into the folder ``wandb`` beside the
    logs, for ``wandb sync``.
    """

    project: _Word | None = Field(default=None, description="The project; null: W&B's default.")
    entity: _Word | None = Field(
        default=None, description="The team or user; null: that of the API key."
    )
    mode: Literal["online", "offline"] = Field(
        default="online",
        description="offline: files for `wandb sync`, in the folder wandb beside the job's logs.",
    )
    base_url: _Word | None = Field(default=None, description="A self-hosted server.")
    api_key: SecretReference | None = Field(default=None, description="The API key.")
    tags: tuple[_Word, ...] = Field(default=(), max_length=16, description="Tags of the runs.")


class MlflowSpec(SpecPart):
    """Sends the metrics to MLflow too; nodes need ``meshloom[mlflow]``.

    Each attempt is a run of the experiment, the job's name unless another is given. Without a
    ``tracking_uri`` it writes into the folder ``mlruns`` beside the logs, which programs of MLflow
    read where ``MLFLOW_ALLOW_FILE_STORE=true`` is set.
    """

    tracking_uri: _Word | None = Field(
        default=None,
        description="The tracking server; null: the folder mlruns beside the job's logs.",
    )
    experiment: _Word | None = Field(
        default=None, description="The experiment's name; null: the job's name."
    )
    token: SecretReference | None = Field(default=None, description="The server's bearer token.")
    username: SecretReference | None = Field(default=None, description="The server's user.")
    password: SecretReference | None = Field(default=None, description="That user's password.")


class MetricsSpec(SpecPart):
    """Where metrics are sent in addition to the API, JSON lines and TensorBoard's event files."""

    wandb: WandbSpec | None = Field(default=None, description="Weights & Biases.")
    mlflow: MlflowSpec | None = Field(default=None, description="MLflow.")
