"""Names of data: digests of samples, arrays, tables and files."""

import dataclasses
import hashlib
import importlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from services.worker.rank.data.order import Ref

MOST_SAMPLES: Final = 1024
_ROWS: Final = 4096
_KEY_BYTES: Final = 8


class _Hash:
    """SHA-256 of nested values, each with its kind and length, so that no two are written alike."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def add(self, value: object) -> None:
        """Takes one more value in."""
        if isinstance(value, torch.Tensor):
            whole = value.detach().cpu().contiguous().reshape(-1)
            self._add("tensor", value.dtype, tuple(value.shape))
            self._sha.update(whole.view(torch.uint8).numpy().data)
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._add("array", value.dtype.str, value.shape)
            self._sha.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        elif isinstance(value, bytes | bytearray | memoryview):
            self._add("bytes", len(value))
            self._sha.update(value)
        elif isinstance(value, Mapping):
            self._many("mapping", [part for pair in value.items() for part in pair])
        elif isinstance(value, list | tuple | np.ndarray):
            self._many("sequence", list(value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [each.name for each in dataclasses.fields(value)]
            self._many("dataclass", [getattr(value, name) for name in names])
        elif value is None or isinstance(value, str | int | float | complex | np.generic):
            self._add(type(value).__name__, repr(value))
        elif hasattr(value, "__array__"):  # a picture, for one
            self.add(np.asarray(cast("Any", value)))
        else:
            self.add(pickle.dumps(value, protocol=4))

    def hexdigest(self) -> str:
        return self._sha.hexdigest()

    def _many(self, kind: str, parts: Sequence[object]) -> None:
        self._add(kind, len(parts))
        for part in parts:
            self.add(part)

    def _add(self, *words: object) -> None:
        line = repr(tuple(map(str, words))).encode()
        self._sha.update(len(line).to_bytes(_KEY_BYTES, "little") + line)


def of_values(*values: object) -> str:
    """Of values of any nesting."""
    found = _Hash()
    for value in values:
        found.add(value)
    return found.hexdigest()


def of_content(dataset: Any, read: Callable[[Ref], object]) -> str:  # noqa: ANN401 (as a user wrote it)
    """Of a map-style data set.

    Args:
        dataset: Names itself by ``digest``; else every sample counts where its arrays are known,
            and at most 1024 of them, spread evenly, where they are not.
        read: Reads one sample.
    """
    if isinstance(own := getattr(dataset, "digest", None), str):
        return own
    if isinstance(dataset, TensorDataset):
        return of_values("tensors", dataset.tensors)
    if isinstance(dataset, Subset):
        return of_values("subset", of_content(dataset.dataset, read), list(dataset.indices))
    if isinstance(dataset, ConcatDataset):
        return of_values("joined", [of_content(part, read) for part in dataset.datasets])
    if is_table(dataset):
        return _of_table(dataset)
    count = len(dataset)
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_SAMPLES)).astype(np.int64))
    samples = (read(Ref(index, 0, 0, index)) for index in chosen.tolist())
    return of_values("samples", count, *samples)


def of_files(files: Sequence[str | Path]) -> str:
    """By path, size and time of change; of folders, of all files in them.

    Raises:
        FileNotFoundError: One is not there.
    """
    found: list[Path] = []
    for path in map(Path, files):
        inside = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else []
        found += inside or [path]
    stats = [(path, path.stat()) for path in found]
    return of_values([(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats])


def is_table(dataset: object) -> bool:
    """Whether it is a ``datasets.Dataset``, which is not imported to see that."""
    kinds = type(dataset).__mro__
    return any(
        (kind.__module__, kind.__name__) == ("datasets.arrow_dataset", "Dataset") for kind in kinds
    )


def _of_table(dataset: Any) -> str:  # noqa: ANN401 (of a library that need not be there)
    arrow = importlib.import_module("pyarrow")
    plain = dataset.with_format("arrow")
    columns = [(name, str(kind)) for name, kind in dataset.features.items()]
    found = hashlib.sha256(of_values("table", columns, len(plain)).encode())
    # By blocks of a fixed number of rows: a table may hold the same rows in chunks of any size.
    for start in range(0, len(plain), _ROWS):
        block = plain[start : start + _ROWS].combine_chunks().replace_schema_metadata(None)
        sink = arrow.BufferOutputStream()
        with arrow.ipc.new_stream(sink, block.schema) as stream:
            stream.write_table(block)
        found.update(memoryview(sink.getvalue()))
    return found.hexdigest()
