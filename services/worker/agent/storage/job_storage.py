"""What an agent does in storage: open, commit, retire, verify. Blocking: run in a thread."""

import contextlib
import hashlib
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from services.contract.jobs.traces import traces_folder
from services.contract.messages.commands import (
    CommitCheckpoint,
    KeepStanding,
    LaunchGang,
    PurgeJob,
    RemoveTraces,
    RetireCheckpoint,
    VerifyCheckpoint,
)
from services.contract.messages.facts import (
    ChainDamaged,
    CheckpointCorrupt,
    CheckpointLinked,
    CheckpointLost,
    CheckpointRetired,
    CheckpointUnread,
    CheckpointVerified,
    JobFound,
    JobPurged,
    RunningGang,
)
from services.contract.storage.commit_chain import ChainError, CommitChain
from services.contract.storage.job_cards import JobCard, read_card, write_card
from services.contract.storage.manifests import (
    AttemptOpened,
    CheckpointDeleted,
    DamagedRecord,
    Manifest,
    ShardFile,
)
from services.contract.system.durable import (
    is_hollow,
    make_folders,
    node_condition,
    open_plain,
    sync_folder,
)
from services.contract.system.rank_user import RankUser
from services.contract.words.ids import job_of_checkpoint
from services.contract.words.states import JobState
from services.worker.agent.host.removal import remove_tree

_READ_BYTES: Final = 1 << 20
_log = structlog.get_logger()


class ShardError(ChainError):
    """A shard file is not what its rank voted for."""


