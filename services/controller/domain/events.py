"""What can happen to a job besides the facts of agents: wishes of people, and the reconciler's."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.contract.messages.facts import (
    ChainDamaged,
    CheckpointBegan,
    CheckpointCorrupt,
    CheckpointLinked,
    CheckpointLost,
    CheckpointRetired,
    CheckpointUnread,
    CheckpointVerified,
    CheckpointVoted,
    Evaluated,
    GangEnded,
    GangLaunched,
    GangProgressed,
    LaunchRefused,
)
from services.contract.plans import GangPlan
from services.contract.views import StopRequest


@dataclass(frozen=True)
class PauseAsked:
    """Stop so that the job can go on later."""

    stop: StopRequest


@dataclass(frozen=True)
class CancelAsked:
    """Stop for good, orderly."""

    stop: StopRequest


@dataclass(frozen=True)
class KillAsked:
    """Stop for good, at once."""


@dataclass(frozen=True)
class ResumeAsked:
    """Go on, from a named checkpoint or from the latest committed one."""

    from_checkpoint: str | None = None


@dataclass(frozen=True)
class CheckpointAsked:
    """Take a checkpoint at the next agreed step."""


@dataclass(frozen=True)
class PinAsked:
    """Keep a committed checkpoint until it is unpinned, or (``pin`` False) no longer."""

    checkpoint_id: str
    pin: bool = True


@dataclass(frozen=True)
class VerifyAsked:
    """Have a node read every file of a checkpoint."""

    checkpoint_id: str
    node_id: str


@dataclass(frozen=True)
class RemovalAsked:
    """Delete a checkpoint, by way of a node where its files are."""

    checkpoint_id: str
    node_id: str | None


@dataclass(frozen=True)
class CheckpointHeld:
    """Another job begins from a checkpoint, or (``held`` False) no longer needs it."""

    checkpoint_id: str
    by_job: str
    held: bool = True


@dataclass(frozen=True)
class GangPlaced:
    """There is room: this plan, on agents of these incarnations (by node)."""

    plan: GangPlan
    incarnations: Mapping[str, str]


@dataclass(frozen=True)
class PlacementDelayed:
    """There is no room now, and this is why."""

    reason: str


@dataclass(frozen=True)
class NodeLost:
    """No rank on this node can be alive any more, or none that may still commit.

    ``last_step`` is the last one that telemetry told of: a lost node reports no end. ``farewell``:
    its agent was stopped in an orderly way, which is nobody's failure.
    """

    node_id: str
    reason: str
    last_step: int = 0
    farewell: bool = False


@dataclass(frozen=True)
class AnswerOverdue:
    """An agent that lives has not answered a command for long: send it again."""


GangFact = (
    GangLaunched
    | LaunchRefused
    | GangProgressed
    | CheckpointBegan
    | CheckpointVoted
    | CheckpointLinked
    | CheckpointLost
    | CheckpointRetired
    | CheckpointVerified
    | CheckpointCorrupt
    | CheckpointUnread
    | ChainDamaged
    | Evaluated
    | GangEnded
)
JobEvent = (
    PauseAsked
    | CancelAsked
    | KillAsked
    | ResumeAsked
    | CheckpointAsked
    | PinAsked
    | VerifyAsked
    | RemovalAsked
    | CheckpointHeld
    | GangPlaced
    | PlacementDelayed
    | NodeLost
    | AnswerOverdue
    | GangFact
)
