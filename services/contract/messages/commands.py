"""What the controller orders an agent to do: entries of the agent's inbox."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from services.contract.jobs.plans import GangPlan
from services.contract.jobs.specs import CarriedSpec
from services.contract.jobs.traces import MOST_STEPS, TracedRanks
from services.contract.messages.base import Address, OfAttempt
from services.contract.messages.probing import MeasureNode, ProbeModel
from services.contract.messages.rank_pipe import ReplicaSet
from services.contract.redis.redis_keys import telemetry_name
from services.contract.storage.manifests import Manifest
from services.contract.words.bounds import AtMostOnePerRank
from services.contract.words.ids import CheckpointId, TraceId
from services.contract.words.states import ExitReason, JobState


class NamesTelemetry(OfAttempt):
    """Whoever gets it writes telemetry of the job, under a name that has ``telemetry_secret`` in it."""

    telemetry_secret: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$", repr=False)] = ""

    @property
    def telemetry_name(self) -> str:
        """What its keys in Redis have in place of the job's id."""
        return telemetry_name(self.job_id, self.telemetry_secret)


class LaunchGang(NamesTelemetry):
    """Open the attempt in the commit chain, then start this node's ranks of it.

    ``resume_from`` names the committed checkpoint that every rank loads before its first step.
    ``owner`` and ``created_ms`` go into storage, where the job is found again without Redis.
    ``store`` is where rank 0 listens for the others; None for the node of rank 0, which opens it.
    """

    kind: Literal["launch_gang"] = "launch_gang"
    spec: CarriedSpec
    plan: GangPlan
    resume_from: CheckpointId | None = None
    owner: str = "local"
    created_ms: int = Field(default=0, ge=0)
    store: Address | None = None


class LoadCheckpoint(OfAttempt):
    """Have the checkpoint on this node, where ranks of the attempt are about to be launched. It is not answered."""

    kind: Literal["load_checkpoint"] = "load_checkpoint"
    checkpoint_id: CheckpointId


class StopGang(OfAttempt):
    """Stop all ranks of the attempt on this node.

    ``drain``: finish the agreed step, checkpoint as asked, exit; ranks that still live after
    ``grace_s`` seconds are killed. ``kill``: SIGKILL at once; with ``look`` they are looked into first, for on
    another node of the gang they made no progress.
    """

    kind: Literal["stop_gang"] = "stop_gang"
    mode: Literal["drain", "kill"]
    checkpoint: Literal["required", "best_effort", "none"] = "best_effort"
    grace_s: float = Field(default=60.0, ge=0)
    look: bool = False


class SetReplicas(OfAttempt):
    """Tell the ranks of all members on this node who takes part from now on. It is not answered."""

    kind: Literal["set_replicas"] = "set_replicas"
    replicas: ReplicaSet


class ReturnReplica(OfAttempt):
    """Start the ranks of a lost replica of this node again; ``life`` counts its launches from 1."""

    kind: Literal["return_replica"] = "return_replica"
    replica: int = Field(ge=0)
    life: int = Field(ge=2)


class TakeCheckpoint(OfAttempt):
    """Take a checkpoint at the next step on which the ranks agree, and go on."""

    kind: Literal["take_checkpoint"] = "take_checkpoint"


class DiagnoseGang(OfAttempt):
    """Look into all ranks of the attempt on this node and tell; they go on."""

    kind: Literal["diagnose_gang"] = "diagnose_gang"


class RecordTrace(OfAttempt):
    """Have those of ``ranks`` that live on this node record their next ``steps`` whole steps.

    The agent says that it has told them; of each of them it tells what came of it.
    """

    kind: Literal["record_trace"] = "record_trace"
    trace_id: TraceId
    steps: int = Field(ge=1, le=MOST_STEPS)
    ranks: TracedRanks


class RemoveTraces(OfAttempt):
    """Remove the files of these traces, which their job no longer lists. It is not answered."""

    kind: Literal["remove_traces"] = "remove_traces"
    trace_ids: Annotated[tuple[TraceId, ...], AtMostOnePerRank]


class CommitCheckpoint(OfAttempt):
    """Every rank has voted: link this manifest into the commit chain."""

    kind: Literal["commit_checkpoint"] = "commit_checkpoint"
    manifest: Manifest


class RetireCheckpoint(OfAttempt):
    """Link the deletion of a committed checkpoint into the chain, then remove its shard files.

    ``fence`` is that of the job's newest attempt. ``kept``: the newest committed ones, for which retention
    gives it up; it stays unless the chain commits all of them, for any agent can say that it does.
    """

    kind: Literal["retire_checkpoint"] = "retire_checkpoint"
    checkpoint_id: CheckpointId
    kept: Annotated[tuple[CheckpointId, ...], AtMostOnePerRank] = ()


class VerifyCheckpoint(OfAttempt):
    """Read every shard of a committed checkpoint and compare it with its digest.

    ``fence`` is that of the job's newest attempt; any attempt's checkpoint may be named. ``owner``: the job's; a node
    reads a checkpoint of each in turn. A controller of the last release does not say.
    """

    kind: Literal["verify_checkpoint"] = "verify_checkpoint"
    checkpoint_id: CheckpointId
    owner: str = ""


class ExportCheckpoint(OfAttempt):
    """Put the model of a committed checkpoint together as whole tensors, below the job's folder.

    ``owner`` is as of ``VerifyCheckpoint``.
    """

    kind: Literal["export_checkpoint"] = "export_checkpoint"
    checkpoint_id: CheckpointId
    owner: str = ""


class KeepStanding(OfAttempt):
    """Write into the job's card where it is to stand if Redis loses it: see ``JobCard``.

    Void if a newer attempt has been opened. It is not answered.
    """

    kind: Literal["keep_standing"] = "keep_standing"
    standing: JobState
    reason: str = ""
    exit_reason: ExitReason | None = None


class CloseRecords(NamesTelemetry):
    """The job has ended: put its curve and output together in storage, and tell when they are there.

    ``fence`` is that of its newest attempt.
    """

    kind: Literal["close_records"] = "close_records"


class RecallRecords(NamesTelemetry):
    """Bring the job's curve and output back from storage into Redis, for whoever ``asked``.

    It is not answered by a fact: what was brought back lies beside what there is, until the controller
    puts both together. Its secret is not that of the telemetry which it lies beside.
    """

    kind: Literal["recall_records"] = "recall_records"
    asked: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class PurgeJob(OfAttempt):
    """Remove all that storage holds of a job that has ended. ``fence``: its newest attempt's."""

    kind: Literal["purge_job"] = "purge_job"


Command = Annotated[
    LaunchGang
    | StopGang
    | SetReplicas
    | ReturnReplica
    | TakeCheckpoint
    | LoadCheckpoint
    | DiagnoseGang
    | RecordTrace
    | RemoveTraces
    | CommitCheckpoint
    | RetireCheckpoint
    | VerifyCheckpoint
    | ExportCheckpoint
    | KeepStanding
    | CloseRecords
    | RecallRecords
    | PurgeJob
    | ProbeModel
    | MeasureNode,
    Field(discriminator="kind"),
]


COMMAND: TypeAdapter[Command] = TypeAdapter(Command)
