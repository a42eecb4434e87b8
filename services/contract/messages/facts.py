"""What an agent tells the controller: entries of the stream of facts, each bounded in all its parts."""

from enum import IntEnum
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, ConfigDict, FailFast, Field, TypeAdapter, model_validator

from services.contract.messages.base import Address, Message, OfAttempt
from services.contract.messages.findings import Findings
from services.contract.messages.probing import ModelProbed, NodeMeasured
from services.contract.messages.rank_pipe import LossUnit, ThroughputUnit
from services.contract.storage.job_cards import JobCard
from services.contract.storage.manifests import DamagedRecord, Manifest, ShardFile
from services.contract.words.bounds import (
    MOST_TOLD_ATTEMPTS,
    Addresses,
    AtMostOnePerRank,
    AtMostOnePerRankOfANode,
    Baselines,
    Code,
    Digest,
    ErrorTypes,
    EvaluationMetrics,
    FewDevices,
    FewGangs,
    Incarnation,
    Name,
    Notices,
    Positive,
    Text,
    Traceback,
    Versions,
    Whole,
)
from services.contract.words.ids import CheckpointId, NodeId, TraceId, job_of_checkpoint

AGENT_DIED: Final = "the agent of its node died, and the rank with it"
"""The error of an exit that only the boards can tell of."""
OLDER_COPY: Final = "Redis lost the newest attempts of this job, and gives their numbers again"
"""The condition of attempts whose number had been given before: that of a later one will not have been."""

_LONGEST_S: Final = 1e9


class Device(Message):
    """One accelerator of a node."""

    index: Whole
    name: Name
    memory_bytes: Whole


