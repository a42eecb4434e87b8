"""Puts the model of a committed checkpoint together: whole tensors, in the safetensors format.

``python -m services.worker.agent.storage.export --root R --job J --checkpoint C`` is a process of its own,
so that what it copies does not hold up the agent. It needs neither torch nor the job's code: shard
files say which box of which tensor each of their arrays is. They are verified before they are read.

It writes ``<root>/<job>/exports/<checkpoint>/model.safetensors``, ``export.json`` with the digests of all
files, and beside them the files that the
model brought, such as ``config.json``: of a model of ``transformers`` that makes a folder which
``from_pretrained`` loads. A model that is larger than one file
should be gets several and ``model.safetensors.index.json``, as readers of the format expect. Averages of
the weights, where the job kept some, are written in the same way to ``ema.safetensors``, each under the
name of its parameter. Its last line on stdout is the outcome as JSON.
"""

import argparse
import hashlib
import itertools
import json
import math
import mmap
import os
import re
import resource
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from services.contract.storage.commit_chain import ChainError, CommitChain
from services.contract.storage.exports import EXPORT_MANIFEST, ExportedFile, ExportManifest
from services.contract.storage.manifests import Manifest, ShardFile
from services.contract.system.durable import is_hollow, make_folders, open_plain, sync_folder
from services.contract.system.own_process import set_up_process
from services.worker.agent.host.removal import remove_what_can_be

FILE_BYTES: Final = 5_000_000_000
_MODEL: Final = "model"
_AVERAGES: Final = "ema"
_FILE: Final = "file."
# A rank named it: nothing that leads elsewhere, or takes the place of what is written here.
_PLAIN_NAME: Final = re.compile(
    r"(?!model|ema[.-]|export\.json$)[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*", re.ASCII
)
_MOST_FILES: Final = 32
_GROUP_READS: Final = 0o050
_MOST_HEADER: Final = 100_000_000
_MOST_MEMORY: Final = 4 << 30
_MOST_RUNS: Final = 1 << 28
# Of all tensors: each takes microseconds, and the node exports and verifies nothing else meanwhile. Rows of
# real models are longer, so these are as many as their bytes take time for.
_ANY_RUNS: Final = 1 << 26
_BYTES_A_RUN: Final = 256
_MOST_BOXES: Final = 1 << 16  # of a tensor: one a rank
_MOST_DIMS: Final = 64  # as PyTorch has
_LONGEST_REASON: Final = 2_000
_ITEM_BYTES: Final = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
_ABOUT: Final = "meshloom"
_ALIGNMENT: Final = 8
_PIECE_BYTES: Final = 1 << 24
_BLOCK_BYTES: Final = 1 << 16
_BLOCK_DIGEST: Final = 16


class ExportOutcome(BaseModel):
    """What came of it: the files and their bytes, or why there are none.

    ``corrupt_file``: below the job's folder, what is not what was committed.
    """

    files: tuple[str, ...] = ()
    bytes: int = 0
    reason: str | None = None
    corrupt_file: str | None = None


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


def export(
    root: Path, job_id: str, checkpoint_id: str, file_bytes: int, node_id: str = ""
) -> ExportOutcome:
    """Exports a checkpoint; an earlier export of it is replaced once this one is whole.

    Raises:
        ChainError: It is not committed.
        DifferentError: A shard is not what was committed.
        IncompleteError: The shards do not make whole tensors.
        OSError: The storage refuses.
    """
    chain = CommitChain(root, job_id)
    manifest = chain.find(checkpoint_id)
    folder = root / job_id / "exports" / checkpoint_id
    partial = partial_folder(root, job_id, checkpoint_id, node_id)
    remove_what_can_be(partial)
    make_folders(partial, root)
    try:
        with ExitStack() as stack:
            kinds, beside = _contents(chain.shard_folder(checkpoint_id), manifest, stack)
            written = [_write(partial, kind, kinds[kind], file_bytes) for kind in kinds]
            names = (*itertools.chain(*written), *_write_beside(partial, beside))
        _write_manifest(partial, names)
        _share_with_readers(partial, root)
        sync_folder(partial)
        remove_what_can_be(folder)
        partial.replace(folder)
        sync_folder(folder.parent)
    finally:
        remove_what_can_be(partial)
    size = sum((folder / name).stat().st_size for name in names)
    return ExportOutcome(files=names, bytes=size)


def partial_folder(root: Path, job_id: str, checkpoint_id: str, node_id: str = "") -> Path:
    """Where an export lies until it is whole: each node's apart, for one that was taken for lost may still write."""
    return root / job_id / "exports" / f".{checkpoint_id}.{node_id}.partial"


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


def _contents(
    folder: Path, manifest: Manifest, stack: ExitStack
) -> tuple[dict[str, dict[str, Whole]], dict[str, Content]]:
    """Tensors of the model, and averages of them if there are any, and the files that belong beside."""
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


def _write_beside(folder: Path, beside: Mapping[str, Content]) -> tuple[str, ...]:
    names = tuple(sorted(name for name in beside if _PLAIN_NAME.fullmatch(name)))
    for name in names:
        with (folder / name).open("xb") as file:
            for part in beside[name].parts(0, len(beside[name])):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
    return names


