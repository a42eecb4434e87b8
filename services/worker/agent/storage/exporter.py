"""Has a process export a checkpoint, and tells what came of it."""

import asyncio
import sys
from collections.abc import Mapping

import structlog
from pydantic import ValidationError

from services.contract.messages.commands import ExportCheckpoint
from services.contract.messages.facts import CheckpointCorrupt, CheckpointExported, ExportFailed
from services.contract.storage.exports import EXPORT_MANIFEST
from services.worker.agent.host.removal import remove_what_can_be
from services.worker.agent.host.reserve import in_storage_thread
from services.worker.agent.storage.export import ExportOutcome, partial_folder
from services.worker.agent.storage.job_storage import Storage

_log = structlog.get_logger()


class Exporter:
    """Exports checkpoints of one storage root, on behalf of one node.

    Args:
        storage: The checkpoints of all jobs.
        node_id: Who reports.
        environment: Of the process: marked as this node's, without credentials.
    """

    def __init__(self, storage: Storage, node_id: str, environment: Mapping[str, str]) -> None:
        self._storage = storage
        self._node_id = node_id
        self._environment = dict(environment)

    async def export(
        self, command: ExportCheckpoint
    ) -> tuple[CheckpointExported | CheckpointCorrupt | ExportFailed, ...]:
        """Run the process to its end, on files of this node, and have all nodes see what it wrote."""
        # Of its own, for a gang may load the same.
        reader = f"export of {command.checkpoint_id}"
        try:
            await in_storage_thread(self._storage.bring, reader, command.checkpoint_id)
            outcome = await self._run(command)
            if outcome.reason is None:
                await in_storage_thread(self._publish, command, outcome)
        except OSError as error:
            outcome = ExportOutcome(reason=str(error))
        finally:
            # A rank that cuts a shard while it is mapped ends the process at once: a model's room would be lost.
            partial = partial_folder(
                self._storage.root, command.job_id, command.checkpoint_id, self._node_id
            )
            await in_storage_thread(remove_what_can_be, partial)
            self._storage.files.release(reader)
        return self._facts(command, outcome)

    def _publish(self, command: ExportCheckpoint, outcome: ExportOutcome) -> None:
        folder = self._storage.root / command.job_id / "exports" / command.checkpoint_id
        # The manifest last: it names whole files only.
        for name in (*outcome.files, EXPORT_MANIFEST):
            self._storage.files.publish(folder / name)
        self._storage.files.drop_copy(folder)

    async def _run(self, command: ExportCheckpoint) -> ExportOutcome:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "services.worker.agent.storage.export"),
            *("--root", str(self._storage.root)),
            *("--job", command.job_id),
            *("--checkpoint", command.checkpoint_id),
            *("--node", self._node_id),
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            said, complaints = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            raise
        try:
            return ExportOutcome.model_validate_json(said)
        except ValidationError:
            last = complaints.decode(errors="replace").strip().splitlines()[-1:]
            why = f"its process exited with code {process.returncode}: {''.join(last)}"
            return ExportOutcome(reason=why)

    def _facts(
        self, command: ExportCheckpoint, outcome: ExportOutcome
    ) -> tuple[CheckpointExported | CheckpointCorrupt | ExportFailed, ...]:
        about = {
            "job_id": command.job_id,
            "fence": command.fence,
            "node_id": self._node_id,
            "checkpoint_id": command.checkpoint_id,
        }
        if outcome.reason is None:
            done = {"files": outcome.files, "bytes": outcome.bytes}
            return (CheckpointExported.model_validate({**about, **done}),)
        _log.warning("export_failed", checkpoint=command.checkpoint_id, why=outcome.reason)
        failed = ExportFailed.model_validate({**about, "reason": outcome.reason})
        if outcome.corrupt_file is None:
            return (failed,)
        found = {"file": outcome.corrupt_file, "reason": outcome.reason}
        return (CheckpointCorrupt.model_validate({**about, **found}), failed)
