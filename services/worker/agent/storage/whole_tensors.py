"""The tensors of a model, as they lie in the shards of a committed checkpoint.

Shard files say which box of which tensor each of their arrays is, so neither torch nor the job's code is
needed. They are verified before they are read, and so is what they say: ranks run the user's code.
"""

import hashlib
import itertools
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.contract.storage.manifests import Manifest, ShardFile
from services.contract.system.durable import is_hollow, open_plain

_MODEL: Final = "model"
_AVERAGES: Final = "ema"
_FILE: Final = "file."
_MOST_FILES: Final = 32
_MOST_HEADER: Final = 100_000_000
_MOST_RUNS: Final = 1 << 28
# Of all tensors: each takes microseconds, and the node exports and verifies nothing else meanwhile. Rows of
# real models are longer, so these are as many as their bytes take time for.
_ANY_RUNS: Final = 1 << 26
_BYTES_A_RUN: Final = 256
_MOST_BOXES: Final = 1 << 16  # of a tensor: one a rank
_MOST_DIMS: Final = 64  # as PyTorch has
_ITEM_BYTES: Final = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
_ABOUT: Final = "meshloom"
_BLOCK_BYTES: Final = 1 << 16
_BLOCK_DIGEST: Final = 16


class IncompleteError(Exception):
    """The shards do not hold the whole of a tensor, or not in this version's format."""


class DifferentError(Exception):
    """A shard is not what was committed; the arguments are its file and what is wrong."""


class Shard:
    """The bytes of a shard, in blocks: what is read of one later is what its digests were made of, or refused.

    Ranks of other jobs may write to the file meanwhile, and undo it: its whole digest alone would not tell.

    Args:
        name: Below the job's folder.
        view: The file, mapped.
    """

    def __init__(self, name: str, view: memoryview) -> None:
        self._name = name
        self._view = view
        self._blocks = bytearray()
        self._number, self._block = -1, b""
        whole = hashlib.sha256()
        for start in range(0, len(view), _BLOCK_BYTES):
            block = bytes(view[start : start + _BLOCK_BYTES])
            whole.update(block)
            self._blocks += _block_digest(block)
        self.sha256 = whole.hexdigest()

    def __len__(self) -> int:
        """Its bytes."""
        return len(self._view)

    def read(self, start: int, end: int) -> memoryview:
        """What it has from ``start`` on, to the end of a block or ``end``.

        Raises:
            DifferentError: It has changed since.
        """
        number, within = divmod(start, _BLOCK_BYTES)
        if number != self._number:
            first = number * _BLOCK_BYTES
            block = bytes(self._view[first : first + _BLOCK_BYTES])
            known = number * _BLOCK_DIGEST
            if _block_digest(block) != self._blocks[known : known + _BLOCK_DIGEST]:
                raise DifferentError(self._name, "it is written to while it is exported")
            self._number, self._block = number, block
        return memoryview(self._block)[within : within + end - start]


@dataclass(frozen=True)
class Content:
    """A part of a shard."""

    shard: Shard
    start: int
    end: int

    def __len__(self) -> int:
        """Its bytes."""
        return self.end - self.start

    def parts(self, start: int, end: int) -> Iterator[memoryview]:
        """What it has from ``start`` to ``end``, in its order."""
        at, end = self.start + start, self.start + end
        while at < end:
            part = self.shard.read(at, end)
            yield part
            at += len(part)


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, as it lies in a shard: row by row, without gaps."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    content: Content


