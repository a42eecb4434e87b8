"""The commit chain: numbered records in storage, each linked once and never replaced.

One folder a job::

    <root>/<job id>/chain/00000001.json        attempt opened, fence 1
    <root>/<job id>/chain/00000002.json        a manifest: this checkpoint is committed
    <root>/<job id>/shards/<checkpoint id>/…   what the ranks wrote

A new attempt links its own record first, so that a frozen process of an older attempt that wakes
between its check and its link finds the number taken. ``link(2)`` refuses an existing name, on
NFS too, where a repeated request may report EEXIST for its own success: hence the comparison.
"""

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from services.contract.durable import make_folders, sync_folder, write_new
from services.contract.manifests import (
    CHAIN_RECORD,
    AttemptOpened,
    CheckpointDeleted,
    Manifest,
)

_FENCE_AT_END: Final = re.compile(r"-s\d{9}-a(\d{4,})$")
Record = Manifest | AttemptOpened | CheckpointDeleted


class ChainError(Exception):
    """The chain cannot be read or written as asked."""


class FencedError(ChainError):
    """A newer attempt of the job has opened the chain: this one may commit nothing more."""


class CommitChain:
    """The chain of one job below a storage root. Safe under concurrent writers.

    Args:
        root: The folder that holds all jobs' checkpoints.
        job_id: The job whose chain this is.
    """

    def __init__(self, root: Path, job_id: str) -> None:
        self._job = root / job_id
        self._folder = self._job / "chain"

    def shard_folder(self, checkpoint_id: str) -> Path:
        """Where the shard files of a checkpoint lie."""
        return self._job / "shards" / checkpoint_id

    def records(self) -> Iterator[Record]:
        """All records, oldest first.

        Raises:
            ChainError: A record is damaged or a number is missing.
        """
        for number in range(1, self._last_number() + 1):
            yield self._read(number)

    def committed(self) -> list[Manifest]:
        """The committed checkpoints that were not deleted since, oldest first."""
        alive: dict[str, Manifest] = {}
        for record in self.records():
            if isinstance(record, Manifest):
                alive[record.checkpoint_id] = record
            elif isinstance(record, CheckpointDeleted):
                alive.pop(record.checkpoint_id, None)
        return list(alive.values())

    def find(self, checkpoint_id: str) -> Manifest:
        """The manifest of a committed checkpoint.

        Raises:
            ChainError: It was never committed, or it was deleted.
        """
        for manifest in self.committed():
            if manifest.checkpoint_id == checkpoint_id:
                return manifest
        raise ChainError(f"checkpoint {checkpoint_id} is not committed in {self._folder}")

    def abandoned(self) -> list[Path]:
        """The shard folders that no manifest names nor ever will: those of overtaken attempts.

        Raises:
            ChainError: The chain is damaged.
        """
        # Read before the folders are listed: what is abandoned now can never be named later.
        records = list(self.records())
        opened = _newest_fence(records)
        named = {record.checkpoint_id for record in records if isinstance(record, Manifest)}
        found = []
        for folder in sorted((self._job / "shards").glob("ckpt_*")):
            match = _FENCE_AT_END.search(folder.name)
            if match and int(match[1]) < opened and folder.name not in named:
                found.append(folder)
        return found

    def append(self, record: Record) -> int:
        """Link ``record`` at the next number and return that number.

        Appending a record that the chain already holds returns its number: a repeated request
        changes nothing.

        Raises:
            FencedError: A higher fence has opened the chain.
        """
        make_folders(self._folder, self._job.parent)
        content = CHAIN_RECORD.dump_json(record, indent=1)
        draft = self._folder / f".draft-{secrets.token_hex(8)}"
        write_new(draft, content)
        try:
            while True:
                earlier = list(self.records())
                if record in earlier:
                    return earlier.index(record) + 1
                _refuse_if_fenced(record, earlier)
                number = len(earlier) + 1
                try:
                    os.link(draft, self._path(number))
                except FileExistsError:
                    continue
                sync_folder(self._folder)
                return number
        finally:
            draft.unlink(missing_ok=True)

    def _last_number(self) -> int:
        if not self._folder.is_dir():
            return 0
        return max((int(p.stem) for p in self._folder.glob("[0-9]*.json")), default=0)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.json"

    def _read(self, number: int) -> Record:
        path = self._path(number)
        try:
            return CHAIN_RECORD.validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ChainError(f"record {path} cannot be read: {error}") from error


def _newest_fence(records: list[Record]) -> int:
    return max((r.fence for r in records if isinstance(r, AttemptOpened)), default=0)


def _refuse_if_fenced(record: Record, earlier: list[Record]) -> None:
    opened = _newest_fence(earlier)
    if opened > record.fence:
        raise FencedError(f"attempt {record.fence} may not write: attempt {opened} is open")
