"""Where a gang runs and how its model is sharded, as the API shows it and the ranks run it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from fsdp_core.plan.model import ShardingPlan
from services.contract.ids import NodeId

SHARDING_PLAN: TypeAdapter[ShardingPlan] = TypeAdapter(ShardingPlan)


class RankPlacement(BaseModel):
    """One rank's seat: a node, its local rank there, its device (``cpu`` or ``cuda:<index>``)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rank: int = Field(ge=0)
    node_id: NodeId
    local_rank: int = Field(ge=0)
    device: str = Field(pattern=r"^(cpu|cuda:\d+)$")


class GangPlan(BaseModel):
    """All that the ranks of one attempt must know about where and how they run."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    device_type: Literal["cpu", "cuda"]
    sharding: ShardingPlan
    ranks: tuple[RankPlacement, ...]

    @property
    def world_size(self) -> int:
        """How many ranks the gang has."""
        return len(self.ranks)
