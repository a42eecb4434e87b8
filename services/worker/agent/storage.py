"""What an agent does to a job's commit chain: open, commit, retire. Blocking: run in a thread."""

import secrets
import shutil
from pathlib import Path

import structlog

from services.contract.commit_chain import ChainError, CommitChain
from services.contract.durable import sync_folder
from services.contract.manifests import AttemptOpened, CheckpointDeleted, Manifest
from services.contract.messages.commands import CommitCheckpoint, PurgeJob, RetireCheckpoint
from services.contract.messages.facts import (
    CheckpointLinked,
    CheckpointLost,
    CheckpointRetired,
    JobPurged,
)

_log = structlog.get_logger()


class ShardError(ChainError):
    """A shard file is not what its rank voted for."""


class Storage:
    """The checkpoints of all jobs below one root, on behalf of one node.

    Args:
        root: The storage root.
        node_id: Who reports.
    """

    def __init__(self, root: Path, node_id: str) -> None:
        self.root = root
        self._node_id = node_id

    def open_attempt(self, job_id: str, fence: int) -> None:
        """Open the attempt in the job's chain; from then on older ones can commit nothing.

        So what they wrote and did not commit is removed: the new attempt may need its room.

        Raises:
            FencedError: A newer attempt is open.
            ChainError: The chain is damaged.
            OSError: The storage refuses.
        """
        chain = CommitChain(self.root, job_id)
        chain.append(AttemptOpened(job_id=job_id, fence=fence))
        for folder in chain.abandoned():
            try:
                shutil.rmtree(folder)
            except OSError as error:  # a rank of an older attempt may still write there
                _log.warning("not_removed", folder=str(folder), why=str(error))
            else:
                _log.info("uncommitted_checkpoint_removed", checkpoint=folder.name)

    def commit(self, command: CommitCheckpoint) -> CheckpointLinked | CheckpointLost:
        """Link the manifest, if every shard file lies there with its size."""
        manifest = command.manifest
        chain = CommitChain(self.root, command.job_id)
        try:
            # One that is linked stays linked, whatever became of its files since.
            if manifest not in chain.records():
                _check_shards(manifest, chain.shard_folder(manifest.checkpoint_id))
            number = chain.append(manifest)
        except (ChainError, OSError) as error:
            linked = _number_of(manifest, chain)
            if linked is None:
                return self._lost(command, error)
            # The link is the commit, whatever failed behind it.
            _log.warning("failed_behind_a_link", checkpoint=manifest.checkpoint_id, why=str(error))
            number = linked
        return CheckpointLinked(
            job_id=command.job_id,
            fence=command.fence,
            node_id=self._node_id,
            number=number,
            manifest=manifest,
        )

    def retire(self, command: RetireCheckpoint) -> CheckpointRetired:
        """Link the deletion, then remove the files: never the other way round.

        Raises:
            FencedError: A newer attempt is open; the controller asks again with its fence.
            ChainError: The chain is damaged.
            OSError: The storage refuses.
        """
        chain = CommitChain(self.root, command.job_id)
        chain.append(
            CheckpointDeleted(
                job_id=command.job_id, fence=command.fence, checkpoint_id=command.checkpoint_id
            )
        )
        folder = chain.shard_folder(command.checkpoint_id)
        if folder.exists():
            shutil.rmtree(folder)
        return CheckpointRetired(
            job_id=command.job_id,
            fence=command.fence,
            node_id=self._node_id,
            checkpoint_id=command.checkpoint_id,
        )

    def _lost(self, command: CommitCheckpoint, error: Exception) -> CheckpointLost:
        return CheckpointLost(
            job_id=command.job_id,
            fence=command.fence,
            node_id=self._node_id,
            checkpoint_id=command.manifest.checkpoint_id,
            reason=str(error),
        )


def _number_of(manifest: Manifest, chain: CommitChain) -> int | None:
    try:
        return list(chain.records()).index(manifest) + 1
    except (ValueError, ChainError):
        return None


def _check_shards(manifest: Manifest, folder: Path) -> None:
    for shard in manifest.shards:
        size = (folder / shard.name).stat().st_size
        if size != shard.bytes:
            raise ShardError(
                f"shard {shard.name} of rank {shard.rank} has {size} bytes, not the "
                f"{shard.bytes} that the rank voted for"
            )


def purge(storage: Storage, command: PurgeJob, node_id: str) -> JobPurged:
    """Remove all that storage holds of the job; a job of which it holds nothing is purged.

    A record above the job's newest attempt is linked first, so that whatever of it still lives can
    commit nothing; then its folder is renamed, so that it is gone at once, however long its files
    take to be removed.
    """
    folder = storage.root / command.job_id
    error = None
    try:
        if folder.exists():
            opened = AttemptOpened(job_id=command.job_id, fence=command.fence + 1)
            CommitChain(storage.root, command.job_id).append(opened)
            folder.rename(storage.root / f".purged-{command.job_id}-{secrets.token_hex(8)}")
            sync_folder(storage.root)
        for left in storage.root.glob(f".purged-{command.job_id}-*"):
            shutil.rmtree(left)
    except (ChainError, OSError) as failure:
        error = str(failure)
        _log.warning("purge_failed", job=command.job_id, why=error)
    return JobPurged(job_id=command.job_id, fence=command.fence, node_id=node_id, error=error)
