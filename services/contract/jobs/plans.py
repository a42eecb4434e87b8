"""Where a gang runs and how its model is sharded, as the API shows it and the ranks run it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter

from fsdp_core.plan.model import ShardingPlan
from services.contract.words.ids import NodeId

_MICRO_BATCH_TOKENS: Final = 16_384
SHARDING_PLAN: TypeAdapter[ShardingPlan] = TypeAdapter(ShardingPlan)


class RankPlacement(BaseModel):
    """Where a rank runs: a node, its local rank there, its device (``cpu`` or ``cuda:<index>``)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rank: int = Field(ge=0)
    node_id: NodeId
    local_rank: int = Field(ge=0)
    # Of as many digits as the index of a device can have: Python makes no number of thousands of them.
    device: str = Field(pattern=r"^(cpu|cuda:[0-9]{1,19})$")


class Taken(NamedTuple):
    """What a gang takes of one node: so many CPU slots, and the accelerators of these indices."""

    cpu_slots: int
    accelerators: frozenset[int]


def taken_by(ranks: Iterable[RankPlacement]) -> Mapping[NodeId, Taken]:
    """What these ranks take of each node."""
    slots: Counter[NodeId] = Counter()
    accelerators: dict[NodeId, set[int]] = {}
    for seat in ranks:
        indices = accelerators.setdefault(seat.node_id, set())
        if seat.device == "cpu":
            slots[seat.node_id] += 1
        else:
            indices.add(int(seat.device.removeprefix("cuda:")))
    return {node: Taken(slots[node], frozenset(found)) for node, found in accelerators.items()}


class GangPlan(BaseModel):
    """Where and how the ranks of one attempt run."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    device_type: Literal["cpu", "cuda"]
    sharding: ShardingPlan
    # A fault an item of what a rank wrote in a record's place would take more memory than there is.
    ranks: Annotated[tuple[RankPlacement, ...], FailFast()]

    @property
    def world_size(self) -> int:
        """How many ranks the gang has."""
        return len(self.ranks)

    @property
    def replica_size(self) -> int:
        """How many ranks a replica has; those of replica 0 come first, then those of 1, and so on."""
        return self.sharding.mesh.dp_shard * self.sharding.mesh.tp

    @cached_property
    def taken(self) -> Mapping[NodeId, Taken]:
        """What it takes of each node; kept, for the leader asks at each look."""
        return taken_by(self.ranks)

    @cached_property
    def ranks_by_node(self) -> Mapping[NodeId, frozenset[int]]:
        """The ranks of each node; kept, for each of a thousand nodes tells of its own."""
        found: dict[NodeId, set[int]] = {}
        for seat in self.ranks:
            found.setdefault(seat.node_id, set()).add(seat.rank)
        return {node: frozenset(ranks) for node, ranks in found.items()}

    @cached_property
    def text(self) -> str:
        """As JSON; kept, for a thousand ranks are most of what the view of their job takes."""
        return self.model_dump_json()


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
