"""The queue, the room there is, and pools, as the REST API shows them."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.contract.jobs.spec_parts import WorldSpec
from services.contract.words.ids import JobId, NodeId
from services.contract.words.states import JobState, NodeState, PoolKind, ReservationState


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


class ReservationView(_View):
    """Nodes that a pool was asked for, all or none of them."""

    id: str
    state: ReservationState
    node_ids: tuple[NodeId, ...]
    job_id: JobId | None = Field(description="for which it was made; null: found at the pool")
    reason: str = Field(
        description="what the pool said last, or why it is given back or was lost, with the pool's words"
    )
    requested_at: datetime
    ready_at: datetime | None = Field(description="when all nodes had joined")
    ended_at: datetime | None = Field(None, description="when its nodes were gone")


class PoolView(_View):
    """A pool: what it may have at a time, and what it has."""

    name: str
    kind: PoolKind
    max_nodes: int
    cpu_slots: int = Field(description="of each node")
    accelerators: int = Field(description="of each node")
    ready_timeout_s: float
    idle_timeout_s: float
    trouble: str | None = Field(
        description="why it does not answer; null: it does, or this controller does not lead"
    )
    reservations: tuple[ReservationView, ...]
    ended: tuple[ReservationView, ...] = Field(
        (),
        description="the newest that were given back (RELEASED) or lost (LOST), the last one first",
    )


class PoolList(_View):
    """All pools, in the order in which they are asked."""

    items: tuple[PoolView, ...]


class DrainRequest(_View):
    """How long running gangs may take to checkpoint before they are killed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grace_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0
