"""A job spec: what a person asks for. YAML for people, the same as JSON on the wire.

A job names a ``model`` and its ``data``, or a ``trainable``, or an ``entrypoint``. Every other field but
``train.steps``, which a script need not say, has a default; unknown fields are refused.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from services.contract.jobs.bounded_json import bounded
from services.contract.jobs.code_archives import CodeDigest
from services.contract.jobs.scripts import (
    UNTOLD_STEPS,
    EntryPoint,
    completed,
    for_a_loop_alone,
    schema_of_both,
)
from services.contract.jobs.secret_references import SECRET_NAME
from services.contract.jobs.worlds import Share, possible_worlds

MAX_SPEC_BYTES: Final = 65_536
TOO_LARGE: Final = "spec_too_large"
_MOST: Final = 1_000_000_000
_MOST_RANKS: Final = 65_536
_WORLDS_NAMED: Final = 12

Precision = Literal["fp32", "bf16", "fp16"]
FactoryName = Annotated[
    str,
    StringConstraints(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*(:[A-Za-z_][A-Za-z0-9_]*)?$",
        max_length=200,
    ),
]
LabelKey = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$")]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Factory(_Spec):
    """A built-in by its short name, or ``package.module:callable``, with keyword arguments."""

    factory: FactoryName
    args: Annotated[dict[str, JsonValue], BeforeValidator(bounded)] = Field(default_factory=dict)


class ParameterGroup(_Spec):
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


class EmaSpec(_Spec):
    """An exponential moving average of the weights, with which validation is done.

    After every ``every`` steps it becomes ``decay`` of itself and ``1 - decay`` of the weights.
    """

    decay: float = Field(default=0.999, ge=0, lt=1)
    every: int = Field(default=1, ge=1, le=_MOST)


class PrecisionSpec(_Spec):
    """Element types: of the gathered parameters and of the gradient reduction.

    With fp16 anywhere in them or in the plan, losses are scaled so that gradients do not underflow.
    """

    params: Precision = "fp32"
    reduce: Precision = "fp32"


MetricName = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class _ByMetric(_Spec):
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


class TrainSpec(_Spec):
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


class WorldSpec(_Spec):
    """An elastic job's bounds: it goes on with as many ranks, in between, as there is room for."""

    min: int = Field(default=1, ge=1, le=_MOST_RANKS)
    max: int = Field(ge=1, le=_MOST_RANKS)

    @model_validator(mode="after")
    def _are_in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is more than max, which is {self.max}")
        return self


