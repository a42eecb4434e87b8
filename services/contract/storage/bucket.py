"""Objects of one bucket by the names that files have below a storage root: Amazon's S3 interface, by boto3.

The only module that imports boto3, and imported only where a bucket is configured. Blocking: call it in
threads. Endpoint, region and credentials are those of boto3: its environment variables, files and roles.
"""

import base64
import contextlib
import errno
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from services.contract.storage.storage_address import BucketAddress
from services.contract.system.durable import StorageAwayError, open_plain

if TYPE_CHECKING:
    from types_boto3_s3.client import S3Client
    from types_boto3_s3.type_defs import (
        CompletedPartTypeDef,
        GetObjectOutputTypeDef,
        GetObjectRequestTypeDef,
        HeadObjectOutputTypeDef,
        ListObjectsV2OutputTypeDef,
        ObjectIdentifierTypeDef,
        PutObjectRequestTypeDef,
    )

PART_BYTES: Final = 16 << 20
_MOST_PARTS: Final = 10_000
_LONGEST_RECORD: Final = 16 << 20
_READ_BYTES: Final = 1 << 20
_DELETED_AT_ONCE: Final = 1_000
_LONGEST_NAME: Final = 255
_PROOF: Final = ".conditional-writes"
_NONE_THERE: Final = "*"
# Viewers read why a storage is away, and an endpoint may have a password.
_USER_OF_URL: Final = re.compile(r"[^/\s]*@")
# In its own words: a proxy whose server is away answers 404, too.
_NOT_FOUND: Final = frozenset({"NoSuchKey", "NoSuchUpload"})
_SPOILT: Final = frozenset({"InvalidPart", "InvalidPartOrder", "EntityTooSmall"})
_TAKEN: Final = frozenset({"412", "PreconditionFailed", "409", "ConditionalRequestConflict"})
_TIMES_OUT_S: Final = 10
_TRIES: Final = 3
_MAKING_A_CLIENT: Final = threading.Lock()
_CONFIG: Final = Config(
    connect_timeout=_TIMES_OUT_S,
    read_timeout=2 * _TIMES_OUT_S,
    max_pool_connections=32,
    retries={"mode": "standard", "total_max_attempts": _TRIES},
    # Each body goes with its MD5, which all servers check; the checksums that boto3 adds by itself some refuse.
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
)


class NoConditionalWritesError(OSError):
    """The server ignores ``If-None-Match``, so that two attempts could commit under one name."""


class _SpoiltUploadError(StorageAwayError):
    """The server does not have the parts that it said it has."""


class ChangedFileError(OSError):
    """A file has other content than when it was checked."""


@dataclass
class _Upload:
    """A multipart upload, which goes on where it was interrupted."""

    id: str
    size: int
    changed_ns: int
    etags: dict[int, str] = field(default_factory=dict)
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    """Of the parts that are there."""


