"""What can happen to a gang on its node, and what may have to be done then, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from services.contract.messages.base import Address
from services.contract.messages.commands import RecordTrace, StopGang
from services.contract.messages.facts import Fact, TraceFailed
from services.contract.messages.findings import Findings
from services.contract.messages.rank_pipe import (
    RankMessage,
    RankOrder,
    RankVote,
    ReplicaSet,
)
from services.worker.agent.telemetry.hang import (
    Mark,
    Stall,
)

# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MessageCame:
    """A line on a rank's pipe."""

    rank: int
    message: RankMessage


@dataclass(frozen=True)
class Misbehaved:
    """A rank did ``what`` no rank of ours does, in words that follow "rank 1 …"."""

    rank: int
    what: str


@dataclass(frozen=True)
class VoteChecked:
    """The shard for which a rank voted was read; ``fault``: it is not what was voted for."""

    rank: int
    vote: RankVote
    fault: str | None


@dataclass(frozen=True)
class VoteWaits:
    """``condition`` prevents for now that all nodes see the shard for which a rank voted: it is tried again."""

    rank: int
    vote: RankVote
    condition: str


@dataclass(frozen=True)
class Exited:
    """A rank was reaped. ``by_itself``: it was dying before any signal of ours.

    ``held``: it was not, long after it was killed: the kernel does not let it end.
    """

    rank: int
    exit_code: int | None
    signal: int | None
    by_itself: bool = False
    held: bool = False


@dataclass(frozen=True)
class Stepped:
    """A rank's board shows its first finished step of this attempt."""

    rank: int
    step: int


@dataclass(frozen=True)
class StopAsked:
    """The controller wants the gang to stop."""

    command: StopGang


@dataclass(frozen=True)
class CheckpointAsked:
    """The controller wants a checkpoint."""


@dataclass(frozen=True)
class TraceAsked:
    """The controller wants ranks to record their next steps."""

    command: RecordTrace


@dataclass(frozen=True)
class LaunchAsked:
    """The controller wants what was launched to be launched: it does not know how far it is."""


@dataclass(frozen=True)
class Condemned:
    """The gang must not live on: its attempt is fenced, or the agent stops."""

    reason: str


@dataclass(frozen=True)
class ReplicasSet:
    """The controller says which replicas take part."""

    replicas: ReplicaSet


@dataclass(frozen=True)
class ReplicaLaunched:
    """The ranks of a lost replica were started again: their process ids, and where the first listens."""

    replica: int
    life: int
    pids: Mapping[int, int]
    store: Address


@dataclass(frozen=True)
class DiagnosisAsked:
    """The controller wants to know what the ranks are doing."""


@dataclass(frozen=True)
class LookedAt:
    """The boards were read: what they show, by rank, and the median time of the last steps.

    ``stopped``: the ranks whose processes are stopped. ``cut_off``: those that meet the others and send to a link
    that carries nothing.
    """

    marks: Mapping[int, Mark]
    usual_step_s: float | None = None
    stopped: frozenset[int] = frozenset()
    cut_off: frozenset[int] = frozenset()


@dataclass(frozen=True)
class LookedInto:
    """The ranks were looked into, as ``LookInto`` asked."""

    findings: Findings


@dataclass(frozen=True)
class Ticked:
    """Time passes."""


Event = (
    MessageCame
    | Misbehaved
    | VoteChecked
    | VoteWaits
    | Exited
    | Stepped
    | StopAsked
    | CheckpointAsked
    | TraceAsked
    | Condemned
    | LaunchAsked
    | ReplicasSet
    | ReplicaLaunched
    | DiagnosisAsked
    | LookedAt
    | LookedInto
    | Ticked
)


# --- effects ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tell:
    """Append a fact."""

    fact: Fact


@dataclass(frozen=True)
class CheckVote:
    """Read the shard for which a rank voted; answered by ``VoteChecked``."""

    rank: int
    vote: RankVote


@dataclass(frozen=True)
class Instruct:
    """Write an order on the pipes of ``ranks``."""

    ranks: tuple[int, ...]
    order: RankOrder


@dataclass(frozen=True)
class DropTrace:
    """Remove what a rank that is dead had not finished of a trace, then append the fact."""

    rank: int
    trace_id: str
    fact: TraceFailed


@dataclass(frozen=True)
class Kill:
    """SIGKILL the process groups of ``ranks``."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class TellLost:
    """Tell that a replica is lost, and how its ranks ended."""

    replica: int


@dataclass(frozen=True)
class LookInto:
    """Collect the stacks of all live ranks; answered by ``LookedInto``. They are left running."""

    why: Literal["asked", "hang"]
    stall: Stall


Effect = Tell | CheckVote | Instruct | DropTrace | Kill | TellLost | LookInto