class ResourceSpec(_Spec):
    """How many ranks, on what kind of device (``auto``: GPUs where a node has them).

    Either ``ranks``, a fixed number, or ``world``, the bounds of an elastic job, of which ``ranks``
    then is the lower one. As JSON there is only the one that was given.
    """

    ranks: int = Field(default=1, ge=1, le=_MOST_RANKS)
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
        is_number = isinstance(least, int) and 1 <= least <= _MOST_RANKS
        return {**given, "ranks": least if is_number else 1}

    # A return type would take the place of the fields in the JSON schema.
    @model_serializer(mode="wrap")
    def _leave_the_other_out(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # noqa: ANN202 (see above)
        fields = handler(self)
        fields.pop("world" if self.world is None else "ranks", None)
        if self.memory_gib is None:
            fields.pop("memory_gib", None)
        return fields


class MeshSpec(_Spec):
    """Sizes of the mesh axes; their product is the number of ranks.

    Of an elastic job ``dp_replicate`` is left out: it grows and shrinks with the number of ranks.
    """

    dp_replicate: int = Field(default=1, ge=1, le=_MOST_RANKS)
    dp_shard: int = Field(default=1, ge=1, le=_MOST_RANKS)
    tp: int = Field(default=1, ge=1, le=_MOST_RANKS)

    @property
    def size(self) -> int:
        """How many ranks the mesh has."""
        return self.dp_replicate * self.dp_shard * self.tp


class CheckpointSpec(_Spec):
    """When to checkpoint and how many to keep (the last step is always checkpointed)."""

    every_steps: int = Field(default=0, ge=0, le=_MOST, description="0: only after the last step")
    keep_last: int = Field(default=2, ge=1, le=_MOST)
    mode: Literal["sync", "async"] = "async"
    keep_best: KeepBestSpec | None = Field(
        default=None,
        description="keeps the best ones beside the last; evaluates before each checkpoint that is due",
    )


class EvaluationSpec(_Spec):
    """What evaluations measure beside the loss.

    ``metrics`` names a callable from the model's output and a batch to a dict of numbers, each the mean
    over the batch.
    """

    metrics: Factory
    at_steps: bool = Field(default=False, description="measured in each training step, too")


class FaultSpec(_Spec):
    """What to do when something breaks.

    ``on_nan``: a loss or gradient that is no finite number ends the job (``stop``), or its attempt,
    and the next one goes on from the last committed checkpoint (``rollback``, a counted restart).
    ``hang_timeout_s``: for how long no rank may make progress between steps; ``auto`` is 5 s or
    three usual steps, whichever is longer.
    """

    max_restarts: int = Field(default=3, ge=0, le=_MOST)
    on_nan: Literal["stop", "rollback"] = "stop"
    hang_timeout_s: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"


class SecretReference(_Spec):
    """A secret by name: the value lies in a file on the nodes."""

    secret: Annotated[str, StringConstraints(pattern=f"^{SECRET_NAME.pattern}$")]


_Word = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class WandbSpec(_Spec):
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


class MlflowSpec(_Spec):
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


class MetricsSpec(_Spec):
    """Where the metrics go beside the API, JSON lines and TensorBoard's event files."""

    wandb: WandbSpec | None = None
    mlflow: MlflowSpec | None = None


class JobSpec(_Spec):
    """Everything that a job is, apart from what happens to it.

    A job trains in our loop, by ``model``, ``data`` and what goes with them, or it runs an
    ``entrypoint``: then all that only our loop reads is left out, and its ``train.steps``, if it does
    not say how many it makes, is one more than there can be.

    ``mesh`` and ``plan``, as far as they are left ``auto``, are chosen before the job's first attempt
    from what a node finds of the model. With the plan ``default`` the model is not profiled: all ranks in
    dp_shard unless ``mesh`` says otherwise, and the units that are known of a built-in model.
    ``code`` is the digest of an uploaded archive: ranks and probes of this job import from it first.
    """

    model_config = ConfigDict(json_schema_extra=schema_of_both)

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "job"
    # Before the fields that may be left out with them: their validators look whether they are there.
    entrypoint: EntryPoint | None = Field(
        default=None, description="a script or module to run in each rank, in the place of our loop"
    )
    trainable: Factory | None = Field(
        default=None, description="a subclass of meshloom.Trainable, in place of model"
    )
    model: Factory | None = Field(default=None, validate_default=True)
    data: Factory | None = Field(
        default=None, validate_default=True, description="may be left out where trainable builds it"
    )
    loss: Factory | None = Field(
        default=None, description="null: the model's own, else the cross entropy of the next token"
    )
    code: CodeDigest | None = Field(
        default=None, description="an uploaded archive, from which this job imports first"
    )
    optimizer: OptimizerSpec = OptimizerSpec(factory="adamw")
    schedule: Factory = Factory(factory="constant")
    train: TrainSpec
    evaluation: EvaluationSpec | None = Field(
        default=None, description="metrics of validation data beside those that the loss gives"
    )
    resources: ResourceSpec = ResourceSpec()
    mesh: MeshSpec | Literal["auto"] = "auto"
    plan: Annotated[dict[str, Any], BeforeValidator(bounded)] | Literal["auto", "default"] = "auto"
    checkpoint: CheckpointSpec = CheckpointSpec()
    faults: FaultSpec = FaultSpec()
    metrics: MetricsSpec | None = Field(
        default=None, description="services that take the metrics, beside files and the API"
    )
    priority: int = Field(default=0, ge=-1000, le=1000)
    labels: dict[LabelKey, Annotated[str, StringConstraints(max_length=256)]] = Field(
        default_factory=dict, max_length=64
    )

    @field_validator("model", "data")
    @classmethod
    def _is_there(cls, value: Factory | None, info: ValidationInfo) -> Factory | None:
        if not {"trainable", "entrypoint"} <= info.data.keys():  # one of them is wrong itself
            return value
        by_trainable = info.data["trainable"] is not None
        if value is None and not by_trainable and info.data["entrypoint"] is None:
            raise PydanticCustomError("missing", "Field required")
        if value is not None and by_trainable and info.field_name == "model":
            raise PydanticCustomError(
                "one_of_both", "trainable builds the model: give one of trainable and model"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _needs_no_loop(cls, given: object) -> object:
        return completed(given)

    @model_validator(mode="after")
    def _says_nothing_to_no_loop(self) -> Self:
        if self.entrypoint is not None:
            for_a_loop_alone(self)
            if self.checkpoint.keep_best is not None:
                raise ValueError(
                    "checkpoint.keep_best: it is decided by evaluations of our loop, and a script has "
                    "none; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _is_small(self) -> Self:
        text = json.dumps(self.model_dump(), ensure_ascii=False)
        size = len(text.encode(errors="surrogatepass"))
        if size > MAX_SPEC_BYTES:
            raise PydanticCustomError(
                TOO_LARGE, f"the spec has {size} bytes as JSON, more than {MAX_SPEC_BYTES}"
            )
        return self

    @property
    def leaves_layout_open(self) -> bool:
        """Whether mesh or units are to be chosen; the mesh of an elastic job follows its ranks.

        A script is not profiled.
        """
        if self.plan == "default" or self.entrypoint is not None:
            return False
        said = () if self.plan == "auto" else self.plan
        has_mesh = self.mesh != "auto" or self.resources.world is not None or "mesh" in said
        return not has_mesh or "units" not in said

    @property
    def steps(self) -> int | None:
        """How many steps the job makes; None: it is a script, and does not say."""
        return None if self.train.steps == UNTOLD_STEPS else self.train.steps

    @property
    def share(self) -> Share:
        """What the number of its ranks must go into."""
        mesh = MeshSpec() if self.mesh == "auto" else self.mesh
        micro = self.train.micro_batch
        return Share(
            copy=mesh.dp_shard * mesh.tp,
            tp=mesh.tp,
            batch=self.train.global_batch if self.entrypoint is None else None,
            micro=None if micro == "auto" else micro,
        )

    @property
    def worlds(self) -> Sequence[int]:
        """The numbers of ranks that an attempt of it may have, ascending; the first is needed."""
        bounds = self.resources.world
        if bounds is None:
            return (self.resources.ranks,)
        return possible_worlds(self.share, bounds.min, bounds.max)

    @model_validator(mode="after")
    def _some_world_is_possible(self) -> Self:
        bounds = self.resources.world
        if bounds is None:
            return self
        if self.mesh != "auto" and self.mesh.dp_replicate != 1:
            raise ValueError(
                "mesh.dp_replicate: of an elastic job (resources.world) it follows from the "
                "number of ranks; leave it out"
            )
        if not self.worlds:
            named = possible_worlds(self.share, 1, _MOST_RANKS)
            some = ", ".join(map(str, named[:_WORLDS_NAMED]))
            more = ", …" if len(named) > _WORLDS_NAMED else ""
            possible = f"possible are {some}{more}" if named else "no number is possible"
            copies = f"copies of the parameters have {self.share.copy} ranks"
            if self.entrypoint is not None:
                raise ValueError(
                    f"resources.world: no number of ranks from {bounds.min} to {bounds.max} is "
                    f"possible ({copies}); {possible}"
                )
            raise ValueError(
                f"resources.world: no number of ranks from {bounds.min} to {bounds.max} shares "
                f"train.global_batch {self.train.global_batch} out evenly ({copies}, "
                f"train.micro_batch is {self.train.micro_batch}); {possible}"
            )
        return self

    @model_validator(mode="after")
    def _mesh_covers_the_ranks(self) -> Self:
        if self.resources.world is not None or self.mesh == "auto":
            return self
        if self.mesh.size != self.resources.ranks:
            raise ValueError(
                f"mesh: {self.mesh.dp_replicate} x {self.mesh.dp_shard} x {self.mesh.tp} is "
                f"{self.mesh.size} ranks, but resources.ranks is {self.resources.ranks}; "
                "make the product equal, or say mesh: auto"
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        if self.resources.world is not None or self.entrypoint is not None:
            return self
        data_ranks = self.resources.ranks // (1 if self.mesh == "auto" else self.mesh.tp)
        batch = self.train.global_batch
        if batch % max(data_ranks, 1):
            raise ValueError(
                f"train.global_batch: {batch} does not divide by the {data_ranks} data-parallel "
                f"ranks; the nearest that does is {max(1, round(batch / data_ranks)) * data_ranks}"
            )
        micro = self.train.micro_batch
        if micro != "auto" and (batch // max(data_ranks, 1)) % micro:
            raise ValueError(
                f"train.micro_batch: {micro} does not divide the {batch // data_ranks} "
                "sequences that each rank has in a step"
            )
        return self


def _carried(value: object, read: ValidatorFunctionWrapHandler) -> object:
    # Pydantic would ask the validators of a whole model once more wherever one is put into another.
    if isinstance(value, JobSpec):
        return value
    try:
        return read(value)
    except ValidationError:
        if not isinstance(value, Mapping):
            raise
        known = JobSpec.model_validate(value, extra="ignore")
        if _asks_for_more(value, known.model_dump(mode="json")):
            raise
        return known


def _asks_for_more(value: object, known: object) -> bool:
    """Whether a field that is not in ``known`` is set to anything."""
    if isinstance(value, Mapping) and isinstance(known, Mapping):
        return any(
            _asks_for_more(item, known[name]) if name in known else bool(item)
            for name, item in value.items()
        )
    if isinstance(value, list) and isinstance(known, list):
        return any(map(_asks_for_more, value, known))
    return False


CarriedSpec = Annotated[JobSpec, WrapValidator(_carried)]
"""A spec in a message or a record of machines: an unknown field is ignored if it is not set.

A field that is added to the spec has an empty default (null, false, 0, "" or no items) that means
"as before". So an older version reads every spec that does not use the field. One that does is
refused by the field's name: training without it would be another training than was asked for.

It is validated where it is read from text. Within a process a spec goes from value to value as it is.
"""
