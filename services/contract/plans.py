"""Where a gang runs and how its model is sharded, as the API shows it and the ranks run it."""

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from fsdp_core.plan.model import ShardingPlan
from services.contract.ids import NodeId

_MICRO_BATCH_TOKENS: Final = 16_384
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


def default_micro_batch(per_rank: int, length: int) -> int:
    """Sequences of one pass where nobody chose: as many as keep it at 16 384 tokens or fewer.

    Beyond that a pass gains no speed, and its activations cost memory.

    Args:
        per_rank: Sequences of a step on a rank; the answer divides them.
        length: Tokens of a sequence.
    """
    # A batch may have a billion sequences: those above the bound are not looked at one by one.
    most = min(per_rank, _MICRO_BATCH_TOKENS // max(length, 1))
    return next((n for n in range(most, 0, -1) if per_rank % n == 0), 1)
