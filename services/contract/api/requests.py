"""Bodies of requests that change a job or make one of another: merge-patches (RFC 7396)."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, StringConstraints

from services.contract.jobs.bounded_json import bounded
from services.contract.jobs.spec_parts import LabelKey, MetricName
from services.contract.words.ids import CheckpointId


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BestPatch(_Request):
    """Which committed checkpoints are the best, and how many are kept; null: the default."""

    metric: MetricName | None = None
    mode: Literal["min", "max"] | None = None
    count: Annotated[int, Field(ge=1, le=1_000)] | None = None


class RetentionPatch(_Request):
    """How many committed checkpoints are kept; null: the default.

    ``keep_best``: beside these the best ones, null: none. It holds for what is committed from now on,
    and for what has an evaluation already. Ranks that run go on evaluating as they did: where they did
    not before each checkpoint, they do so from the next attempt on.
    """

    keep_last: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    keep_best: BestPatch | None = None


class BudgetPatch(_Request):
    """How many restarts a run may need; null: the default."""

    max_restarts: Annotated[int, Field(ge=0, le=1_000_000_000)] | None = None


class BoundsPatch(_Request):
    """The bounds of an elastic job; a ``min`` that is null is 1."""

    min: Annotated[int, Field(ge=1, le=65_536)] | None = None
    max: Annotated[int, Field(ge=1, le=65_536)] | None = None


class ResourcesPatch(_Request):
    """The bounds of an elastic job."""

    world: BoundsPatch = BoundsPatch()


class JobPatch(_Request):
    """The fields of a job that may be changed after it was submitted: a merge-patch on its spec.

    A field that is left out stays as it is, null makes it the default again, and a label that is
    null is removed.
    """

    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    labels: (
        Annotated[
            dict[LabelKey, Annotated[str, StringConstraints(max_length=256)] | None],
            Field(max_length=128),
        ]
        | None
    ) = None
    checkpoint: RetentionPatch = RetentionPatch()
    faults: BudgetPatch = BudgetPatch()
    resources: ResourcesPatch = ResourcesPatch()


class CloneRequest(_Request):
    """How the clone differs from the cloned job, and where it starts.

    ``overrides`` is a merge-patch on the job's spec. ``from_checkpoint`` names a committed
    checkpoint of the cloned job, its ``latest``, or its ``best`` by ``checkpoint.keep_best``, else by
    the validation loss; without one the clone starts over.
    """

    overrides: Annotated[dict[str, JsonValue], BeforeValidator(bounded)] = Field(
        default_factory=dict
    )
    from_checkpoint: CheckpointId | Literal["latest", "best"] | None = None