@dataclass
class Whole:
    """A tensor and the pieces that tile it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self.dtype]

    @property
    def total_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.item_bytes


def tensors_of(
    folder: Path, manifest: Manifest, stack: ExitStack
) -> tuple[dict[str, dict[str, Whole]], dict[str, Content]]:
    """Tensors of the model, and averages of them if there are any, and the files that belong beside.

    Args:
        folder: Where the shards lie.
        manifest: What was committed.
        stack: Keeps the shards open, for the contents are read from them.

    Raises:
        DifferentError: A shard is not what was committed.
        IncompleteError: The shards do not make whole tensors.
        OSError: The storage refuses.
    """
    kinds: dict[str, dict[str, Whole]] = {_MODEL: {}, _AVERAGES: {}}
    beside: dict[str, Content] = {}
    for shard in manifest.shards:
        content = _verified(folder, shard, stack)
        header_bytes = int.from_bytes(_read(content, 0, 8), "little")
        header, about = _said(shard.name, content, header_bytes)
        _refuse_shared_bytes(shard.name, header)
        for name, entry in header.items():
            if name.startswith(_FILE) and len(beside) < _MOST_FILES:
                start, end = (8 + header_bytes + place for place in entry["data_offsets"])
                beside[name.removeprefix(_FILE)] = _part(name, content, start, end)
        for name, box in about["boxes"].items():
            kind, _, fqn = name.partition(".")
            if kind in kinds:
                start, end = (8 + header_bytes + place for place in header[name]["data_offsets"])
                piece = Piece(
                    tuple(box["offsets"]), tuple(box["shape"]), _part(name, content, start, end)
                )
                whole = Whole(header[name]["dtype"], tuple(box["global_shape"]), [])
                _check_box(f"{shard.name}: {name}", whole, piece)
                _add(kinds[kind], fqn, whole, piece)
    for name, tensor in itertools.chain(*(tensors.items() for tensors in kinds.values())):
        held = sum(math.prod(piece.shape) for piece in tensor.pieces)
        if held != math.prod(tensor.shape):
            raise IncompleteError(f"{name}: the shards hold {held} of {math.prod(tensor.shape)}")
        if _overlap(tensor.pieces):
            raise IncompleteError(
                f"{name}: the shards hold a part of it twice, and another not at all"
            )
    _refuse_short_rows([*itertools.chain(*(tensors.values() for tensors in kinds.values()))])
    if not kinds[_MODEL]:
        raise IncompleteError("the shards hold no tensor of a model")
    return {kind: tensors for kind, tensors in kinds.items() if tensors}, beside


def _said(shard: str, content: Shard, header_bytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a shard says of its arrays, and of the boxes that they are."""
    if header_bytes > _MOST_HEADER:
        raise IncompleteError(f"{shard} has a header of {header_bytes} bytes")
    header: dict[str, Any] = json.loads(_read(content, 8, header_bytes))
    about = json.loads(header.pop("__metadata__", {}).get(_ABOUT, "null"))
    if not isinstance(about, dict) or about.get("version") != 1:
        raise IncompleteError(f"{shard} was not written by version 1 of this format")
    return header, about


def _refuse_shared_bytes(shard: str, header: Mapping[str, Any]) -> None:
    """Refuse arrays that lie in the same bytes: a file of a megabyte would make an export of terabytes.

    Raises:
        IncompleteError: There are such.
    """
    filled = 0
    for start, end in sorted(entry["data_offsets"] for entry in header.values()):
        if start < filled:
            raise IncompleteError(f"arrays of {shard} share bytes of it")
        filled = max(filled, end)


