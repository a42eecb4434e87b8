"""Pools and what is reserved of them, as the REST API shows them."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from services.contract.words.ids import JobId, NodeId
from services.contract.words.states import PoolKind, ReservationState


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)


class ReservationView(_View):
    """Nodes that a pool was asked for, all or none of them."""

    id: str
    state: ReservationState
    node_ids: tuple[NodeId, ...]
    job_id: JobId | None = Field(description="for which it was made; null: found at the pool")
    reason: str = Field(description="what the pool said last, or why it is given back")
    requested_at: datetime
    ready_at: datetime | None = Field(description="when all nodes had joined")


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


class PoolList(_View):
    """All pools, in the order in which they are asked."""

    items: tuple[PoolView, ...]
