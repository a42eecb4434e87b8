"""Data by step and place, for sources that are no ``torch.utils.data`` dataset.

A batch is a tensor, or a tuple, list, mapping, named tuple or dataclass of batches. Every tensor in it
has the samples along its first dim; what is no tensor is left as it is.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Batch = Any
Unit = Literal["tokens", "samples"]


class DataSource(abc.ABC):
    """Samples, addressed by step and place.

    A source has no state: what a step sees is a function of the step alone. So a resumed run sees
    exactly what the uninterrupted one would have seen, and a job of any number of ranks the same
    global batch.

    A data factory is a callable that takes the arguments of ``data.args`` and, if it has a parameter
    of that name which ``data.args`` leaves out, ``seed`` (the job's). It may return a source, or
    anything else that docs/your-own-training.md lists.
    """

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """Names the data: equal if and only if every sample is. Written into checkpoints."""

    @abc.abstractmethod
    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        """The samples at ``indices`` (from 0) of the global batch of ``step`` (from 1), on the CPU."""

    def validation(self) -> Sequence[Batch]:
        """Batches that are never trained on, the same at each call; none by default."""
        return ()

    def baselines(self) -> Mapping[str, float]:
        """Losses of simple models on the validation data, by name; none by default."""
        return {}
