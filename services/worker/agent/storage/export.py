"""Puts the model of a committed checkpoint together: whole tensors, in the safetensors format.

``python -m services.worker.agent.storage.export --root R --job J --checkpoint C`` is a process of its own,
so that what it copies does not hold up the agent. It needs neither torch nor the job's code.

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
import os
import re
import resource
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from services.contract.storage.commit_chain import ChainError, CommitChain
from services.contract.storage.exports import EXPORT_MANIFEST, ExportedFile, ExportManifest
from services.contract.system.durable import make_folders, sync_folder
from services.contract.system.own_process import set_up_process
from services.worker.agent.host.removal import remove_what_can_be
from services.worker.agent.storage.whole_tensors import (
    Content,
    DifferentError,
    IncompleteError,
    Whole,
    run_length,
    runs,
    tensors_of,
)

FILE_BYTES: Final = 5_000_000_000
# A rank named it: nothing that leads elsewhere, or takes the place of what is written here.
_PLAIN_NAME: Final = re.compile(
    r"(?!model|ema[.-]|export\.json$)[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*", re.ASCII
)
_GROUP_READS: Final = 0o050
_MOST_MEMORY: Final = 4 << 30
_LONGEST_REASON: Final = 2_000
_ALIGNMENT: Final = 8
_PIECE_BYTES: Final = 1 << 24


class ExportOutcome(BaseModel):
    """What came of it: the files and their bytes, or why there are none.

    ``corrupt_file``: below the job's folder, what is not what was committed.
    """

    files: tuple[str, ...] = ()
    bytes: int = 0
    reason: str | None = None
    corrupt_file: str | None = None


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
            kinds, beside = tensors_of(chain.shard_folder(checkpoint_id), manifest, stack)
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
