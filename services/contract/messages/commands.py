"""What the controller orders an agent to do: entries of the agent's inbox."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from services.contract.ids import CheckpointId
from services.contract.manifests import Manifest
from services.contract.messages.base import Address, OfAttempt
from services.contract.plans import GangPlan
from services.contract.specs import JobSpec


class LaunchGang(OfAttempt):
    """Open the attempt in the commit chain, then start this node's ranks of it.

    ``resume_from`` names the committed checkpoint that every rank loads before its first step.
    ``store`` is where rank 0 listens for the others; None for the node of rank 0, which opens it.
    """

    kind: Literal["launch_gang"] = "launch_gang"
    spec: JobSpec
    plan: GangPlan
    resume_from: CheckpointId | None = None
    store: Address | None = None


class StopGang(OfAttempt):
    """Stop all ranks of the attempt on this node.

    ``drain``: finish the agreed step, checkpoint as asked, exit; ranks that still live after
    ``grace_s`` seconds are killed. ``kill``: SIGKILL at once.
    """

    kind: Literal["stop_gang"] = "stop_gang"
    mode: Literal["drain", "kill"]
    checkpoint: Literal["required", "best_effort", "none"] = "best_effort"
    grace_s: float = Field(default=60.0, ge=0)


class TakeCheckpoint(OfAttempt):
    """Take a checkpoint at the next step on which the ranks agree, and go on."""

    kind: Literal["take_checkpoint"] = "take_checkpoint"


class DiagnoseGang(OfAttempt):
    """Look into all ranks of the attempt on this node and tell; they go on."""

    kind: Literal["diagnose_gang"] = "diagnose_gang"


class CommitCheckpoint(OfAttempt):
    """Every rank has voted: link this manifest into the commit chain."""

    kind: Literal["commit_checkpoint"] = "commit_checkpoint"
    manifest: Manifest


class RetireCheckpoint(OfAttempt):
    """Link the deletion of a committed checkpoint into the chain, then remove its shard files.

    ``fence`` is that of the job's newest attempt.
    """

    kind: Literal["retire_checkpoint"] = "retire_checkpoint"
    checkpoint_id: CheckpointId


class PurgeJob(OfAttempt):
    """Remove all that storage holds of a job that has ended. ``fence``: its newest attempt's."""

    kind: Literal["purge_job"] = "purge_job"


Command = Annotated[
    LaunchGang
    | StopGang
    | TakeCheckpoint
    | DiagnoseGang
    | CommitCheckpoint
    | RetireCheckpoint
    | PurgeJob,
    Field(discriminator="kind"),
]


COMMAND: TypeAdapter[Command] = TypeAdapter(Command)