class Bucket:
    """The objects below one address. Safe under threads.

    Each method may raise StorageAwayError (the server does not answer, answers what no object store does, or
    refuses for now or for lack of rights) and OSError.

    Args:
        address: Where they are.
        part_bytes: A longer file is uploaded in parts of so many bytes, which servers want to be 5 MiB at least.
    """

    def __init__(self, address: BucketAddress, part_bytes: int = PART_BYTES) -> None:
        self.address = address
        self._part_bytes = part_bytes
        self._client: S3Client | None = None
        self._uploads: dict[str, _Upload] = {}
        self._is_proven = False

    def names(self, folder: str) -> Mapping[str, tuple[int, str]]:
        """The objects right in ``folder``, by name: size and ETag. Those that no file could be named as are none of ours."""
        with self._told(folder):
            found = {
                one["Key"].rpartition("/")[2]: (one["Size"], one["ETag"])
                for page in self._pages(folder)
                for one in page.get("Contents", ())
            }
        return {name: about for name, about in found.items() if _is_file_name(name)}

    def folders(self, folder: str) -> set[str]:
        """What lies in ``folder`` and has something in it, unfinished uploads included; names as of ``names``."""
        prefix = self._key(f"{folder}/" if folder else "")
        with self._told(folder):
            found = {
                one["Prefix"].removeprefix(prefix).rstrip("/")
                for page in self._pages(folder)
                for one in page.get("CommonPrefixes", ())
            }
        found |= {key.removeprefix(prefix).partition("/")[0] for key, _ in self._unfinished(prefix)}
        return set(filter(_is_file_name, found))

    def read(self, name: str) -> tuple[bytes, str]:
        """A record and its ETag.

        Raises:
            FileNotFoundError: There is none.
            OSError: It is longer than 16 MiB: no record of ours is.
        """
        with self._told(name):
            answer = self._s3.get_object(Bucket=self.address.bucket, Key=self._key(name))
            with contextlib.closing(answer["Body"]) as body:
                content = body.read(_LONGEST_RECORD + 1)
            etag, size = answer["ETag"], answer["ContentLength"]
        if len(content) > _LONGEST_RECORD:
            raise OSError(f"{self.address}: {name} is too long for a record")
        if len(content) != size:
            raise StorageAwayError(f"{self.address} sent {len(content)} of {size} bytes of {name}")
        return content, etag

    def parts(self, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes of an object from ``start`` to ``end`` (not included), of which there are some; it is opened at once.

        Raises:
            FileNotFoundError: There is none.
        """
        request: GetObjectRequestTypeDef = {
            "Bucket": self.address.bucket,
            "Key": self._key(name),
        }
        if start or end is not None:
            request["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        with self._told(name):
            answer = self._s3.get_object(**request)
            body = answer["Body"]
            # Without these it is not the store that answers, or nobody could see where the answer breaks off.
            _ = answer["ETag"], answer["ContentLength"]

        def read() -> Iterator[bytes]:
            with contextlib.closing(body):
                while True:
                    with self._told(name):
                        part = body.read(_READ_BYTES)
                    if not part:
                        return
                    yield part

        return read()

    def size(self, name: str) -> int:
        """How many bytes an object has.

        Raises:
            FileNotFoundError: There is none.
        """
        with self._told(name):
            bucket, key = self.address.bucket, self._key(name)
            answer: HeadObjectOutputTypeDef | GetObjectOutputTypeDef
            try:
                answer = self._s3.head_object(Bucket=bucket, Key=key)
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] != HTTPStatus.NOT_FOUND:
                    raise
                # An answer to HEAD has no words: this one tells a missing object from a proxy's page.
                answer = self._s3.get_object(Bucket=bucket, Key=key)
                answer["Body"].close()
            _ = answer["ETag"]  # a page has a length, too
            return answer["ContentLength"]

    def create(self, name: str, content: bytes) -> str:
        """Make an object that is not there yet, by one conditional write; answers its ETag.

        Raises:
            FileExistsError: There is one: maybe by this very call, whose first answer was lost.
            NoConditionalWritesError: The server ignores the condition.
        """
        if not self._is_proven:
            self.prove_conditional_writes()
        return self._put(name, content, only_new=True)

    def replace(self, name: str, content: bytes) -> str:
        """Make an object, or put it in the place of what is there; answers its ETag."""
        return self._put(name, content)

    def prove_conditional_writes(self) -> None:
        """See that the server refuses to replace an object under ``If-None-Match: *``.

        Raises:
            NoConditionalWritesError: It replaced one.
        """
        with contextlib.suppress(FileExistsError):
            self._put(_PROOF, b"", only_new=True)
        try:
            self._put(_PROOF, b"", only_new=True)
        except FileExistsError:
            self._is_proven = True
            return
        raise NoConditionalWritesError(
            f"the server of {self.address} ignores If-None-Match: two attempts could commit one checkpoint. Use a "
            "server with conditional writes"
        )

    def upload(
        self,
        name: str,
        path: Path,
        go_on: Callable[[], None] = lambda: None,
        size: int | None = None,
        sha256: str | None = None,
    ) -> None:
        """Upload a plain file, in parts where it is long; an upload that failed goes on behind the parts that are there.

        Args:
            name: Of the object, which is there whole or not at all.
            path: The file.
            go_on: Called before each part; what it raises ends the upload.
            size: How many bytes it must have; None: any number. Parts of a file that has grown since it
                was checked could be longer than the memory.
            sha256: Its digest as it was checked: with another one there is no object. None: any.
        """
        with open(open_plain(path), "rb", buffering=0) as file:  # noqa: PTH123 a descriptor, not a path
            about = os.fstat(file.fileno())
            if size is not None and about.st_size != size:
                raise OSError(errno.EFBIG, f"it has {about.st_size} bytes by now, not {size}")
            if about.st_size <= self._part_bytes:
                go_on()
                content = _read_at(file, 0, about.st_size)
                _refuse_other(hashlib.sha256(content), sha256)
                self._put(name, content)
                return
            self._upload_in_parts(name, file, about, go_on, sha256)

    def delete(self, name: str) -> None:
        """Remove one object, if it is there."""
        self._delete([self._key(name)])

    def remove(self, name: str) -> None:
        """Remove the object ``name``, all that lies below it, and unfinished uploads of these."""
        key = self._key(name)
        for unfinished, upload_id in self._unfinished(key):
            if unfinished == key or unfinished.startswith(f"{key}/"):
                self._abort(unfinished, upload_id)
        doomed = [key]
        with self._told(name):
            pages = self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self.address.bucket, Prefix=f"{key}/"
            )
            for page in pages:
                told = [one["Key"] for one in _listed(page).get("Contents", ())]
                # A server may list all that it has: as of folders' names, none is taken at its word.
                doomed += [each for each in told if each.startswith(f"{key}/")]
        for start in range(0, len(doomed), _DELETED_AT_ONCE):
            self._delete(doomed[start : start + _DELETED_AT_ONCE])

    @property
    def _s3(self) -> "S3Client":
        # Making a client is not safe under threads, using one is.
        with _MAKING_A_CLIENT:
            if self._client is None:
                self._client = boto3.client("s3", config=_CONFIG)
            return self._client

    def _key(self, name: str) -> str:
        return f"{self.address.prefix}/{name}" if self.address.prefix else name

    def _pages(self, folder: str) -> Iterator["ListObjectsV2OutputTypeDef"]:
        prefix = self._key(f"{folder}/" if folder else "")
        pages = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket=self.address.bucket, Prefix=prefix, Delimiter="/"
        )
        return map(_listed, pages)

    def _unfinished(self, prefix: str) -> list[tuple[str, str]]:
        found = []
        with self._told(prefix):
            pages = self._s3.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.address.bucket, Prefix=prefix
            )
            for page in pages:
                found += [(one["Key"], one["UploadId"]) for one in page.get("Uploads", ())]
        return found

    def _put(self, name: str, content: bytes, *, only_new: bool = False) -> str:
        request: PutObjectRequestTypeDef = {
            "Bucket": self.address.bucket,
            "Key": self._key(name),
            "Body": content,
            "ContentMD5": _md5(content),
        }
        if only_new:
            request["IfNoneMatch"] = _NONE_THERE
        with self._told(name):
            return self._s3.put_object(**request)["ETag"]

    def _upload_in_parts(
        self,
        name: str,
        file: BinaryIO,
        about: os.stat_result,
        go_on: Callable[[], None],
        sha256: str | None,
    ) -> None:
        # Out of the others' sight: a file may be uploaded twice at once, as of a rank that voted before its agent was
        # restarted and votes again.
        upload = self._uploads.pop(name, None)
        try:
            if upload is None or (upload.size, upload.changed_ns) != (
                about.st_size,
                about.st_mtime_ns,
            ):
                if upload is not None:  # of what the file held before
                    self._abort(self._key(name), upload.id)
                upload = self._begin(name, about)
            self._send_parts(name, file, upload, go_on)
            _refuse_other(upload.digest, sha256)
            self._complete(name, upload)
        except (ChangedFileError, _SpoiltUploadError):
            if upload is not None:
                self._abort(self._key(name), upload.id)
            raise
        except FileNotFoundError:
            # It was finished by a request whose answer was lost, or was given up.
            if self.size(name) != about.st_size:
                raise
        except BaseException:
            if upload is not None:
                self._uploads[name] = upload
            raise

    def _begin(self, name: str, about: os.stat_result) -> _Upload:
        with self._told(name):
            answer = self._s3.create_multipart_upload(
                Bucket=self.address.bucket, Key=self._key(name)
            )
            return _Upload(answer["UploadId"], about.st_size, about.st_mtime_ns)

    def _send_parts(
        self, name: str, file: BinaryIO, upload: _Upload, go_on: Callable[[], None]
    ) -> None:
        part_bytes = max(self._part_bytes, -(-upload.size // _MOST_PARTS))
        count = -(-upload.size // part_bytes)
        bucket, key = self.address.bucket, self._key(name)
        for number in range(1, count + 1):
            if number in upload.etags:
                continue
            go_on()
            content = _read_at(file, (number - 1) * part_bytes, part_bytes)
            with self._told(name):
                answer = self._s3.upload_part(
                    Bucket=bucket,
                    Key=key,
                    UploadId=upload.id,
                    PartNumber=number,
                    Body=content,
                    ContentMD5=_md5(content),
                )
                upload.etags[number] = answer["ETag"]
            upload.digest.update(content)

    def _complete(self, name: str, upload: _Upload) -> None:
        done: list[CompletedPartTypeDef] = [
            {"PartNumber": number, "ETag": etag} for number, etag in sorted(upload.etags.items())
        ]
        with self._told(name):
            self._s3.complete_multipart_upload(
                Bucket=self.address.bucket,
                Key=self._key(name),
                UploadId=upload.id,
                MultipartUpload={"Parts": done},
            )

    def _abort(self, key: str, upload_id: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._told(key):
            self._s3.abort_multipart_upload(Bucket=self.address.bucket, Key=key, UploadId=upload_id)

    def _delete(self, keys: list[str]) -> None:
        named: list[ObjectIdentifierTypeDef] = [{"Key": key} for key in keys]
        with self._told(keys[0]):
            answer = self._s3.delete_objects(
                Bucket=self.address.bucket, Delete={"Objects": named, "Quiet": True}
            )
        for error in answer.get("Errors", ()):
            raise StorageAwayError(
                f"{self.address} does not delete {error.get('Key')}: {error.get('Code')}"
            )

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Within, what the client raises becomes an OSError that says what the server answered."""
        try:
            yield
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if code in _NOT_FOUND:
                raise FileNotFoundError(f"{self.address} has no {name}") from error
            if code in _TAKEN:
                raise FileExistsError(f"{self.address} has {name}") from error
            away = _SpoiltUploadError if code in _SPOILT else StorageAwayError
            raise away(
                f"{self.address} answers {code} (HTTP {status}) to {error.operation_name}"
            ) from error
        except BotoCoreError as error:
            why = _USER_OF_URL.sub("", str(error))
            raise StorageAwayError(f"{self.address} does not answer: {why}") from error
        except OSError:
            raise
        # The client checks little of what a proxy may answer in its place.
        except Exception as error:
            why = _USER_OF_URL.sub("", f"{type(error).__name__}: {error}")
            raise StorageAwayError(
                f"{self.address} answers what no object store does: {why}"
            ) from error


def _is_file_name(name: str) -> bool:
    # Consoles keep an object without a name for a folder. One named `..` would lead whoever copies it out of theirs,
    # and so would `../..`, which only a server that does not divide names where it is asked to tells of.
    is_name = name not in {"", ".", ".."} and not set(name) & {"\0", "/"}
    return is_name and len(name.encode()) <= _LONGEST_NAME


def _listed(page: "ListObjectsV2OutputTypeDef") -> "ListObjectsV2OutputTypeDef":
    """``page``, if it is one: the client takes an empty answer for an empty bucket.

    Raises:
        ValueError: It is not.
    """
    if "IsTruncated" not in page:
        raise ValueError("a listing without an end")
    return page


def _refuse_other(digest: "hashlib._Hash", sha256: str | None) -> None:
    if sha256 not in (None, digest.hexdigest()):
        raise ChangedFileError(
            f"it has changed since it was checked: its sha256 is {digest.hexdigest()}, not {sha256}"
        )


def _md5(content: bytes) -> str:
    # Against damage on the way, as the interface wants it; who wrote what is another question.
    return base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()


def _read_at(file: BinaryIO, start: int, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = os.pread(file.fileno(), size - len(content), start + len(content))
        if not part:
            break
        content += part
    return bytes(content)
