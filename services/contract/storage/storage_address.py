"""Where checkpoints lie: a folder that all nodes share, or a bucket of an object store."""

import re
from dataclasses import dataclass
from typing import Final

_SCHEME: Final = "s3://"
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PART: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9!_.*'()-]+")


@dataclass(frozen=True)
class BucketAddress:
    """A place in an object store with Amazon's S3 interface.

    Attributes:
        bucket: Its name.
        prefix: What the names of all objects begin with; "" or several parts with ``/`` between them.
    """

    bucket: str
    prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> "BucketAddress":
        """Of ``s3://bucket/prefix``.

        Raises:
            ValueError: It is none.
        """
        bucket, _, prefix = text.removeprefix(_SCHEME).partition("/")
        prefix = prefix.rstrip("/")
        parts = prefix.split("/") if prefix else []
        if not _BUCKET.fullmatch(bucket) or not all(map(_PART.fullmatch, parts)):
            raise ValueError(
                f"{text} names no place in a bucket: write s3://BUCKET/PREFIX with letters, digits, '.', '-' and "
                "'_'; endpoint, region and credentials are settings of the S3 client (AWS_ENDPOINT_URL_S3 and others)"
            )
        return cls(bucket, prefix)

    def __str__(self) -> str:
        return f"{_SCHEME}{self.bucket}/{self.prefix}".rstrip("/")


def storage_address(value: object) -> object:
    """The address that a setting names: text with ``s3://`` becomes a ``BucketAddress``, all else stays.

    Raises:
        ValueError: The text names no place in a bucket.
    """
    # Not as a Path: that would make one slash of two.
    if isinstance(value, str) and value.startswith(_SCHEME):
        return BucketAddress.parse(value)
    return value