class Storage:
    """The checkpoints of all jobs below one root, on behalf of one node.

    Args:
        root: The storage root.
        node_id: Who reports.
        ranks_are: The system user of ranks; None: this process's own.
    """

    def __init__(self, root: Path, node_id: str, ranks_are: RankUser | None = None) -> None:
        self.root = root
        self._node_id = node_id
        self._writing_cards = threading.Lock()
        self._ranks_are = ranks_are

    def open_attempt(self, command: LaunchGang) -> ChainDamaged | None:
        """Open the attempt in the job's chain; from then on older ones can commit nothing.

        So what they wrote and did not commit is removed: the new attempt may need its room.
        Returns what of the chain is damaged, if anything is.

        Raises:
            FencedError: A newer attempt is open.
            ChainError: The checkpoint that is to be loaded cannot be in this storage.
            OSError: The storage refuses.
        """
        chain = CommitChain(self.root, command.job_id)
        source = command.resume_from
        if source is not None and not CommitChain(self.root, job_of_checkpoint(source)).exists:
            raise ChainError(
                f"{self.root} holds nothing of {job_of_checkpoint(source)}, whose checkpoint "
                f"{source} is to be loaded: is the storage mounted on this node?"
            )
        chain.append(AttemptOpened(job_id=command.job_id, fence=command.fence))
        card = JobCard(
            job_id=command.job_id,
            spec=command.spec,
            owner=command.owner,
            created_ms=command.created_ms,
            fence=command.fence,
            plan=command.plan,
            resume_from=command.resume_from,
            standing=JobState.QUEUED,
        )
        with self._writing_cards:
            write_card(self.root, card)
        for folder in chain.abandoned():
            try:
                remove_tree(folder)
            except OSError as error:  # a rank of an older attempt may still write there
                _log.warning("not_removed", folder=str(folder), why=str(error))
            else:
                _log.info("uncommitted_checkpoint_removed", checkpoint=folder.name)
        if self._ranks_are is not None:
            chain.share_with(self._ranks_are)
            traces = traces_folder(self.root, command.job_id)
            make_folders(traces, self.root)
            self._ranks_are.take_over(traces)
            if source is not None:
                CommitChain(self.root, job_of_checkpoint(source)).share_with(self._ranks_are)
        damaged = chain.read().damaged
        return self._damaged(command, damaged) if damaged else None

    def keep_standing(self, command: KeepStanding) -> None:
        """Write it into the job's card, if that is still of this attempt.

        Raises:
            OSError: The storage refuses.
        """
        with self._writing_cards:
            card = read_card(self.root, command.job_id)
            if card is not None and card.fence <= command.fence:
                kept = command.model_dump(include={"standing", "reason", "exit_reason"})
                write_card(self.root, card.model_copy(update=kept))

    def find_job(self, job_id: str, running: RunningGang | None, last_step: int) -> JobFound | None:
        """What storage tells of a job; None without a card, or of one that was deleted.

        Args:
            job_id: The job.
            running: The gang of it that lives on this node.
            last_step: Its last step.

        Raises:
            OSError: The storage does not answer.
        """
        card = read_card(self.root, job_id)
        chain = CommitChain(self.root, job_id)
        if card is None:
            return None
        reading = chain.read()
        fence = max(reading.fence, card.fence)
        is_newest = running is not None and running.fence == fence == card.fence
        return JobFound(
            job_id=job_id,
            fence=fence,
            node_id=self._node_id,
            card=card,
            manifests=dict(reading.committed),
            damaged=reading.damaged,
            is_running=is_newest,
            last_step=last_step if is_newest else 0,
        )

    def commit(self, command: CommitCheckpoint) -> CheckpointLinked | CheckpointLost:
        """Link the manifest, if every shard file lies there with its size."""
        manifest = command.manifest
        chain = CommitChain(self.root, command.job_id)
        try:
            # One that is linked stays linked, whatever became of its files since.
            if chain.read().number_of(manifest) is None:
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
            remove_tree(folder)
        return CheckpointRetired(
            job_id=command.job_id,
            fence=command.fence,
            node_id=self._node_id,
            checkpoint_id=command.checkpoint_id,
        )

    def remove_traces(self, command: RemoveTraces) -> None:
        """Remove all files of traces; what cannot be removed stays until the job's folder goes."""
        for trace_id in command.trace_ids:
            folder = traces_folder(self.root, command.job_id) / trace_id
            try:
                remove_tree(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                _log.warning("not_removed", folder=str(folder), why=str(error))

    def verify(
        self, command: VerifyCheckpoint
    ) -> tuple[ChainDamaged | CheckpointVerified | CheckpointCorrupt | CheckpointUnread, ...]:
        """Compare every shard of a committed checkpoint with its digest; tell what was found.

        A storage that does not hold the job at all, or that does not answer, proves nothing.
        """
        about = {"job_id": command.job_id, "fence": command.fence, "node_id": self._node_id}
        about["checkpoint_id"] = name = command.checkpoint_id
        chain = CommitChain(self.root, command.job_id)
        try:
            if not chain.exists:
                reason = f"{self.root} on {self._node_id} holds nothing of {command.job_id}"
                return (CheckpointUnread.model_validate({**about, "reason": reason}),)
            damaged = chain.read().damaged
            told = (self._damaged(command, damaged),) if damaged else ()
            try:
                manifest = chain.find(name)
            except ChainError as error:
                found = {"file": "chain", "reason": str(error)}
                return (*told, CheckpointCorrupt.model_validate({**about, **found}))
            for shard in manifest.shards:
                fault = fault_of(chain.shard_folder(name) / shard.name, shard)
                if fault is not None:
                    found = {"file": f"shards/{name}/{shard.name}", "reason": fault}
                    return (*told, CheckpointCorrupt.model_validate({**about, **found}))
        except OSError as error:
            return (CheckpointUnread.model_validate({**about, "reason": str(error)}),)
        return (
            *told,
            CheckpointVerified.model_validate({**about, "bytes": manifest.total_bytes}),
        )

    def _damaged(
        self, command: LaunchGang | VerifyCheckpoint, records: tuple[DamagedRecord, ...]
    ) -> ChainDamaged:
        return ChainDamaged(
            job_id=command.job_id, fence=command.fence, node_id=self._node_id, records=records
        )

    def _lost(self, command: CommitCheckpoint, error: Exception) -> CheckpointLost:
        return CheckpointLost(
            job_id=command.job_id,
            fence=command.fence,
            node_id=self._node_id,
            checkpoint_id=command.manifest.checkpoint_id,
            reason=str(error),
            condition=node_condition(error, self._node_id),
        )


def _number_of(manifest: Manifest, chain: CommitChain) -> int | None:
    try:
        return chain.read().number_of(manifest)
    except OSError:
        return None


def _check_shards(manifest: Manifest, folder: Path) -> None:
    for shard in manifest.shards:
        size = (folder / shard.name).stat().st_size
        if size != shard.bytes:
            raise ShardError(
                f"shard {shard.name} of rank {shard.rank} has {size} bytes, not the "
                f"{shard.bytes} that the rank voted for"
            )


def fault_of(
    path: Path, shard: ShardFile, is_over: Callable[[], bool] = lambda: False
) -> str | None:
    """What of a shard file is not as its rank voted; None where all is.

    Args:
        path: The file.
        shard: The vote.
        is_over: Asked before each piece: whether the answer is of no use any more.

    Raises:
        OSError: The storage does not answer, which says nothing about the file.
    """
    digest = hashlib.sha256()
    try:
        descriptor = open_plain(path)
    except FileNotFoundError:
        return "the file is missing"
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 a descriptor, not a path
        size = os.fstat(descriptor).st_size
        if size != shard.bytes:
            return f"it has {size} bytes, not the {shard.bytes} that the rank voted for"
        if is_hollow(descriptor):
            return f"nearly all of its {size} bytes are holes, which no rank of ours leaves"
        left = size  # and no more: somebody may go on to write there
        while not is_over() and left and (part := file.read(min(left, _READ_BYTES))):
            digest.update(part)
            left -= len(part)
    if digest.hexdigest() == shard.sha256:
        return None
    return f"its sha256 is {digest.hexdigest()}, the rank voted for {shard.sha256}"


def purge(storage: Storage, command: PurgeJob, node_id: str) -> JobPurged:
    """Remove all that storage holds of the job; a job of which it holds nothing is purged.

    A record above the job's newest attempt is linked first, so that whatever of it still lives can
    commit nothing; then its folder is renamed, so that it is gone at once, however long its files
    take to be removed.
    """
    folder = storage.root / command.job_id
    error = None
    try:
        if os.path.lexists(folder):
            opened = AttemptOpened(job_id=command.job_id, fence=command.fence + 1)
            # Where a rank has put something else in the chain's place, nothing can be committed.
            with contextlib.suppress(FileExistsError, NotADirectoryError):
                CommitChain(storage.root, command.job_id).append(opened)
            folder.rename(storage.root / f".purged-{command.job_id}-{secrets.token_hex(8)}")
            sync_folder(storage.root)
        for left in storage.root.glob(f".purged-{command.job_id}-*"):
            remove_tree(left)
    except (ChainError, OSError) as failure:
        error = str(failure)
        _log.warning("purge_failed", job=command.job_id, why=error)
    return JobPurged(job_id=command.job_id, fence=command.fence, node_id=node_id, error=error)
