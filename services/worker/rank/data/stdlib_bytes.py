"""Bytes of the running interpreter's standard library as training data; no download."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import torch

from services.worker.rank.data import corpus
from services.worker.rank.data.ngrams import Bytes, bigram_loss, unigram_loss
from services.worker.rank.data.roots import inside
from services.worker.rank.seeds import derive

_VALIDATION_SHARE: Final = 20


class StdlibBytes:
    """Windows of the corpus: ``seq_len`` bytes to read and the one after each to predict.

    A training window begins anywhere in the training bytes, drawn by a hash of (seed, step,
    index); validation windows are spread evenly over the validation bytes.

    Args:
        train: ``[n]`` bytes to learn from.
        held_out: ``[m]`` bytes of other files, to validate on.
        manifest: A line a file, with its digest.
        seq_len: Tokens that a window predicts.
        seed: Of the order.
        validation_sequences: How many validation windows there are.
        validation_batch: How many of them make a batch.

    Raises:
        ValueError: A size is below 1, or a window is longer than one of the two texts.
    """

    def __init__(  # noqa: PLR0913 (a value with many parts, built in one place)
        self,
        train: Bytes,
        held_out: Bytes,
        *,
        manifest: str,
        seq_len: int,
        seed: int,
        validation_sequences: int,
        validation_batch: int,
    ) -> None:
        if min(seq_len, validation_sequences, validation_batch) < 1:
            raise ValueError("data.args: every size must be at least 1")
        if min(len(train), len(held_out)) <= seq_len:
            raise ValueError(
                f"data.args.seq_len: {seq_len} is too long for texts of {len(train)} (training) "
                f"and {len(held_out)} bytes (validation)"
            )
        self._train = train
        self._manifest = manifest
        self._seed = seed
        self._seq_len = seq_len
        self._validation_batch = validation_batch
        starts = np.linspace(0, len(held_out) - seq_len - 1, validation_sequences).astype(np.int64)
        self._validation = _windows(held_out, starts, seq_len)

    tokenizer_size = 256

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, and so of all names and contents."""
        return hashlib.sha256(self._manifest.encode()).hexdigest()

    @property
    def manifest(self) -> str:
        """A line a file: its SHA-256 and its name."""
        return self._manifest

    def batch(self, step: int, indices: Sequence[int]) -> torch.Tensor:
        """int64 ``[len(indices), seq_len + 1]``."""
        span = len(self._train) - self._seq_len
        starts = np.array([derive(self._seed, "data", step, i) % span for i in indices])
        return _tensor(_windows(self._train, starts, self._seq_len))

    def validation(self) -> Sequence[torch.Tensor]:
        """int64 batches of at most ``validation_batch`` windows."""
        return torch.split(_tensor(self._validation), self._validation_batch)

    def baselines(self) -> Mapping[str, float]:
        """Nats a byte of the training text's unigram and bigram tables."""
        return self._table_losses

    @cached_property
    def _table_losses(self) -> Mapping[str, float]:
        return {
            "unigram": unigram_loss(self._train, self._validation),
            "bigram": bigram_loss(self._train, self._validation),
        }


def stdlib_bytes(
    seq_len: int = 256,
    validation_sequences: int = 128,
    validation_batch: int = 16,
    library: str | None = None,
    *,
    seed: int = 0,
    data_roots: Sequence[Path] | None = None,
) -> StdlibBytes:
    """Reads the corpus and splits it: every twentieth file, by a hash of its name, validates.

    Args:
        seq_len: Tokens that a sequence predicts.
        validation_sequences: Sequences of a validation pass.
        validation_batch: Sequences that a rank evaluates at a time.
        library: Another folder of Python sources to read.
        seed: Of the order of the sequences.
        data_roots: Folders below which ``library`` and what it links to must lie; None: anywhere.

    Raises:
        PathOutsideRootsError: They lie elsewhere.
    """
    folder = None if library is None else Path(library)
    if folder is not None and data_roots is not None:
        folder = inside(folder, data_roots)
    files = corpus.stdlib_sources(folder, data_roots)
    held_out = [file for file in files if _validates(file.name)] or files[-1:]
    names = {file.name for file in held_out}
    return StdlibBytes(
        _joined([file for file in files if file.name not in names]),
        _joined(held_out),
        manifest=corpus.manifest(files),
        seq_len=seq_len,
        seed=seed,
        validation_sequences=validation_sequences,
        validation_batch=validation_batch,
    )


def _validates(name: str) -> bool:
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return first % _VALIDATION_SHARE == 0


def _joined(files: list[corpus.CorpusFile]) -> Bytes:
    return np.frombuffer(b"".join(file.content for file in files), dtype=np.uint8)


def _windows(text: Bytes, starts: np.ndarray[tuple[int], np.dtype[np.int64]], length: int) -> Bytes:
    windows: Bytes = text[starts[:, None] + np.arange(length + 1)]
    return windows


def _tensor(windows: Bytes) -> torch.Tensor:
    return torch.from_numpy(windows.astype(np.int64))
