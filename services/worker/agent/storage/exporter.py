"""Has a process export a checkpoint, and tells what came of it."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

import structlog
from pydantic import ValidationError

from services.contract.messages.commands import ExportCheckpoint
from services.contract.messages.facts import CheckpointCorrupt, CheckpointExported, ExportFailed
from services.worker.agent.storage.export import ExportOutcome

_log = structlog.get_logger()


class Exporter:
    """Exports checkpoints of one storage root, on behalf of one node.

    Args:
        root: The storage root.
        node_id: Who reports.
        environment: Of the process: marked as this node's, without credentials.
    """

    def __init__(self, root: Path, node_id: str, environment: Mapping[str, str]) -> None:
        self._root = root
        self._node_id = node_id
        self._environment = dict(environment)

    async def export(
        self, command: ExportCheckpoint
    ) -> tuple[CheckpointExported | CheckpointCorrupt | ExportFailed, ...]:
        """Run the process to its end."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "services.worker.agent.storage.export"),
            *("--root", str(self._root)),
            *("--job", command.job_id),
            *("--checkpoint", command.checkpoint_id),
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
            outcome = ExportOutcome.model_validate_json(said)
        except ValidationError:
            last = complaints.decode(errors="replace").strip().splitlines()[-1:]
            why = f"its process exited with code {process.returncode}: {''.join(last)}"
            outcome = ExportOutcome(reason=why)
        return self._facts(command, outcome)

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
