"""The queue and the room there is, as the REST API shows them."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.contract.jobs.spec_parts import WorldSpec
from services.contract.words.ids import JobId, NodeId
from services.contract.words.states import JobState, NodeState


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)


class QueueEntry(_View):
    """A job that waits for slots. ``position`` counts from 1."""

    position: int
    job_id: JobId
    name: str
    state: JobState
    priority: int
    ranks: int = Field(description="how many it needs; of an elastic job, the fewest")
    world: WorldSpec | None = Field(None, description="the bounds of an elastic job")
    device: Literal["auto", "cpu", "cuda"]
    reason: str = Field(description="why it waits")
    blocked_by: tuple[JobId, ...] = ()
    waiting_since: datetime
    expected_start_at: datetime | None = Field(
        None, description="by the speed of the jobs ahead of it so far; null: unknown"
    )


class QueueView(_View):
    """All jobs that wait for slots, the next one first."""

    items: tuple[QueueEntry, ...]


class NodeCapacity(_View):
    """The slots of one node. Nothing is free on a node that takes no gangs now."""

    node_id: NodeId
    state: NodeState
    cpu_slots: int
    cpu_slots_free: int
    accelerators: int
    accelerators_free: int


class CapacityView(_View):
    """The slots of all nodes. ``largest_*`` is the largest gang that fits on one node now."""

    nodes: tuple[NodeCapacity, ...]
    cpu_slots: int
    cpu_slots_free: int
    accelerators: int
    accelerators_free: int
    largest_cpu_gang: int
    largest_cuda_gang: int


class DrainRequest(_View):
    """How long running gangs may take to checkpoint before they are killed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grace_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0
