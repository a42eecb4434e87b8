"""What the loop asks of data: this rank's share of each global batch.

What a data factory makes becomes a ``Feed`` here; docs/your-own-training.md lists what it may make.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch

from meshloom.data import Batch, DataSource
from services.worker.rank.data.batches import BatchShapeError, rows


class DataMismatchError(RuntimeError):
    """The ranks, or an attempt and its checkpoint, do not see the same data."""


class DataError(TypeError):
    """A data factory made something that gives no batches."""


@runtime_checkable
class HasManifest(Protocol):
    """A source that can say what its digest covers; the run keeps it beside its logs."""

    @property
    def manifest(self) -> str:
        """Lines of text of which the source's ``digest`` is the SHA-256."""
        ...


class Feed(Protocol):
    """One rank's way through the data of a job."""

    @property
    def digest(self) -> str:
        """Names the data; the same on all ranks."""
        ...

    @property
    def manifest(self) -> str | None:
        """What the digest covers, where the source can say it."""
        ...

    def share(self, step: int) -> Batch:
        """This rank's samples of the global batch of ``step`` (from 1), on the CPU."""
        ...

    def validation(self) -> Sequence[Batch]:
        """Batches that are never trained on, the same at each call and on all ranks."""
        ...

    def baselines(self) -> Mapping[str, float]:
        """Losses of simple models on the validation data, by name."""
        ...

    def sample(self) -> Batch:
        """One sample as a batch, as training will see it; takes nothing from the run."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Where the run is in the data, for JSON; the same on ranks of any number."""
        ...

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Goes to where ``state`` was taken, after ``step`` steps."""
        ...


class AddressedFeed:
    """Shares of a source that is asked by step and place, and so has no state.

    Args:
        source: A ``meshloom.DataSource``, or an object with ``digest`` and ``batch``.
        per_rank: Samples of a step on each data-parallel rank.
        data_rank: This one among them.
    """

    def __init__(self, source: DataSource, per_rank: int, data_rank: int) -> None:
        self._source = source
        self._indices = range(data_rank * per_rank, (data_rank + 1) * per_rank)

    @property
    def digest(self) -> str:
        """The source's."""
        return self._source.digest

    @property
    def manifest(self) -> str | None:
        """The source's, if it has one."""
        return self._source.manifest if isinstance(self._source, HasManifest) else None

    def share(self, step: int) -> Batch:
        """The samples at this rank's places.

        Raises:
            BatchShapeError: The source gave another number of samples.
        """
        batch = self._source.batch(step, self._indices)
        if (given := rows(batch)) != len(self._indices):
            raise BatchShapeError(
                f"data: asked for {len(self._indices)} samples of step {step}, the source gave {given}"
            )
        return batch

    def validation(self) -> Sequence[Batch]:
        """The source's, if it has any."""
        return getattr(self._source, "validation", tuple)()

    def baselines(self) -> Mapping[str, float]:
        """The source's, if it has any."""
        return getattr(self._source, "baselines", dict)()

    def sample(self) -> Batch:
        """The first of the first step."""
        return self._source.batch(1, [0])

    def state(self) -> Mapping[str, Any]:
        """Nothing: the step says it."""
        return {}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Changes nothing."""


def feed_of(made: object, per_rank: int, data_rank: int) -> Feed:
    """The shares of whatever a data factory made.

    Args:
        made: See docs/your-own-training.md.
        per_rank: Samples of a step on each data-parallel rank.
        data_rank: This one among them.

    Raises:
        DataError: It gives no batches.
    """
    if hasattr(made, "digest") and callable(getattr(made, "batch", None)):
        return AddressedFeed(cast("DataSource", made), per_rank, data_rank)
    raise DataError(
        f"data.factory made a {type(made).__name__}, which gives no batches: return a "
        "meshloom.DataSource"
    )


def sample_length(batch: Batch) -> int:
    """Elements along the second dim of the first tensor of tokens; 1 for other data."""
    if isinstance(batch, Mapping):
        batch = batch.get("input_ids")
        return batch.shape[1] if isinstance(batch, torch.Tensor) else 1
    is_tokens = isinstance(batch, torch.Tensor) and batch.dtype == torch.int64 and batch.ndim > 1
    return max(1, batch.shape[1] - 1) if is_tokens else 1
