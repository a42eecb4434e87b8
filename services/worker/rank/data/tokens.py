"""Token shards as training data, read where they lie by memory map."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from meshloom.data import MapSource
from services.contract.storage.token_shards import (
    TOKEN_BYTES,
    TokenIndex,
    check_content,
    read_index,
)
from services.worker.rank.data.roots import inside

_VERIFIED_BYTES: Final = 256 << 20


class TokenWindows(Dataset[torch.Tensor]):
    """Rows of ``seq_len`` tokens and the one after each, over the borders of files and documents.

    Args:
        folder: Of the shards.
        index: What they are.
        seq_len: Tokens that a row predicts; the last tokens that fill no row are left out.

    Raises:
        ValueError: There are not enough for one row.
    """

    def __init__(self, folder: Path, index: TokenIndex, seq_len: int) -> None:
        if seq_len < 1 or index.tokens <= seq_len:
            raise ValueError(
                f"data.args.seq_len: {seq_len} is not within 1 and the {index.tokens:,} tokens of "
                f"{folder}, less one"
            )
        self.digest = index.digest
        self.tokenizer_size = index.vocabulary
        self._seq_len = seq_len
        self._count = (index.tokens - 1) // seq_len
        shards = [shard for shard in index.shards if shard.tokens]
        self._ends = np.cumsum([shard.tokens for shard in shards])
        self._maps: list[npt.NDArray[Any]] = [
            np.memmap(folder / shard.file, dtype=np.dtype(index.dtype).newbyteorder("<"), mode="r")
            for shard in shards
        ]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> torch.Tensor:
        start = row * self._seq_len
        stop = start + self._seq_len + 1
        found = np.empty(stop - start, dtype=np.int64)
        place = start
        while place < stop:
            shard = int(np.searchsorted(self._ends, place, side="right"))
            before = int(self._ends[shard - 1]) if shard else 0
            end = min(stop, int(self._ends[shard]))
            found[place - start : end - start] = self._maps[shard][place - before : end - before]
            place = end
        return torch.from_numpy(found)


def tokens(  # noqa: PLR0913 (the fields of data.args)
    path: str,
    seq_len: int = 1024,
    validation: str | None = None,
    validation_fraction: float = 0.0,
    validation_batch: int = 16,
    workers: int = 0,
    *,
    verify: bool | None = None,
    data_roots: Sequence[Path] | None = None,
) -> MapSource:
    """Trains on what ``meshloom data tokenize`` wrote.

    A batch is int64 ``[samples, seq_len + 1]``; the data is named by the digests in the index.

    Args:
        path: The folder of the shards.
        seq_len: Tokens that a sequence predicts.
        validation: Another such folder, to validate on.
        validation_fraction: Without one, which part of the rows is only validated on.
        validation_batch: Sequences that a rank evaluates at a time.
        workers: Processes of each rank that read ahead.
        verify: Whether each rank reads all files at its start, to hold them against the digests in the
            index; None: up to 256 MiB of them.
        data_roots: Folders below which these must lie; None: anywhere.

    Raises:
        TokenShardError: A folder is no whole set of shards, or a file was changed.
        PathOutsideRootsError: It lies elsewhere.
        ValueError: There are not enough tokens for one row.
    """
    return MapSource(
        dataset=_windows(path, seq_len, data_roots, verify=verify),
        validation=None
        if validation is None
        else _windows(validation, seq_len, data_roots, verify=verify),
        validation_fraction=validation_fraction,
        validation_batch=validation_batch,
        workers=workers,
    )


def _windows(
    path: str, seq_len: int, data_roots: Sequence[Path] | None, *, verify: bool | None
) -> TokenWindows:
    folder = Path(path) if data_roots is None else inside(path, data_roots)
    index = read_index(folder)
    if data_roots is not None:
        for shard in index.shards:
            inside(folder / shard.file, data_roots)
    nbytes = index.tokens * TOKEN_BYTES[index.dtype]
    if nbytes <= _VERIFIED_BYTES if verify is None else verify:
        check_content(folder, index)
    return TokenWindows(folder, index, seq_len)