def _refuse_short_rows(tensors: Sequence[Whole]) -> None:
    """Refuse tensors that would be written byte by byte, for a day.

    Raises:
        IncompleteError: They have far more rows than tensors of as many bytes have.
    """
    size = sum(tensor.total_bytes for tensor in tensors)
    rows = sum(
        math.prod(piece.shape[: _split_axis(tensor.shape, piece.shape)])
        for tensor in tensors
        for piece in tensor.pieces
        if piece.content
    )
    if rows > _ANY_RUNS + size // _BYTES_A_RUN:
        raise IncompleteError(
            f"the shards hold {rows} rows of {size} bytes together, too short ones to be exported; a job that "
            "is cloned to fewer ranks, or shards other dimensions, saves longer ones"
        )


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Whether two boxes of a tensor have an element in common.

    Raises:
        IncompleteError: There are more than ranks may be: to compare a million takes an hour.
    """
    if len(pieces) > _MOST_BOXES:
        raise IncompleteError(f"a tensor lies in {len(pieces)} boxes, more than {_MOST_BOXES}")
    boxes = [
        [(offset, offset + size) for offset, size in zip(p.offsets, p.shape, strict=True)]
        for p in pieces
        if math.prod(p.shape)
    ]
    if len(boxes) < 2:  # noqa: PLR2004
        return False
    if not boxes[0]:
        return True
    # Along the dim that most of them divide, few lie beside each other.
    along = max(range(len(boxes[0])), key=lambda dim: len({box[dim][0] for box in boxes}))
    beside: list[list[tuple[int, int]]] = []
    for box in sorted(boxes, key=lambda box: box[along]):
        beside = [other for other in beside if other[along][1] > box[along][0]]
        if any(_meet(box, other) for other in beside):
            return True
        beside.append(box)
    return False


def _meet(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def _add(tensors: dict[str, Whole], name: str, whole: Whole, piece: Piece) -> None:
    known = tensors.setdefault(name, whole)
    if (known.dtype, known.shape) != (whole.dtype, whole.shape):
        raise IncompleteError(f"{name}: the shards name different dtypes or shapes of it")
    known.pieces.append(piece)


def _check_box(where: str, whole: Whole, piece: Piece) -> None:
    """Refuse a box that no rank of ours writes: ranks run the user's code.

    Raises:
        IncompleteError: It does not lie within its tensor, has not its content, or so many rows that
            they are not written in any time.
    """
    numbers = [*whole.shape, *piece.offsets, *piece.shape]
    lies_within = (
        len(whole.shape) <= _MOST_DIMS
        and all(type(number) is int for number in numbers)
        and len(whole.shape) == len(piece.shape) == len(piece.offsets)
        and all(
            0 <= offset <= extent - size <= extent
            for extent, offset, size in zip(whole.shape, piece.offsets, piece.shape, strict=True)
        )
    )
    item_bytes = _ITEM_BYTES.get(whole.dtype)
    if not lies_within or item_bytes is None:
        raise IncompleteError(
            f"{where} is not a box of a tensor of {whole.dtype} {whole.shape[:_MOST_DIMS]}"
        )
    if len(piece.content) != math.prod(piece.shape) * item_bytes:
        raise IncompleteError(f"{where} has {len(piece.content)} bytes for a box {piece.shape}")
    if math.prod(piece.shape[: _split_axis(whole.shape, piece.shape)]) > _MOST_RUNS:
        raise IncompleteError(f"{where} has more than {_MOST_RUNS} rows")


def runs(whole: Sequence[int], offsets: Sequence[int], shape: Sequence[int]) -> Iterator[int]:
    """Where, in elements, the rows of a box begin in its tensor, in the box's own order.

    The rows are the longest stretches that lie without gaps in both: ``run_length`` elements each.
    """
    axis = _split_axis(whole, shape)
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    # Counted, as itertools.product would hold all numbers of each dim.
    for number in range(math.prod(shape[:axis])):
        start, left = base, number
        for dim in reversed(range(axis)):
            left, place = divmod(left, shape[dim])
            start += place * strides[dim]
        yield start


def run_length(whole: Sequence[int], shape: Sequence[int]) -> int:
    """How many elements of a box lie without gaps in its tensor."""
    return math.prod(shape[_split_axis(whole, shape) :])


def _split_axis(whole: Sequence[int], shape: Sequence[int]) -> int:
    axis = len(whole) - 1
    while axis > 0 and shape[axis] == whole[axis]:
        axis -= 1
    return max(axis, 0)


def _verified(folder: Path, shard: ShardFile, stack: ExitStack) -> Shard:
    name = f"shards/{folder.name}/{shard.name}"
    try:
        # Not by its name alone: a rank may have put a pipe there, which is waited for forever.
        file = stack.enter_context(os.fdopen(open_plain(folder / shard.name), "rb"))
    except FileNotFoundError:
        raise DifferentError(name, "the file is missing") from None
    if os.fstat(file.fileno()).st_size != shard.bytes:
        raise DifferentError(name, f"it does not have the {shard.bytes} bytes of the manifest")
    if is_hollow(file.fileno()):
        raise DifferentError(name, "nearly all of it are holes, which no rank of ours leaves")
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    found = Shard(name, memoryview(mapped))
    if found.sha256 != shard.sha256:
        raise DifferentError(
            name, f"its sha256 is {found.sha256}, the manifest says {shard.sha256}"
        )
    return found


def _part(name: str, shard: Shard, start: int, end: int) -> Content:
    """A part of which a header speaks.

    Raises:
        IncompleteError: The shard has no such part.
    """
    if not 0 <= start <= end <= len(shard):
        raise IncompleteError(f"{name} is not within its shard")
    return Content(shard, start, end)


def _read(shard: Shard, start: int, size: int) -> bytes:
    return b"".join(Content(shard, start, len(shard)).parts(0, min(size, len(shard) - start)))


def _block_digest(block: bytes) -> bytes:
    # Processors have instructions for it: all of a shard is digested so, optimizer states included.
    return hashlib.sha256(block).digest()[:_BLOCK_DIGEST]