def _each_once(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    # Of two with one index a node would count as having a device free that no rank can be given.
    if len({device.index for device in devices}) < len(devices):
        raise ValueError("two accelerators have the same index")
    return devices


class Inventory(Message):
    """The resources of a node. ``cpu_slots`` is how many CPU ranks it runs at a time.

    ``storage_id``: the name that the storage of checkpoints has for all nodes that share it; None: unknown.
    ``storage_fault``: why no job can use it, as far as its agent has tried.
    """

    hostname: Name
    cpu_slots: Whole
    cpu_count: Positive
    memory_bytes: Whole
    accelerators: Annotated[
        tuple[Device, ...], FailFast(), FewDevices, AfterValidator(_each_once)
    ] = ()
    versions: Versions = Field(default_factory=dict)
    storage_id: Name | None = None
    storage_fault: Text | None = None


class RunningGang(OfAttempt):
    """A gang of which an agent has live ranks, named when the agent (re)joins."""

    ranks: Annotated[tuple[Whole, ...], FailFast(), AtMostOnePerRankOfANode]


class NodeJoined(Message):
    """An agent is there, with this inventory and these gangs.

    ``incarnation`` differs in each life of an agent; every gang of an earlier life is gone.
    ``number`` counts the joins of that life: a fact may be written twice, and the second time it
    speaks of the past.
    """

    kind: Literal["node_joined"] = "node_joined"
    node_id: NodeId
    incarnation: Incarnation
    number: Whole = 0
    inventory: Inventory
    gangs: Annotated[tuple[RunningGang, ...], FailFast(), FewGangs] = ()


class NodeLeaving(Message):
    """An agent was told to stop: it takes no more gangs, and leaves once it has none, or after ``grace_s``."""

    kind: Literal["node_leaving"] = "node_leaving"
    node_id: NodeId
    incarnation: Incarnation
    grace_s: float = Field(ge=0, le=86_400)


class NodeLeft(Message):
    """An agent stops of its own will: it takes no more commands and is ending its ranks."""

    kind: Literal["node_left"] = "node_left"
    node_id: NodeId
    incarnation: Incarnation


class _GangFact(OfAttempt):
    node_id: NodeId


class GangLaunched(_GangFact):
    """All ranks of the attempt on this node are spawned: ``pids`` by rank.

    ``store``: where rank 0 listens for the others; None from nodes without rank 0.
    ``addresses``: of the interface by which its ranks connect to those of other nodes.
    """

    kind: Literal["gang_launched"] = "gang_launched"
    pids: Annotated[dict[Whole, Whole], AtMostOnePerRankOfANode]
    store: Address | None = None
    addresses: Addresses = ()


class LaunchLoads(_GangFact):
    """Before it starts its ranks, an agent loads the checkpoint from the bucket: so many bytes of so many so far.

    Told every few seconds while bytes come.
    """

    kind: Literal["launch_loads"] = "launch_loads"
    bytes: Whole
    of: Whole


class LaunchRefused(_GangFact):
    """The attempt could not be started on this node; no rank of it lives here.

    ``condition``: what prevented it and may pass, such as a full disk of the node.
    """

    kind: Literal["launch_refused"] = "launch_refused"
    reason: Text
    condition: Text | None = None


class GangProgressed(_GangFact):
    """The ranks on this node finished their first step in this attempt (``step`` counts from 1).

    ``step`` 0: they run a script, which has not told of a step yet.
    ``throughput_unit`` and ``loss_unit`` are those that the ranks told; None: they did not.
    ``notices``: what of the job has no effect. Told again where the ranks tell something late.
    """

    kind: Literal["gang_progressed"] = "gang_progressed"
    step: Whole
    throughput_unit: ThroughputUnit | None = None
    loss_unit: LossUnit | None = None
    notices: Notices = ()


class CheckpointBegan(_GangFact):
    """Ranks began to write a checkpoint of the state after ``step`` steps."""

    kind: Literal["checkpoint_began"] = "checkpoint_began"
    checkpoint_id: CheckpointId
    step: Whole


class CheckpointVoted(_GangFact):
    """One rank's shard is written, synced and digested: it votes for the commit.

    ``evaluation``: figures of the validation pass after that step, if there was one.
    """

    kind: Literal["checkpoint_voted"] = "checkpoint_voted"
    checkpoint_id: CheckpointId
    step: Whole
    shard: ShardFile
    loss: float | None = None
    data_digest: Digest = ""
    evaluation: EvaluationMetrics = Field(default_factory=dict)


class CheckpointLinked(_GangFact):
    """The manifest stands in the commit chain at ``number``: the checkpoint is committed."""

    kind: Literal["checkpoint_linked"] = "checkpoint_linked"
    number: Positive
    manifest: Manifest


class CheckpointWaits(_GangFact):
    """A rank could not write its shard of a run's last checkpoint, and tries again until it can.

    ``condition``: what of the node prevents it. Told at each try.
    """

    kind: Literal["checkpoint_waits"] = "checkpoint_waits"
    checkpoint_id: CheckpointId
    step: Whole
    condition: Text


class CheckpointLost(_GangFact):
    """A checkpoint will not be committed: a shard was not written, or the chain refused.

    ``condition``: what of the node prevented the commit and may pass; it may be commanded again.
    """

    kind: Literal["checkpoint_lost"] = "checkpoint_lost"
    checkpoint_id: CheckpointId
    reason: Text
    condition: Text | None = None


class CheckpointRetired(_GangFact):
    """A checkpoint's deletion stands in the chain and its files are removed."""

    kind: Literal["checkpoint_retired"] = "checkpoint_retired"
    checkpoint_id: CheckpointId


class CheckpointVerified(_GangFact):
    """Every shard of a committed checkpoint was read and has the digest that was voted for."""

    kind: Literal["checkpoint_verified"] = "checkpoint_verified"
    checkpoint_id: CheckpointId
    bytes: Whole


class CheckpointCorrupt(_GangFact):
    """A committed checkpoint is not what was committed.

    ``file`` is the first one that is missing or differs, below the job's folder.
    """

    kind: Literal["checkpoint_corrupt"] = "checkpoint_corrupt"
    checkpoint_id: CheckpointId
    file: Name
    reason: Text


class CheckpointUnread(_GangFact):
    """A checkpoint could not be looked at from this node, which says nothing about it."""

    kind: Literal["checkpoint_unread"] = "checkpoint_unread"
    checkpoint_id: CheckpointId
    reason: Text


class CheckpointExported(_GangFact):
    """The model of a checkpoint lies in ``files``, below ``<job>/exports/<checkpoint>``."""

    kind: Literal["checkpoint_exported"] = "checkpoint_exported"
    checkpoint_id: CheckpointId
    files: Annotated[tuple[Name, ...], FailFast(), AtMostOnePerRankOfANode]
    bytes: Whole


class ExportFailed(_GangFact):
    """A checkpoint could not be exported."""

    kind: Literal["export_failed"] = "export_failed"
    checkpoint_id: CheckpointId
    reason: Text


class TraceOrdered(_GangFact):
    """The ranks of a trace that live on this node are told to record."""

    kind: Literal["trace_ordered"] = "trace_ordered"
    trace_id: TraceId


class TraceRecorded(_GangFact):
    """One rank's file of a trace is written: ``path`` on this node, of the steps first to last."""

    kind: Literal["trace_recorded"] = "trace_recorded"
    trace_id: TraceId
    rank: Whole
    path: Text
    bytes: Whole
    first_step: Whole
    last_step: Whole


class TraceFailed(_GangFact):
    """One rank, or without its number all ranks on this node, did not record; nothing is left."""

    kind: Literal["trace_failed"] = "trace_failed"
    trace_id: TraceId
    rank: Whole | None = None
    reason: Text


class ChainDamaged(_GangFact):
    """Records of the job's commit chain cannot be read; the others hold."""

    kind: Literal["chain_damaged"] = "chain_damaged"
    records: Annotated[tuple[DamagedRecord, ...], FailFast(), AtMostOnePerRank]


class JobFound(_GangFact):
    """Storage holds a job of which Redis knows nothing. ``fence`` is the highest of its chain.

    ``manifests`` are its committed checkpoints by their number in the chain. ``is_running``: the
    ranks of that attempt live on this node, and ``last_step`` is the last that their boards show.
    ``is_all``: told before a launch, in one fact, of a chain without damage: it commits no others.
    """

    kind: Literal["job_found"] = "job_found"
    fence: int = Field(ge=1, le=MOST_TOLD_ATTEMPTS)
    card: JobCard
    manifests: Annotated[dict[Positive, Manifest], AtMostOnePerRankOfANode]
    damaged: Annotated[tuple[DamagedRecord, ...], FailFast(), AtMostOnePerRank] = ()
    is_running: bool = False
    last_step: Whole = 0
    is_all: bool = False

    @model_validator(mode="after")
    def _is_of_one_job(self) -> Self:
        # The job goes on from what it is told to have: another's would be loaded as its own.
        named = ((m.job_id, job_of_checkpoint(m.checkpoint_id)) for m in self.manifests.values())
        if any(of != (self.job_id, self.job_id) for of in named):
            raise ValueError(f"it names a checkpoint that is not of {self.job_id}")
        return self


class RecordsClosed(_GangFact):
    """Storage has all of the job's curve and output that there is: Redis need not keep them.

    ``events_to``: the id of the last of its events that is there, too; None: none is.
    """

    kind: Literal["records_closed"] = "records_closed"
    events_to: Annotated[str, Field(pattern=r"^[0-9]{1,14}-[0-9]{1,9}$")] | None = None


class JobPurged(_GangFact):
    """Storage holds nothing of the job any more; or, with ``error``, it may still hold some."""

    kind: Literal["job_purged"] = "job_purged"
    error: Text | None = None


class Evaluated(_GangFact):
    """A validation pass after ``step`` steps: mean loss over ``tokens`` tokens, or samples.

    ``baselines`` are losses of simple models on the same tokens, by name (such as ``bigram``);
    ``metrics`` are the user's. A loss that is no finite number is null, for JSON has no word for it.
    """

    kind: Literal["evaluated"] = "evaluated"
    step: Whole
    loss: float | None
    tokens: Positive
    baselines: Baselines = Field(default_factory=dict)
    metrics: EvaluationMetrics = Field(default_factory=dict)


class ExitStanding(IntEnum):
    """How an exit stands among the others of its gang; the lowest came first."""

    OWN_FAILURE = 0
    """An exception, an exit code, or a signal that was not ours."""
    ECHO = 1
    """An error that says that a peer was lost, or the abort that follows one."""
    VICTIM = 2
    """Killed by its agent while it was well."""
    FINISHED = 3
    """It had done all its work."""


class RankExit(Message):
    """How one rank ended. Exactly one of ``exit_code`` and ``signal`` is set.

    ``error`` and ``traceback`` are those of the exception that ended it, where there was one, and
    ``error_types`` the qualified names of its class and of those that it inherits from.
    ``order`` counts the exits and reported errors of a gang on a node: 0 came first. ``standing``
    compares exits across nodes: a failure of its own came before what echoes it. ``phase`` and
    ``step`` are the last on its board. ``drained``: it finished as asked by a stop command.
    ``early``: why it finished before the job's last step without being asked to.
    """

    rank: Whole
    pid: Whole
    exit_code: Code | None = None
    signal: Code | None = None
    order: Whole
    standing: ExitStanding = ExitStanding.OWN_FAILURE
    step: Whole
    phase: Name
    finished: bool = False
    drained: bool = False
    early: Text | None = None
    error: Text | None = None
    error_types: ErrorTypes = ()
    traceback: Traceback | None = None


class ReplicaReady(_GangFact):
    """All ranks of a replica have built their models and wait to be told who takes part.

    ``life`` counts its launches in this attempt, from 1. ``store``: where its first rank listens.
    """

    kind: Literal["replica_ready"] = "replica_ready"
    replica: Whole
    life: Positive
    store: Address


class ReplicaLost(_GangFact):
    """No rank of this life of a replica lives any more, and other ranks of the attempt may."""

    kind: Literal["replica_lost"] = "replica_lost"
    replica: Whole
    life: Positive
    exits: Annotated[tuple[RankExit, ...], FailFast(), AtMostOnePerRankOfANode] = ()


class EpochBroken(_GangFact):
    """The connections between replicas broke in this epoch, though none is dead as far as its ranks were told."""

    kind: Literal["epoch_broken"] = "epoch_broken"
    epoch: Positive


class GangDiagnosed(_GangFact):
    """What the agent found when it was asked to look into its ranks."""

    kind: Literal["gang_diagnosed"] = "gang_diagnosed"
    findings: Findings


class GangEnded(_GangFact):
    """No rank of the attempt lives on this node any more. Follows all other facts of it.

    ``hang`` is what was found before the gang was killed because it made no progress.
    ``oom_kills`` is how many processes the kernel killed for want of memory in the agent's control
    group while the gang lived.
    ``first_exit_s``: seconds from the first rank's exit to this report, by the agent's monotonic
    clock; None if the agent did not see it.
    """

    kind: Literal["gang_ended"] = "gang_ended"
    first_exit_s: float | None = Field(default=None, ge=0, le=_LONGEST_S)
    exits: Annotated[tuple[RankExit, ...], FailFast(), AtMostOnePerRankOfANode]
    last_step: Whole
    hang: Findings | None = None
    oom_kills: Whole = 0


Fact = Annotated[
    NodeJoined
    | NodeLeaving
    | NodeLeft
    | GangLaunched
    | LaunchLoads
    | LaunchRefused
    | GangProgressed
    | CheckpointBegan
    | CheckpointVoted
    | CheckpointLinked
    | CheckpointWaits
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
    | JobFound
    | RecordsClosed
    | JobPurged
    | Evaluated
    | ReplicaReady
    | ReplicaLost
    | EpochBroken
    | GangDiagnosed
    | GangEnded
    | ModelProbed
    | NodeMeasured,
    Field(discriminator="kind"),
]


# Its validator is made when the first fact comes: clients import this module for `Inventory`, and read no facts.
FACT: TypeAdapter[Fact] = TypeAdapter(
    Fact, config=ConfigDict(defer_build=True, hide_input_in_errors=True)
)
