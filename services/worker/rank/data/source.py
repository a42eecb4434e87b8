"""What the trainer asks of a data source.

A data factory is a callable that takes the arguments of ``data.args`` and, if it has parameters
of these names that ``data.args`` leaves out, ``seed`` (the job's), and returns a ``DataSource``.

A source has no state: what a step sees is a function of the step alone. So a resumed run sees
exactly what the uninterrupted one would have seen, and a job of any number of ranks the same
global batch.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch


class DataMismatchError(RuntimeError):
    """The ranks, or an attempt and its checkpoint, do not see the same data."""


class DataSource(Protocol):
    """Sequences of tokens, addressed by step and place.

    All tensors are int64 ``[sequences, length + 1]`` on the CPU, of one length: the model is given
    all tokens but the last of each sequence and is to predict all but the first.
    """

    @property
    def digest(self) -> str:
        """Names the data: equal if and only if every sequence is. Written into checkpoints."""
        ...

    def batch(self, step: int, indices: Sequence[int]) -> torch.Tensor:
        """The sequences at ``indices`` (from 0) of the global batch of ``step`` (from 1)."""
        ...

    def validation(self) -> Sequence[torch.Tensor]:
        """Batches that are never trained on, the same at each call; may be empty."""
        ...

    def baselines(self) -> Mapping[str, float]:
        """Losses of simple models on the validation tokens, in nats a token, by name."""
        ...


@runtime_checkable
class HasManifest(Protocol):
    """A source that can say what its digest covers; the run keeps it beside its logs."""

    @property
    def manifest(self) -> str:
        """Lines of text of which the source's ``digest`` is the SHA-256."""
        ...
