"""Carries out the commands that no gang does: on checkpoints, on models, on the node itself."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from services.contract.messages.commands import (
    CloseRecords,
    CommitCheckpoint,
    ExportCheckpoint,
    KeepStanding,
    PurgeJob,
    RecallRecords,
    RemoveTraces,
    RetireCheckpoint,
    VerifyCheckpoint,
)
from services.contract.messages.facts import (
    CheckpointLinked,
    CheckpointLost,
    CheckpointUnread,
    ExportFailed,
    Fact,
    JobPurged,
    LaunchRefused,
    TraceFailed,
)
from services.contract.messages.probing import MeasureNode, ModelProbed, ProbeModel
from services.contract.storage.commit_chain import ChainError
from services.worker.agent.host.reserve import in_removing_thread, in_storage_thread
from services.worker.agent.probes.prober import Prober
from services.worker.agent.probes.self_test import SelfTest
from services.worker.agent.storage.exporter import Exporter
from services.worker.agent.storage.job_storage import Storage, purge
from services.worker.agent.storage.records import RecordKeeper

Question = (
    CommitCheckpoint
    | RetireCheckpoint
    | RemoveTraces
    | VerifyCheckpoint
    | ExportCheckpoint
    | KeepStanding
    | PurgeJob
    | CloseRecords
    | RecallRecords
    | ProbeModel
    | MeasureNode
)
_REFUSALS: Final[Mapping[str, type[Fact]]] = {
    "launch_gang": LaunchRefused,
    "commit_checkpoint": CheckpointLost,
    "verify_checkpoint": CheckpointUnread,
    "export_checkpoint": ExportFailed,
    "record_trace": TraceFailed,
    "purge_job": JobPurged,
    "probe_model": ModelProbed,
}
_REFUSED_KEPT: Final = 1024
_log = structlog.get_logger()


class NodeCommands:
    """What this node answers with facts.

    Args:
        node_id: The node.
        storage: The checkpoints of all jobs.
        exporter: Puts their models together.
        prober: Profiles models.
        self_test: Measures the node.
        records: Curves and output between Redis and storage.
    """

    def __init__(
        self,
        node_id: str,
        storage: Storage,
        exporter: Exporter,
        prober: Prober,
        self_test: SelfTest,
        records: RecordKeeper,
    ) -> None:
        self._node_id = node_id
        self._storage = storage
        self._exporter = exporter
        self._prober = prober
        self._self_test = self_test
        self._records = records
        self._refused: dict[str, RetireCheckpoint] = {}

    @property
    def refused_removals(self) -> tuple[RetireCheckpoint, ...]:
        """The deletions that the storage refused, longest ago first."""
        return tuple(self._refused.values())

    async def to(self, command: Question, ranks_are_here: Callable[[], bool]) -> Sequence[Fact]:
        """Carry a command out, and answer with what is to be told."""
        facts: Sequence[Fact]
        match command:
            case ExportCheckpoint():
                facts = await self._exporter.export(command)
            case KeepStanding():
                facts = await self._keep_standing(command)
            case CloseRecords() | RecallRecords():
                facts = await self._records.carry_out(command)
            case ProbeModel():
                facts = (await self._prober.probe(command),)
            case MeasureNode():
                facts = (await self._self_test.measure(command, ranks_are_here),)
            case _:
                facts = await self._of_storage(command)
        return facts

    async def _of_storage(
        self,
        command: CommitCheckpoint | RetireCheckpoint | RemoveTraces | VerifyCheckpoint | PurgeJob,
    ) -> Sequence[Fact]:
        facts: Sequence[Fact]
        match command:
            case CommitCheckpoint():
                told = await in_storage_thread(self._storage.commit, command)
                found: Sequence[Fact] = ()
                if isinstance(told, CheckpointLinked):
                    found = await in_storage_thread(self._storage.found_since, command.job_id)
                facts = (*found, told)
            case RetireCheckpoint():
                facts = await self._retire(command)
            case RemoveTraces():
                await in_removing_thread(self._storage.remove_traces, command)
                facts = ()
            case VerifyCheckpoint():
                facts = await in_storage_thread(self._storage.verify, command)
            case PurgeJob():
                for checkpoint_id, each in tuple(self._refused.items()):
                    if each.job_id == command.job_id:
                        del self._refused[checkpoint_id]
                facts = (await in_removing_thread(purge, self._storage, command, self._node_id),)
        return facts

    def refusal(self, body: str, why: str) -> Fact | None:
        """What ends the wait for a command that this version cannot read; None if nothing does.

        Args:
            body: The command as it came.
            why: What is wrong with it.
        """
        try:
            said = json.loads(body)
            reason = f"this agent cannot read {said['kind']}: {why}; run the controller's version"
            if said["kind"] == "commit_checkpoint":
                said |= {"checkpoint_id": said["manifest"]["checkpoint_id"]}
            about = said | {
                "kind": _REFUSALS[said["kind"]].model_fields["kind"].default,
                "node_id": self._node_id,
                "reason": reason,
                "error": reason,
                "took_s": 0,
                "failure": {"code": "refused", "reason": reason},
            }
            return _REFUSALS[said["kind"]].model_validate(about)
        except (ValueError, TypeError, KeyError):
            return None  # what it asked, or of which job, cannot be made out

    async def put_together(self, job_id: str, fence: int) -> None:
        """An attempt begins: what those before it left of records becomes one file a kind."""
        await self._records.close_older(job_id, fence)

    def give_way(self) -> None:
        """Ranks are about to start."""
        self._self_test.give_way()

    async def _keep_standing(self, command: KeepStanding) -> Sequence[Fact]:
        try:
            await in_storage_thread(self._storage.keep_standing, command)
        except OSError as error:
            _log.warning("standing_not_kept", job=command.job_id, why=str(error))
        return ()

    async def remove_again(self, command: RetireCheckpoint) -> Sequence[Fact]:
        """Carry a deletion out that the storage refused; nothing, where its job was purged meanwhile.

        Nor where it was refused again meanwhile, as one of a newer attempt: that one counts.
        """
        if self._refused.get(command.checkpoint_id) != command:
            return ()
        try:
            is_there = await in_storage_thread(self._has_job, command.job_id)
        except OSError:
            return ()
        if not is_there:  # another node did it: a record would bring the job's folder back
            del self._refused[command.checkpoint_id]
            return ()
        return await self._retire(command)

    def _has_job(self, job_id: str) -> bool:
        self._storage.files.require_known()  # where nothing is mounted, no job was purged
        return self._storage.files.holds(self._storage.root / job_id)

    async def _retire(self, command: RetireCheckpoint) -> Sequence[Fact]:
        self._refused.pop(command.checkpoint_id, None)
        try:
            return await in_removing_thread(self._storage.retire, command)
        except (ChainError, OSError) as error:
            _log.warning("retire_failed", checkpoint=command.checkpoint_id, why=str(error))
            if isinstance(error, OSError):
                self._refused[command.checkpoint_id] = command
            while len(self._refused) > _REFUSED_KEPT:
                del self._refused[next(iter(self._refused))]
            return ()
