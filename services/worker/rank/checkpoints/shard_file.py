"""One rank's file of a checkpoint, in the safetensors format; nothing in it can run code.

It is written by hand rather than by the library, so that it is digested while it is written and
never serialised a second time in memory: https://huggingface.co/docs/safetensors (format). It is
read by the library.
"""

import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from services.contract.storage.manifests import ShardFile
from services.contract.system.durable import (
    make_folders,
    open_plain,
    says_nothing_of_the_file,
    sync_folder,
)
from services.contract.system.own_process import say
from services.contract.words.bounds import encodable

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
HEADER_NAME: Final = "__metadata__"
"""The one name that no tensor can have in the format."""
HEADER_BYTES: Final = 100_000_000
"""Readers of the format refuse files that say more than this beside their tensors."""
_ALIGNMENT: Final = 8
_READ_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 22
_TRIES_AGAIN_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
_Answer = TypeVar("_Answer")


class CorruptShardError(RuntimeError):
    """A shard file is missing, or is not what its manifest says that was committed.

    Args:
        path: The file.
        reason: What is wrong with it.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint file {path} {reason}")
        self.path = path
        self.reason = reason


class UnsavableTensorError(TypeError):
    """The format has no name for a tensor's dtype."""


class UnsavableNameError(ValueError):
    """A tensor's name is no text that a file can hold."""


class LongHeaderError(ValueError):
    """What is to be said beside the tensors of a file is more than can be read again."""


def file_name(rank: int) -> str:
    """Name of the file of ``rank`` in a checkpoint's folder."""
    return f"rank-{rank:05d}.safetensors"


def write(
    folder: Path,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    go_on: Callable[[], None] = lambda: None,
) -> ShardFile:
    """Writes the file of ``rank`` so that it is there whole and durably, or not at all.

    Args:
        folder: The checkpoint's, in that of the job's shards; made if missing.
        rank: Whose file.
        tensors: By name.
        metadata: Text beside them.
        go_on: Called before each piece of the file; what it raises ends the writing.

    Raises:
        OSError: The storage refused.
        UnsavableTensorError: A tensor's dtype has no name in the format.
        UnsavableNameError: A tensor's name is no text.
        LongHeaderError: Names and text are more than readers take.
    """
    shards = folder.parent
    make_folders(folder, shards.parent)
    path = folder / file_name(rank)
    draft = folder / f".{path.name}.partial"
    digest = hashlib.sha256()
    size = 0
    try:
        with draft.open("wb") as file:
            for part in _parts(tensors, metadata):
                go_on()
                digest.update(part)
                size += file.write(part)
            file.flush()
            go_on()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(folder)
    return ShardFile(rank=rank, name=path.name, bytes=size, sha256=digest.hexdigest())


def free_name(wanted: str, taken: Collection[str]) -> str:
    """The name of a tensor that is none of ``taken``, in characters that a file can hold.

    Python's strings may hold halves of surrogate pairs, which no reader of the format takes.
    """
    name = wanted = encodable(wanted)
    number = 1
    while name in taken:
        number += 1
        name = f"{wanted}#{number}"
    return name