def _write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Name size and digest of each file, for whoever downloads them."""
    files = tuple(_described(folder / name) for name in names)
    with (folder / EXPORT_MANIFEST).open("xb") as file:
        file.write(ExportManifest(files=files).model_dump_json(indent=1).encode())
        file.flush()
        os.fsync(file.fileno())


def _share_with_readers(folder: Path, root: Path) -> None:
    """Let the group of the storage root read an export, if that group may read the root itself.

    The controller is of that group where it is not the agent's user, as in docker-compose.yml. Of a job's folder it may
    only enter; shards, records and the chain stay what they are.
    """
    about = root.stat()
    if about.st_mode & _GROUP_READS != _GROUP_READS:
        return
    job = folder.parents[1]
    added = {job: 0o010, folder.parent: 0o050, folder: 0o050} | dict.fromkeys(
        folder.iterdir(), 0o040
    )
    for path, mode in added.items():
        known = path.lstat()
        if known.st_gid != about.st_gid:
            try:
                os.chown(path, -1, about.st_gid, follow_symlinks=False)
            except PermissionError:
                return  # not root, and not of that group: the export is whole, and stays this user's
        path.chmod(stat.S_IMODE(known.st_mode) | mode)


def _described(path: Path) -> ExportedFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ExportedFile(name=path.name, bytes=path.stat().st_size, sha256=digest)


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


def _write(
    folder: Path, stem: str, tensors: Mapping[str, Whole], file_bytes: int
) -> tuple[str, ...]:
    groups = list(_grouped(tensors, file_bytes))
    if len(groups) == 1:
        _write_file(folder / f"{stem}.safetensors", groups[0], tensors)
        return (f"{stem}.safetensors",)
    count = len(groups)
    names = [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for name, group in zip(names, groups, strict=True):
        _write_file(folder / name, group, tensors)
    index = {
        "metadata": {"total_size": sum(tensor.total_bytes for tensor in tensors.values())},
        "weight_map": {
            tensor: name for name, group in zip(names, groups, strict=True) for tensor in group
        },
    }
    path = folder / f"{stem}.safetensors.index.json"
    with path.open("xb") as file:
        file.write(json.dumps(index, indent=1, sort_keys=True).encode())
        file.flush()
        os.fsync(file.fileno())
    return (*names, path.name)


def _grouped(tensors: Mapping[str, Whole], file_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name in sorted(tensors):
        if group and size + tensors[name].total_bytes > file_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += tensors[name].total_bytes
    yield group


def _write_file(path: Path, names: Iterable[str], tensors: Mapping[str, Whole]) -> None:
    # Widest elements first: so every tensor is aligned, as the format asks of writers.
    ordered = sorted(names, key=lambda name: (-tensors[name].item_bytes, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    offset = 0
    for name in ordered:
        tensor = tensors[name]
        places[name] = offset
        offset += tensor.total_bytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [places[name], offset],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("xb", buffering=0) as file:
        descriptor = file.fileno()
        _put(descriptor, memoryview(len(text).to_bytes(8, "little") + text), 0)
        for name in ordered:
            _put_tensor(descriptor, tensors[name], 8 + len(text) + places[name])
        os.fsync(descriptor)


def _put_tensor(descriptor: int, tensor: Whole, start: int) -> None:
    item = tensor.item_bytes
    for piece in tensor.pieces:
        if not piece.content:  # of hundreds of millions of rows, perhaps
            continue
        length = run_length(tensor.shape, piece.shape) * item
        taken = 0
        for place in runs(tensor.shape, piece.offsets, piece.shape):
            at = start + place * item
            for part in piece.content.parts(taken, taken + length):
                _put(descriptor, part, at)
                at += len(part)
            taken += length


def _put(descriptor: int, content: memoryview, place: int) -> None:
    while content:
        written = os.pwrite(descriptor, content[:_PIECE_BYTES], place)
        content, place = content[written:], place + written


def _reason(error: Exception) -> str:
    # It may quote what a rank wrote, and the agent reads it whole.
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]


def main() -> None:
    """Export as the command line says; code 0 with the files, else 1."""
    set_up_process()
    # Of what is read of headers: shards themselves are mapped.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    memory = _MOST_MEMORY if most == resource.RLIM_INFINITY else min(_MOST_MEMORY, most)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    # Each shard takes two.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    parser = argparse.ArgumentParser(prog="python -m services.worker.agent.storage.export")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--node", default="", help="who exports: one at a time each")
    parser.add_argument("--file-bytes", type=int, default=FILE_BYTES, help="most of one file")
    wanted = parser.parse_args()
    try:
        outcome = export(wanted.root, wanted.job, wanted.checkpoint, wanted.file_bytes, wanted.node)
    except DifferentError as error:
        name, reason = error.args
        outcome = ExportOutcome(reason=reason, corrupt_file=name)
    except (ChainError, IncompleteError, OSError, ValueError, KeyError) as error:
        outcome = ExportOutcome(reason=_reason(error))
    except MemoryError:
        reason = f"what the shards say of their arrays takes more than {memory >> 20} MiB"
        outcome = ExportOutcome(reason=reason)
    # A header may have any form: lists for objects, a hundred thousand levels.
    except (TypeError, AttributeError, RecursionError) as error:
        outcome = ExportOutcome(
            reason=f"a shard's header is not what a rank writes: {_reason(error)}"
        )
    sys.stdout.write(outcome.model_dump_json() + "\n")
    sys.stdout.flush()
    # Maps of shards are still exported as views: the process ends without unwinding them.
    os._exit(0 if outcome.reason is None else 1)


if __name__ == "__main__":
    main()
