"""A job spec: what a person asks for. YAML for people, the same as JSON on the wire.

A job names a ``model`` and its ``data``, or a ``trainable``, or an ``entrypoint``. Every other field but
``train.steps``, which a script need not say, has a default; unknown fields are refused.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from services.contract.jobs.bounded_json import bounded, is_judged
from services.contract.jobs.code_archives import CodeDigest
from services.contract.jobs.scripts import (
    UNTOLD_STEPS,
    EntryPoint,
    completed,
    for_a_loop_alone,
    schema_of_both,
)
from services.contract.jobs.spec_parts import (
    MOST_RANKS,
    CheckpointSpec,
    EvaluationSpec,
    Factory,
    FaultSpec,
    LabelKey,
    MeshSpec,
    MetricsSpec,
    OptimizerSpec,
    ResourceSpec,
    SpecPart,
    TrainSpec,
)
from services.contract.jobs.worlds import Share, fewest_ranks, possible_worlds

MAX_SPEC_BYTES: Final = 65_536
TOO_LARGE: Final = "spec_too_large"
HIGHEST_PRIORITY: Final = 1_000
_WORLDS_NAMED: Final = 12
# Made once: the queue asks for the share of each job that waits.
_MESH_OF_ONE: Final = MeshSpec()


class JobSpec(SpecPart):
    """Everything that a user decides about a job.

    A job trains in Meshloom's loop, by ``model``, ``data`` and the related fields, or it runs an
    ``entrypoint``: then the fields that only the loop reads are left out. ``train.steps``, if it is
    not given either, is one more than there can be.

    ``mesh`` and ``plan``, as far as they are left ``auto``, are chosen before the job's first attempt
    from what a node finds of the model. With the plan ``default`` the model is not profiled: all ranks in
    dp_shard unless ``mesh`` says otherwise, and the units that are known of a built-in model.
    ``code`` is the digest of an uploaded archive: ranks and probes of this job import from it first.
    """

    model_config = ConfigDict(json_schema_extra=schema_of_both)

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = Field(
        default="job", description="Shown in lists; need not be unique."
    )
    # Before the fields that may be left out with them: their validators look whether they are there.
    entrypoint: EntryPoint | None = Field(
        default=None,
        description="A script or module that each rank runs with its own training loop, as torchrun would.",
    )
    trainable: Factory | None = Field(
        default=None,
        description="A subclass of meshloom.Trainable; it builds the model and computes a step.",
    )
    model: Factory | None = Field(
        default=None,
        validate_default=True,
        description="A callable that returns the nn.Module to train; required without trainable or entrypoint.",
    )
    data: Factory | None = Field(
        default=None,
        validate_default=True,
        description="The training data; optional where trainable builds it, required with model.",
    )
    loss: Factory | None = Field(
        default=None,
        description="The loss; null: the model's own, else the cross entropy of the next token.",
    )
    code: CodeDigest | None = Field(
        default=None,
        description="SHA-256 of an uploaded code archive; the job imports from it first. `submit --code` sets it.",
    )
    optimizer: OptimizerSpec = Field(
        default=OptimizerSpec(factory="adamw"),
        description="The optimizer: adamw, or any callable that takes parameters.",
    )
    schedule: Factory = Field(
        default=Factory(factory="constant"), description="The learning rate schedule."
    )
    train: TrainSpec = Field(description="Steps, batch sizes, precision and evaluation.")
    evaluation: EvaluationSpec | None = Field(
        default=None,
        description="Metrics that are computed on validation data in addition to those of the loss.",
    )
    resources: ResourceSpec = Field(
        default=ResourceSpec(),
        description="How many ranks, on what kind of device, with how much host memory.",
    )
    mesh: MeshSpec | Literal["auto"] = Field(
        default="auto", description="Sizes of the mesh axes; auto: the planner chooses them."
    )
    plan: Annotated[dict[str, Any], BeforeValidator(bounded)] | Literal["auto", "default"] = Field(
        default="auto",
        description="The sharding plan: auto: the planner chooses; default: one unit a block without profiling; or fields of a plan, of which the planner fills in the rest.",
    )
    checkpoint: CheckpointSpec = Field(
        default=CheckpointSpec(), description="When to checkpoint and which checkpoints to keep."
    )
    faults: FaultSpec = Field(
        default=FaultSpec(), description="How many restarts, and what counts as a hang."
    )
    metrics: MetricsSpec | None = Field(
        default=None,
        description="Experiment trackers that receive the metrics in addition to the API and TensorBoard files.",
    )
    priority: int = Field(
        default=0,
        ge=-1000,
        le=HIGHEST_PRIORITY,
        description="Jobs of higher priority are placed first and may preempt jobs of lower priority.",
    )
    labels: dict[LabelKey, Annotated[str, StringConstraints(max_length=256)]] = Field(
        default_factory=dict,
        max_length=64,
        description="Your own keys and values, to filter lists by.",
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
                    "checkpoint.keep_best: evaluations of Meshloom's loop decide it, and a script "
                    "has none; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _is_small(self, info: ValidationInfo) -> Self:
        if is_judged(info):
            return self
        text = json.dumps(self.model_dump(), ensure_ascii=False)
        size = len(text.encode(errors="surrogatepass"))
        if size > MAX_SPEC_BYTES:
            raise PydanticCustomError(
                TOO_LARGE, f"the spec has {size} bytes as JSON, more than {MAX_SPEC_BYTES}"
            )
        return self

    @model_validator(mode="after")
    def _has_replicas_to_lose(self) -> Self:
        if not self.continues_without_replicas:
            return self
        if self.entrypoint is not None or self.resources.world is not None:
            what = "an entrypoint" if self.entrypoint is not None else "resources.world"
            raise ValueError(
                f"faults.on_replica_loss: continue is not possible with {what}; leave it out"
            )
        if self.mesh == "auto" or self.mesh.dp_replicate == 1:
            raise ValueError(
                "faults.on_replica_loss: continue needs replicas that can be lost: set "
                "mesh.dp_replicate to 2 or more"
            )
        return self

    @property
    def continues_without_replicas(self) -> bool:
        """Whether the loss of a replica does not end an attempt."""
        return self.faults.on_replica_loss is not None

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
        mesh = _MESH_OF_ONE if self.mesh == "auto" else self.mesh
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

    @property
    def fewest_ranks(self) -> int:
        """The first of `worlds`, which it needs."""
        bounds = self.resources.world
        if bounds is None:
            return self.resources.ranks
        return fewest_ranks(self.share, bounds.min, bounds.max)

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
            named = possible_worlds(self.share, 1, MOST_RANKS)
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
                "make the product equal, or use mesh: auto"
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
