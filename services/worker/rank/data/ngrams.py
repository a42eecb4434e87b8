"""Losses of count tables: what a model must beat to have learnt anything."""

from typing import Final

import numpy as np
import numpy.typing as npt

_VOCAB: Final = 256

Bytes = npt.NDArray[np.uint8]


def unigram_loss(train: Bytes, sequences: Bytes) -> float:
    """Nats a token of predicting every byte by its frequency in ``train``.

    Args:
        train: ``[n]`` bytes that are counted (each count starts at 1).
        sequences: ``[s, length + 1]``; the first byte of each is not predicted.
    """
    counts = np.bincount(train, minlength=_VOCAB) + 1.0
    return float(-np.log(counts / counts.sum())[sequences[:, 1:]].mean())


def bigram_loss(train: Bytes, sequences: Bytes) -> float:
    """As ``unigram_loss``, predicting every byte from the one before it."""
    pairs = train[:-1].astype(np.int64) * _VOCAB + train[1:]
    counts = np.bincount(pairs, minlength=_VOCAB**2).reshape(_VOCAB, _VOCAB) + 1.0
    nats = -np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(nats[sequences[:, :-1], sequences[:, 1:]].mean())
