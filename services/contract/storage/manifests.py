"""The manifest of a checkpoint, and the records of the commit chain in which it is a link.

A record's file ends with the SHA-256 of its other fields, for a flipped bit can leave another valid record: of
another step, or of a fence that overtakes all attempts. Those of older versions have none.
"""

import hashlib
import re
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter

from services.contract.words.bounds import (
    AtMostOnePerRank,
    Digest,
    EvaluationMetrics,
    Name,
    Positive,
    Text,
    Whole,
)
from services.contract.words.ids import CheckpointId, JobId

FORMAT_VERSION: Final = 1
_DIGEST_AT_END: Final = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}$')
_END: Final = b"\n}"


class _Record(BaseModel):
    # Fields that a newer version wrote are ignored; ``version`` says when they must not be.
    model_config = ConfigDict(extra="ignore", frozen=True)


class ShardFile(_Record):
    """One rank's file of a checkpoint: its name below the checkpoint's folder, and its proof."""

    rank: int = Field(ge=0, lt=1 << 31)
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=255)]
    bytes: Whole
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(_Record):
    """The file whose existence is the commit. All shards together hold the whole state.

    ``step`` optimizer steps had been made; ``loss`` is that of the last of them, ``evaluation`` what a
    validation pass gave after it: its loss, and metrics.
    """

    kind: Literal["checkpoint_committed"] = "checkpoint_committed"
    version: Literal[1] = FORMAT_VERSION
    job_id: JobId
    checkpoint_id: CheckpointId
    fence: Positive
    step: Whole
    world_size: Positive
    loss: float | None = None
    data_digest: Digest = ""
    evaluation: EvaluationMetrics = Field(default_factory=dict)
    shards: Annotated[tuple[ShardFile, ...], FailFast(), AtMostOnePerRank]

    @property
    def total_bytes(self) -> int:
        """How many bytes all shard files have."""
        return sum(shard.bytes for shard in self.shards)


class AttemptOpened(_Record):
    """An attempt took the next number: whoever holds a lower fence finds it taken."""

    kind: Literal["attempt_opened"] = "attempt_opened"
    version: Literal[1] = FORMAT_VERSION
    job_id: JobId
    fence: Positive


class CheckpointDeleted(_Record):
    """A committed checkpoint was retired; its shard files may be gone."""

    kind: Literal["checkpoint_deleted"] = "checkpoint_deleted"
    version: Literal[1] = FORMAT_VERSION
    job_id: JobId
    fence: Positive
    checkpoint_id: CheckpointId


class DamagedRecord(_Record):
    """A number of the chain that is taken and whose record cannot be read."""

    number: Positive
    name: Name
    reason: Text


ChainRecord = Annotated[Manifest | AttemptOpened | CheckpointDeleted, Field(discriminator="kind")]
_CHAIN_RECORD: TypeAdapter[Manifest | AttemptOpened | CheckpointDeleted] = TypeAdapter(ChainRecord)


def record_bytes(record: Manifest | AttemptOpened | CheckpointDeleted) -> bytes:
    """The file of a record: JSON, its digest last."""
    fields = _CHAIN_RECORD.dump_json(record, indent=1)
    digest = hashlib.sha256(fields).hexdigest()
    return fields.removesuffix(_END) + f',\n "sha256": "{digest}"\n}}'.encode()


def record_of(content: bytes) -> Manifest | AttemptOpened | CheckpointDeleted:
    """The record in a file that ``record_bytes`` of this or another version made.

    Raises:
        ValueError: It is damaged.
    """
    # Over the bytes as they are: a newer version may have written fields that this one does not know.
    if digest := _DIGEST_AT_END.search(content):
        fields = content[: digest.start()] + _END
        if hashlib.sha256(fields).hexdigest() != digest[1].decode():
            raise ValueError("its fields are not those of its sha256")
    return _CHAIN_RECORD.validate_json(content)
