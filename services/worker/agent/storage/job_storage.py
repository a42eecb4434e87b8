"""What an agent does in storage: open, commit, retire, verify. Blocking: run in a thread."""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Mapping
from functools import partial
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
from services.contract.storage.job_cards import (
    CARD,
    DELETED,
    JobCard,
    put_card_away,
    read_card,
    write_card,
)
from services.contract.storage.manifests import (
    AttemptOpened,
    CheckpointDeleted,
    DamagedRecord,
    Manifest,
)
from services.contract.system.durable import StorageAwayError, make_folders, node_condition
from services.contract.system.rank_user import RankUser
from services.contract.words.bounds import MOST_RANKS_OF_A_NODE
from services.contract.words.ids import job_of_checkpoint
from services.contract.words.states import JobState
from services.worker.agent.host.reserve import removed_soon
from services.worker.agent.storage.loading import Progress, Untold
from services.worker.agent.storage.shared_files import SharedFiles, as_shared

_MANIFESTS_BYTES: Final = 4 << 20
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_log = structlog.get_logger()


class ShardError(ChainError):
    """A shard file is not what its rank voted for."""


class Storage:
    """The checkpoints of all jobs below one root, on behalf of one node.

    Args:
        files: The storage; or the folder that all nodes mount.
        node_id: Who reports.
        ranks_are: The system user of ranks; None: this process's own.
    """

    def __init__(
        self, files: SharedFiles | Path, node_id: str, ranks_are: RankUser | None = None
    ) -> None:
        self.files = as_shared(files)
        self.root = self.files.root
        self._node_id = node_id
        self._writing_cards = threading.Lock()
        self._ranks_are = ranks_are
        self._in_doubt: dict[str, dict[str, CommitCheckpoint]] = {}
        self._removing: set[str] = set()

    def open_attempt(
        self, command: LaunchGang, progress: Progress | None = None
    ) -> tuple[ChainDamaged | JobFound, ...]:
        """Open the attempt in the job's chain; from then on older ones can commit nothing.

        So what they wrote and did not commit is removed: the new attempt may need its room. It does not wait long for that.
        Returns what of the chain is damaged, if anything is, and what is committed, if the checkpoint that is to be
        loaded is not: Redis may be back with an older copy of its data, and know of no later ones.

        Args:
            command: Of the attempt.
            progress: Told of the loading of its checkpoint.

        Raises:
            LaunchError: The loading was stopped.
            FencedError: A newer attempt is open.
            StorageAwayError: This is another storage, or the checkpoint that is to be loaded cannot be in it.
            OSError: The storage refuses.
        """
        self.files.require_known()
        chain = self.chain(command.job_id)
        source = command.resume_from
        if source is not None and not self.chain(job_of_checkpoint(source)).exists:
            raise StorageAwayError(
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
            self._write_card(card)
        self.files.require_known()
        # One of a job at a time: what an attempt leaves meanwhile, it finds as it looks again.
        if chain.abandoned() and command.job_id not in self._removing:
            self._removing.add(command.job_id)
            if not removed_soon(partial(self._remove_abandoned, chain, command.job_id)):
                _log.warning("not_removed_yet", job=command.job_id, fence=command.fence)
        if source is not None:
            self.bring(command.job_id, source, progress)
        if self._ranks_are is not None:
            chain.share_with(self._ranks_are)
            traces = traces_folder(self.root, command.job_id)
            make_folders(traces, self.root)
            self._ranks_are.take_over(traces)
            if source is not None:
                CommitChain(self.root, job_of_checkpoint(source)).share_with(self._ranks_are)
        reading = chain.read()
        told = (self._damaged(command, reading.damaged),) if reading.damaged else ()
        is_own = source is not None and job_of_checkpoint(source) == command.job_id
        if not is_own or any(m.checkpoint_id == source for m in reading.committed.values()):
            return told
        found = self.find_job(command.job_id, None, 0)
        # Read at other times it may lack what an older attempt commits meanwhile.
        is_all = len(found) == 1 and not found[0].damaged
        return (*told, *(fact.model_copy(update={"is_all": is_all}) for fact in found))

    def keep_standing(self, command: KeepStanding) -> None:
        """Write it into the job's card, if that is still of this attempt.

        Raises:
            OSError: The storage refuses.
        """
        self.files.require_known()
        with self._writing_cards:
            card = self.card(command.job_id)
            if card is not None and card.fence <= command.fence:
                kept = command.model_dump(include={"standing", "reason", "exit_reason"})
                self._write_card(card.model_copy(update=kept))

    def find_job(
        self, job_id: str, running: RunningGang | None, last_step: int
    ) -> tuple[JobFound, ...]:
        """What storage tells of a job; nothing without a card, or of one that was deleted.

        Of a job of many ranks that keeps many checkpoints several facts: one that is too long is not taken.

        Args:
            job_id: The job.
            running: The gang of it that lives on this node.
            last_step: Its last step.

        Raises:
            OSError: The storage does not answer.
        """
        card = self.card(job_id)
        chain = self.chain(job_id)
        if card is None:
            return ()
        reading = chain.read()
        fence = max(reading.fence, card.fence)
        is_newest = running is not None and running.fence == fence == card.fence
        found = JobFound(
            job_id=job_id,
            fence=fence,
            node_id=self._node_id,
            card=card,
            manifests={},
            damaged=reading.damaged,
            is_running=is_newest,
            last_step=last_step if is_newest else 0,
        )
        return tuple(
            found.model_copy(update={"manifests": part} | ({"damaged": ()} if place else {}))
            for place, part in enumerate(_in_parts(reading.committed, card.resume_from))
        )

    def commit(self, command: CommitCheckpoint) -> CheckpointLinked | CheckpointLost:
        """Link the manifest, if every shard file lies there with its size.

        One that may be linked, though the storage does not say it, is told as lost for a condition.
        """
        manifest = command.manifest
        chain = self.chain(command.job_id)
        is_asked = manifest.checkpoint_id in self._in_doubt.get(command.job_id, {})
        try:
            self.files.require_known()
            # One that is linked stays linked, whatever became of its files since.
            if chain.number_of(manifest) is None:
                self._check_shards(manifest, chain.shard_folder(manifest.checkpoint_id))
            is_asked = True
            number = chain.append(manifest)
        except (ChainError, OSError) as error:
            try:
                linked = chain.number_of(manifest)
            except OSError as unread:
                lost = self._lost(command, error)
                if not is_asked:
                    return lost
                self._in_doubt.setdefault(command.job_id, {})[manifest.checkpoint_id] = command
                words = f"whether it is committed cannot be read on {self._node_id} ({unread})"
                return lost.model_copy(update={"condition": lost.condition or words})
            if linked is None:
                return self._lost(command, error)
            # The link is the commit, whatever failed behind it.
            _log.warning("failed_behind_a_link", checkpoint=manifest.checkpoint_id, why=str(error))
            number = linked
        return self._linked(command, number)

    def found_since(self, job_id: str) -> tuple[CheckpointLinked, ...]:
        """Commits of the job that were told as lost while nothing could be read, and that stand in its chain."""
        doubted = self._in_doubt.pop(job_id, {})
        if not doubted:
            return ()
        try:
            committed = self.chain(job_id).read().committed
        except OSError:
            self._in_doubt[job_id] = doubted
            return ()
        return tuple(
            self._linked(doubted[manifest.checkpoint_id], number)
            for number, manifest in committed.items()
            if manifest.checkpoint_id in doubted
        )

    def retire(
        self, command: RetireCheckpoint
    ) -> tuple[
        CheckpointRetired
        | ChainDamaged
        | CheckpointVerified
        | CheckpointCorrupt
        | CheckpointUnread,
        ...,
    ]:
        """Link the deletion, then remove the files; the other way round only on a disk too full for the record.

        Where the chain lacks one for which this one is given up, it stays, and is told to be whole: facts of
        links that there are not must not cost the job what it has.

        Raises:
            FencedError: A newer attempt is open; the controller asks again with its fence.
            ChainError: The chain is damaged.
            OSError: The storage refuses.
        """
        self.files.require_known()
        chain = self.chain(command.job_id)
        if command.kept:
            there = chain.committed_ids()
            missing = sorted({*command.kept}.difference(there))
            if missing and command.checkpoint_id in there:
                _log.warning("not_retired", checkpoint=command.checkpoint_id, missing=missing)
                about = command.model_dump(include={"job_id", "fence", "checkpoint_id"})
                return self.verify(VerifyCheckpoint.model_validate(about))
        deleted = CheckpointDeleted(
            job_id=command.job_id, fence=command.fence, checkpoint_id=command.checkpoint_id
        )
        try:
            chain.append(deleted)
            self._remove_shards(chain, command.checkpoint_id)
        except OSError as error:
            # A newer attempt is looked for before anything is written. Whoever loads it until the record stands finds it missing.
            if error.errno not in _NO_ROOM or chain.read().fence > command.fence:
                raise
            self._remove_shards(chain, command.checkpoint_id)
            chain.append(deleted)
        retired = CheckpointRetired(
            job_id=command.job_id,
            fence=command.fence,
            node_id=self._node_id,
            checkpoint_id=command.checkpoint_id,
        )
        return (retired,)

    def remove_traces(self, command: RemoveTraces) -> None:
        """Remove all files of traces; what cannot be removed stays until the job's folder goes."""
        for trace_id in command.trace_ids:
            folder = traces_folder(self.root, command.job_id) / trace_id
            try:
                self.files.remove(folder)
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
        chain = self.chain(command.job_id)
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
                fault = self.files.fault_of(chain.shard_folder(name) / shard.name, shard)
                if fault is not None:
                    found = {"file": f"shards/{name}/{shard.name}", "reason": fault}
                    return (*told, CheckpointCorrupt.model_validate({**about, **found}))
        except OSError as error:
            return (CheckpointUnread.model_validate({**about, "reason": str(error)}),)
        return (
            *told,
            CheckpointVerified.model_validate({**about, "bytes": manifest.total_bytes}),
        )

    def chain(self, job_id: str) -> CommitChain:
        """The commit chain of a job, as all nodes see it."""
        return CommitChain(self.root, job_id, self.files)

    def card(self, job_id: str) -> JobCard | None:
        """The card of a job, as ``read_card`` reads it.

        Raises:
            OSError: The storage does not answer.
        """
        self.files.pull_file(self.root / job_id / CARD)
        return read_card(self.root, job_id)

    def put_card_away(self, job_id: str) -> bool:
        """Mark a job as deleted, as ``put_card_away`` does.

        Raises:
            OSError: The storage refuses.
        """
        self.files.pull_file(self.root / job_id / CARD)
        if not put_card_away(self.root, job_id):
            return False
        self.files.publish(self.root / job_id / DELETED)
        self.files.publish(self.root / job_id / CARD)
        return True

    def bring(self, for_job: str, checkpoint_id: str, progress: Progress | None = None) -> None:
        """Have this node hold all of a committed checkpoint, until ``for_job`` is released.

        What is missing or damaged is for whoever loads it to tell.

        Raises:
            OSError: The storage does not answer.
        """
        told = progress or Untold()
        chain = self.chain(job_of_checkpoint(checkpoint_id))
        for manifest in chain.committed():
            if manifest.checkpoint_id == checkpoint_id:
                told.begin(manifest.total_bytes)
                for shard in manifest.shards:
                    path = chain.shard_folder(checkpoint_id) / shard.name
                    self.files.fetch(path, shard, for_job, told.took)

    def _remove_abandoned(self, chain: CommitChain, job_id: str) -> None:
        try:
            for _ in range(2):
                for folder in chain.abandoned():
                    self._remove_left(folder)
        finally:
            self._removing.discard(job_id)

    def _remove_left(self, folder: Path) -> None:
        try:
            self.files.remove(folder)
        except FileNotFoundError:  # another thread was quicker
            return
        except OSError as error:  # a rank of an older attempt may still write there
            _log.warning("not_removed", folder=str(folder), why=str(error))
        else:
            _log.info("uncommitted_checkpoint_removed", checkpoint=folder.name)

    def _remove_shards(self, chain: CommitChain, checkpoint_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.files.remove(chain.shard_folder(checkpoint_id))

    def _write_card(self, card: JobCard) -> None:
        write_card(self.root, card)
        for name in (CARD, DELETED):
            self.files.publish(self.root / card.job_id / name)

    def _check_shards(self, manifest: Manifest, folder: Path) -> None:
        for shard in manifest.shards:
            size = self.files.size(folder / shard.name)
            if size != shard.bytes:
                raise ShardError(
                    f"shard {shard.name} of rank {shard.rank} has {size} bytes, not the "
                    f"{shard.bytes} that the rank voted for"
                )

    def _damaged(
        self, command: LaunchGang | VerifyCheckpoint, records: tuple[DamagedRecord, ...]
    ) -> ChainDamaged:
        return ChainDamaged(
            job_id=command.job_id, fence=command.fence, node_id=self._node_id, records=records
        )

    def _linked(self, command: CommitCheckpoint, number: int) -> CheckpointLinked:
        return CheckpointLinked(
            job_id=command.job_id,
            fence=command.fence,
            node_id=self._node_id,
            number=number,
            manifest=command.manifest,
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


def _in_parts(
    manifests: Mapping[int, Manifest], source: str | None
) -> Iterator[dict[int, Manifest]]:
    """So many together as a fact has room for: at first the one to go on from, and the newest."""
    part: dict[int, Manifest] = {}
    room = _MANIFESTS_BYTES
    for number in sorted(manifests, key=lambda n: (manifests[n].checkpoint_id != source, -n)):
        size = len(manifests[number].model_dump_json().encode())
        if part and (size > room or len(part) == MOST_RANKS_OF_A_NODE):
            yield dict(sorted(part.items()))
            part, room = {}, _MANIFESTS_BYTES
        part[number] = manifests[number]
        room -= size
    yield dict(sorted(part.items()))


@contextlib.contextmanager
def _on_a_full_disk(chain: CommitChain, fence: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # A full disk is met before a newer attempt is looked for.
        if error.errno not in _NO_ROOM or chain.read().fence > fence:
            raise


def purge(storage: Storage, command: PurgeJob, node_id: str) -> JobPurged:
    """Remove all that storage holds of the job; a job of which it holds nothing is purged.

    A record above the job's newest attempt is linked first, so that whatever of it still lives can
    commit nothing; on a full disk it does without, for people purge jobs to make room.
    """
    folder = storage.root / command.job_id
    error = None
    try:
        storage.files.require_known()
        if os.path.lexists(folder) or storage.files.holds(folder):
            opened = AttemptOpened(job_id=command.job_id, fence=command.fence + 1)
            # Where a rank has put something else in the chain's place, nothing can be committed.
            chain, gone = storage.chain(command.job_id), (FileExistsError, NotADirectoryError)
            with contextlib.suppress(*gone), _on_a_full_disk(chain, opened.fence):
                chain.append(opened)
        storage.files.discard_job(command.job_id)
    except (ChainError, OSError) as failure:
        error = str(failure)
        _log.warning("purge_failed", job=command.job_id, why=error)
    return JobPurged(job_id=command.job_id, fence=command.fence, node_id=node_id, error=error)
