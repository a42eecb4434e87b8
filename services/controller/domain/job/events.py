"""What can happen to a job besides the facts of agents: requests of people, and the reconciler's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fsdp_core.plan.model import ShardingPlan
from services.contract.api.plan_views import JobEstimate
from services.contract.api.requests import JobPatch
from services.contract.api.views import StopRequest
from services.contract.jobs.plans import GangPlan
from services.contract.messages.facts import (
    ChainDamaged,
    CheckpointBegan,
    CheckpointCorrupt,
    CheckpointExported,
    CheckpointLinked,
    CheckpointLost,
    CheckpointRetired,
    CheckpointUnread,
    CheckpointVerified,
    CheckpointVoted,
    CheckpointWaits,
    EpochBroken,
    Evaluated,
    ExportFailed,
    GangDiagnosed,
    GangEnded,
    GangLaunched,
    GangProgressed,
    JobFound,
    JobPurged,
    LaunchLoads,
    LaunchRefused,
    ReplicaLost,
    ReplicaReady,
    TraceFailed,
    TraceOrdered,
    TraceRecorded,
)


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
    """Continue from a named checkpoint, or from the latest committed one."""

    from_checkpoint: str | None = None


@dataclass(frozen=True)
class CheckpointAsked:
    """Take a checkpoint at the next agreed step."""


@dataclass(frozen=True)
class DiagnosisAsked:
    """Look into the ranks and say what they are doing."""


@dataclass(frozen=True)
class TraceAsked:
    """Record the next whole ``steps`` of these ranks; None: of all."""

    trace_id: str
    steps: int
    ranks: tuple[int, ...] | None


@dataclass(frozen=True)
class TraceOverdue:
    """An agent has not said for long that it told its ranks to record."""


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
class ExportAsked:
    """Have a node put the model of a checkpoint together."""

    checkpoint_id: str
    node_id: str


@dataclass(frozen=True)
class RemovalAsked:
    """Delete a checkpoint, by way of a node where its files are."""

    checkpoint_id: str
    node_id: str | None


@dataclass(frozen=True)
class FoundInStorage:
    """An agent told what storage holds of the job; ``incarnations`` are those of all known nodes."""

    fact: JobFound
    incarnations: Mapping[str, str]


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
class PlanAsked:
    """A plan is made for a job whose layout is open; ``reason`` says what that waits for.

    ``revision``: that of the spec for which it is made.
    """

    plan_id: str
    reason: str
    revision: int


@dataclass(frozen=True)
class PlanMade:
    """This layout was chosen for it, and this is what to expect."""

    sharding: ShardingPlan
    estimate: JobEstimate


@dataclass(frozen=True)
class PlanMissed:
    """Its plan failed, and this is why. ``unanswered``: asked again, the answer may be another."""

    plan_id: str
    reason: str
    unanswered: bool = False


@dataclass(frozen=True)
class SpecFaulted:
    """The node that was to profile the model found that no rank could build what the spec names."""

    plan_id: str
    reason: str
    node_id: str
    traceback: str | None = None


@dataclass(frozen=True)
class PlanRefused:
    """By its plan it cannot run: why, and what would help."""

    plan_id: str
    reason: str
    advice: str


@dataclass(frozen=True)
class NodeLost:
    """No rank on this node can be alive any more, or none that may still commit.

    ``last_step`` is the last one that telemetry told of, and ``seen_ms`` when it did: a lost node
    reports no end. ``farewell``: its agent was stopped in an orderly way, nobody's failure.
    ``trained_on_s``: for so long its ranks took part in steps after its agent was last heard of.
    """

    node_id: str
    reason: str
    last_step: int = 0
    seen_ms: int | None = None
    farewell: bool = False
    trained_on_s: float | None = None


@dataclass(frozen=True)
class AnswerOverdue:
    """An agent that lives has not answered a command for long: send it again."""


@dataclass(frozen=True)
class RanksSeen:
    """Nodes that joined have ranks of the newest attempt; that they launched them may not have been heard."""

    node_ids: tuple[str, ...]


@dataclass(frozen=True)
class ClockSetBack:
    """The clock of Redis was set back: moments of the job lie ahead of it."""

    by_ms: int


@dataclass(frozen=True)
class PatchAsked:
    """Change what may be changed of the spec, if its revision is one of these (None: any)."""

    patch: JobPatch
    revisions: frozenset[int] | None = None


@dataclass(frozen=True)
class PurgeAsked:
    """Remove the job and all its checkpoints, by the hands of this node's agent."""

    node_id: str


@dataclass(frozen=True)
class MoveAsked:
    """Drain the gang; the job goes on elsewhere or later, at no cost to its restart budget.

    ``by``: the job that needs the room, the node that is drained, or with how many ranks it is to
    go on; ``words`` say so.
    """

    cause: Literal["preempted", "node_drained", "resized"]
    by: str
    words: str
    grace_s: float


@dataclass(frozen=True)
class HoldAsked:
    """A clone begins with this checkpoint: keep it."""

    checkpoint_id: str
    holder: str


@dataclass(frozen=True)
class HoldReleased:
    """The clone no longer needs it."""

    checkpoint_id: str
    holder: str


@dataclass(frozen=True)
class OriginReleased:
    """This clone has a committed checkpoint of its own, and no longer needs its origin's."""


GangFact = (
    GangLaunched
    | LaunchLoads
    | LaunchRefused
    | GangProgressed
    | CheckpointBegan
    | CheckpointVoted
    | CheckpointWaits
    | CheckpointLinked
    | CheckpointLost
    | CheckpointRetired
    | CheckpointVerified
    | CheckpointCorrupt
    | CheckpointUnread
    | CheckpointExported
    | ExportFailed
    | TraceOrdered
    | TraceRecorded
    | TraceFailed
    | ChainDamaged
    | JobPurged
    | Evaluated
    | GangDiagnosed
    | ReplicaReady
    | ReplicaLost
    | EpochBroken
    | GangEnded
)
JobEvent = (
    PauseAsked
    | CancelAsked
    | KillAsked
    | ResumeAsked
    | CheckpointAsked
    | DiagnosisAsked
    | TraceAsked
    | TraceOverdue
    | PinAsked
    | VerifyAsked
    | ExportAsked
    | RemovalAsked
    | FoundInStorage
    | GangPlaced
    | PlacementDelayed
    | PlanAsked
    | PlanMade
    | PlanMissed
    | PlanRefused
    | SpecFaulted
    | NodeLost
    | AnswerOverdue
    | RanksSeen
    | ClockSetBack
    | PatchAsked
    | PurgeAsked
    | MoveAsked
    | HoldAsked
    | HoldReleased
    | OriginReleased
    | GangFact
)
