"""Loads the checkpoint from which an attempt resumes."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from fsdp_core.checkpoint import model_state
from fsdp_core.errors import CheckpointError
from services.contract.messages.rank_pipe import RankFoundCorrupt, RankMessage, RankSeat
from services.contract.storage.commit_chain import ChainError, CommitChain
from services.contract.storage.manifests import Manifest
from services.contract.system.durable import StorageAwayError
from services.contract.words.ids import job_of_checkpoint
from services.worker.rank.checkpoints import shard_file
from services.worker.rank.checkpoints.state import TrainedParts, restore
from services.worker.rank.data.source import DataMismatchError


def resume(parts: TrainedParts, seat: RankSeat, send: Callable[[RankMessage], None]) -> int:
    """Fills the parts from the seat's checkpoint, at any world size, and returns its step.

    Without one it returns 0 and the run starts over. One that is not what was committed is told
    to the agent before the error is raised, so that the next attempt takes an older one.

    Raises:
        ChainError: The checkpoint was never committed, or it was deleted.
        CorruptShardError: A file of which this rank needs something is not what was committed.
        CheckpointError: The files do not hold what this model and optimizer need, or no checkpoint can hold it.
        DataMismatchError: The job's data is not that on which the checkpoint was trained.
    """
    if seat.resume_from is None:
        model_state(parts.model)  # what no checkpoint can have is refused before the first step
        return 0
    job = job_of_checkpoint(seat.resume_from)
    manifest = source_of(seat, seat.resume_from, send)
    # A clone may go on with other data; the same job must not do so unnoticed.
    if job == seat.job_id and manifest.data_digest not in ("", parts.data_digest):
        raise DataMismatchError(
            f"data: checkpoint {seat.resume_from} was trained on data of digest "
            f"{manifest.data_digest}, here it is {parts.data_digest}: the run would not be "
            "continued exactly. Use the same files (for stdlib_bytes: the same Python), or clone the "
            "job from this checkpoint: a clone may train on other data"
        )
    fill_from(seat, manifest, lambda readers: restore(parts, readers), send)
    return manifest.step


def source_of(seat: RankSeat, checkpoint: str, send: Callable[[RankMessage], None]) -> Manifest:
    """The manifest of the checkpoint from which an attempt resumes; waited for while its storage is away.

    Raises:
        ChainError: It was never committed, or it was deleted; the agent was told.
    """
    chain = CommitChain(Path(seat.storage_root), job_of_checkpoint(checkpoint))

    def find() -> Manifest:
        if not chain.exists:  # it was there when the agent opened the attempt
            raise StorageAwayError(f"{seat.storage_root} holds nothing of the job: is it mounted?")
        return chain.find(checkpoint)

    try:
        return shard_file.once_it_answers(find)
    except ChainError as error:
        send(RankFoundCorrupt(checkpoint_id=checkpoint, file="chain", reason=str(error)))
        raise


def fill_from(
    seat: RankSeat,
    manifest: Manifest,
    fill: Callable[[list[shard_file.ShardReader]], None],
    send: Callable[[RankMessage], None],
) -> None:
    """Has ``fill`` read from the files of a checkpoint, one a rank that saved.

    Raises:
        CorruptShardError: A file that it reads is not what was committed; the agent was told.
        Exception: Whatever ``fill`` raises, if the files are what was committed.
    """
    chain = CommitChain(Path(seat.storage_root), manifest.job_id)
    try:
        _fill(chain.shard_folder(manifest.checkpoint_id), manifest, fill, seat)
    except shard_file.CorruptShardError as error:
        name = f"shards/{manifest.checkpoint_id}/{error.path.name}"
        reason = error.reason
        send(RankFoundCorrupt(checkpoint_id=manifest.checkpoint_id, file=name, reason=reason))
        raise


def _fill(
    folder: Path,
    manifest: Manifest,
    fill: Callable[[list[shard_file.ShardReader]], None],
    seat: RankSeat,
) -> None:
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(shard_file.opened(folder, s)) for s in manifest.shards]
            fill(files)
            # A damaged one may not say that it is this rank's, of which a replica needs no tensors of a model.
            if len(files) == seat.plan.world_size:
                files[seat.rank].verify()
    except (CheckpointError, ValueError, KeyError, TypeError):
        # A damaged header can look like a checkpoint of another model: look before blaming that.
        for shard in manifest.shards:
            shard_file.verify(folder, shard)
        raise
