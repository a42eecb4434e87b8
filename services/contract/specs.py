"""A job spec: what a person asks for. YAML for people, the same as JSON on the wire.

Every field but ``model``, ``data`` and ``train.steps`` has a default; unknown fields are refused.
"""

import json
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from services.contract.bounded_json import bounded

MAX_SPEC_BYTES: Final = 65_536
TOO_LARGE: Final = "spec_too_large"
_MOST: Final = 1_000_000_000

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


class PrecisionSpec(_Spec):
    """Element types: of the gathered parameters and of the gradient reduction."""

    params: Precision = "fp32"
    reduce: Precision = "fp32"


class TrainSpec(_Spec):
    """The loop: how many steps, how large a batch over all ranks, how exact."""

    steps: int = Field(ge=1, le=_MOST)
    global_batch: int = Field(default=32, ge=1, le=_MOST)
    micro_batch: Annotated[int, Field(ge=1, le=_MOST)] | Literal["auto"] = "auto"
    clip_norm: float | None = Field(default=1.0, gt=0)
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    precision: PrecisionSpec = PrecisionSpec()
    eval_every: int = Field(default=0, ge=0, le=_MOST, description="0: only after the last step")


class ResourceSpec(_Spec):
    """How many ranks, on what kind of device (``auto``: GPUs where a node has them)."""

    ranks: int = Field(default=1, ge=1, le=65_536)
    device: Literal["auto", "cpu", "cuda"] = "auto"


class MeshSpec(_Spec):
    """Sizes of the mesh axes; their product is the number of ranks."""

    dp_replicate: int = Field(default=1, ge=1, le=65_536)
    dp_shard: int = Field(default=1, ge=1, le=65_536)
    tp: int = Field(default=1, ge=1, le=65_536)

    @property
    def size(self) -> int:
        """How many ranks the mesh has."""
        return self.dp_replicate * self.dp_shard * self.tp


class CheckpointSpec(_Spec):
    """When to checkpoint and how many to keep (the last step is always checkpointed)."""

    every_steps: int = Field(default=0, ge=0, le=_MOST, description="0: only after the last step")
    keep_last: int = Field(default=2, ge=1, le=_MOST)
    mode: Literal["sync", "async"] = "async"


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


class JobSpec(_Spec):
    """Everything that a job is, apart from what happens to it."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "job"
    model: Factory
    data: Factory
    optimizer: Factory = Factory(factory="adamw")
    schedule: Factory = Factory(factory="constant")
    train: TrainSpec
    resources: ResourceSpec = ResourceSpec()
    mesh: MeshSpec | Literal["auto"] = "auto"
    plan: Annotated[dict[str, Any], BeforeValidator(bounded)] | Literal["auto"] = "auto"
    checkpoint: CheckpointSpec = CheckpointSpec()
    faults: FaultSpec = FaultSpec()
    priority: int = Field(default=0, ge=-1000, le=1000)
    labels: dict[LabelKey, Annotated[str, StringConstraints(max_length=256)]] = Field(
        default_factory=dict, max_length=64
    )

    @model_validator(mode="after")
    def _is_small(self) -> Self:
        text = json.dumps(self.model_dump(), ensure_ascii=False)
        size = len(text.encode(errors="surrogatepass"))
        if size > MAX_SPEC_BYTES:
            raise PydanticCustomError(
                TOO_LARGE, f"the spec has {size} bytes as JSON, more than {MAX_SPEC_BYTES}"
            )
        return self

    @model_validator(mode="after")
    def _mesh_covers_the_ranks(self) -> Self:
        if self.mesh != "auto" and self.mesh.size != self.resources.ranks:
            raise ValueError(
                f"mesh: {self.mesh.dp_replicate} x {self.mesh.dp_shard} x {self.mesh.tp} is "
                f"{self.mesh.size} ranks, but resources.ranks is {self.resources.ranks}; "
                "make the product equal, or say mesh: auto"
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
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