def comes_back(text: str) -> bool:
    """Whether JSON gives it back as it is: the halves of one pair side by side become one character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return bool(json.loads(json.dumps(text)) == text)
    return True


def can_hold(dtype: torch.dtype) -> bool:
    """Whether the format has a name for tensors of this kind."""
    return dtype in _DTYPES


def once_it_answers(read: Callable[[], _Answer]) -> _Answer:
    """What ``read`` answers, tried for as long as the storage does not: a file is not damaged by that.

    Raises:
        OSError: Anything else.
    """
    waits_s = itertools.chain(_TRIES_AGAIN_S, itertools.repeat(_TRIES_AGAIN_S[-1]))
    while True:
        try:
            return read()
        except OSError as error:
            if not says_nothing_of_the_file(error):
                raise
            say(f"waits for the storage of its checkpoint: {error}\n", "stderr")
        threading.Event().wait(next(waits_s))


def verify(folder: Path, shard: ShardFile) -> None:
    """Compares a shard file's bytes with the manifest's digest.

    Raises:
        CorruptShardError: It is missing, no plain file, or has another size or digest.
        PermissionError: This user may not read it.
    """
    path = folder / shard.name
    try:
        once_it_answers(lambda: _compare(path, shard))
    except PermissionError:
        raise
    except OSError as error:
        raise CorruptShardError(path, f"cannot be read: {error}") from error


def _compare(path: Path, shard: ShardFile) -> None:
    digest = hashlib.sha256()
    with open(open_plain(path), "rb") as file:  # noqa: PTH123 a descriptor, not a path
        size = os.fstat(file.fileno()).st_size
        if size != shard.bytes:  # one of holes could be of any size, and be read for hours
            raise _corrupt(path, f"it has {size} bytes, the manifest says {shard.bytes}")
        while part := file.read(_READ_BYTES):
            digest.update(part)
    if digest.hexdigest() != shard.sha256:
        raise _corrupt(path, f"sha256 is {digest.hexdigest()}, the manifest says {shard.sha256}")


def _corrupt(path: Path, why: str) -> CorruptShardError:
    advice = "restore the file or resume from another checkpoint"
    return CorruptShardError(path, f"is corrupt: {why}; {advice}")


class ShardReader:
    """An open shard file. Its digest is verified before the first value is read from it.

    Args:
        handle: The file, opened by ``safetensors.safe_open``.
        folder: Of the checkpoint.
        shard: What the manifest says of the file.
    """

    def __init__(self, handle: safe_open, folder: Path, shard: ShardFile) -> None:
        self._handle = handle
        self._folder = folder
        self._shard = shard
        self._is_verified = False

    @property
    def metadata(self) -> Mapping[str, str]:
        """The text beside the tensors, not verified."""
        metadata: dict[str, str] | None = self._handle.metadata()  # type: ignore[no-untyped-call]  # safetensors'
        return metadata or {}

    def verify(self) -> None:
        """Compares the file with the manifest, unless that was done.

        Raises:
            CorruptShardError: The file is not what was committed.
        """
        self._verify_once()

    def tensor(self, name: str) -> torch.Tensor:
        """Reads one tensor.

        Raises:
            CorruptShardError: The file is not what was committed.
        """
        self._verify_once()
        tensor: torch.Tensor = self._handle.get_tensor(name)  # type: ignore[no-untyped-call]  # safetensors'
        return tensor

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Reads a part of a tensor, one slice a dim.

        Raises:
            CorruptShardError: The file is not what was committed.
        """
        if not slices:
            return self.tensor(name)
        self._verify_once()
        part: torch.Tensor = self._handle.get_slice(name)[slices]  # type: ignore[no-untyped-call]  # safetensors'
        return part

    def _verify_once(self) -> None:
        if not self._is_verified:
            verify(self._folder, self._shard)
            self._is_verified = True


@contextmanager
def opened(folder: Path, shard: ShardFile) -> Iterator[ShardReader]:
    """Opens a shard file of a checkpoint.

    What is raised within says nothing about the file: user code that takes its state back may lack anything.

    Raises:
        CorruptShardError: It is missing or no safetensors file.
        PermissionError: This user may not read it.
    """
    path = folder / shard.name
    try:
        # The library would wait for ever at a pipe that another rank has put there.
        os.close(once_it_answers(lambda: open_plain(path)))
        opening = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        verify(folder, shard)  # the digest says more than a parser's complaint
        raise CorruptShardError(path, f"cannot be read: {error}") from error
    with opening as handle:
        yield ShardReader(handle, folder, shard)


def _parts(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    # Widest elements first: so every tensor is aligned, as the format asks of writers.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {HEADER_NAME: dict(metadata)}
    offset = 0
    for name, tensor in ordered:
        _refuse_broken(name)
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _dtype_name(name, tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > HEADER_BYTES:
        raise LongHeaderError(
            f"what this rank saves beside its tensors takes {len(text)} bytes as JSON, and a checkpoint "
            f"file holds {HEADER_BYTES}: make tensors of long lists of numbers"
        )
    yield len(text).to_bytes(8, "little")
    yield text
    for _, tensor in ordered:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        whole = memoryview(raw.numpy())  # type: ignore[arg-type]  # numpy types no buffer in 3.11
        # In pieces, so that what was digested is still in the cache when it is written.
        for start in range(0, len(whole), _PIECE_BYTES):
            yield whole[start : start + _PIECE_BYTES]


def _refuse_broken(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UnsavableNameError(
            f"the tensor name {name!r} holds half a surrogate pair, which a checkpoint file cannot: "
            "rename the module or parameter"
        ) from error


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise UnsavableTensorError(f"tensor {name!r} has dtype {dtype}, which safetensors lacks")
    return _DTYPES[dtype]
