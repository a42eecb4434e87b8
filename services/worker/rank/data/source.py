"""What the loop asks of data: this rank's share of each global batch.

``data.feeds`` makes a ``Feed`` of what a data factory made.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import torch

from meshloom.data import Batch, DataSource
from services.worker.rank.data.batches import BatchShapeError, rows
from services.worker.rank.data.share import Share

BEGINNING: Final[Mapping[str, Any]] = {"samples": 0}
"""The state of every feed before its first sample."""


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

    @property
    def description(self) -> str:
        """How much there is, in which order, and what of it is promised, in words."""
        ...

    @property
    def notices(self) -> Sequence[str]:
        """What of the data factory's product has no effect, in sentences."""
        ...

    @property
    def tokenizer_size(self) -> int | None:
        """How many tokens there may be; None: it is not known before they are read."""
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

    def sample(self, count: int = 1) -> Batch:
        """The first samples as a batch, as training will see them; takes nothing from the run.

        Args:
            count: How many; a stream may give fewer.
        """
        ...

    def origin(self, step: int, place: int) -> str:
        """The sample at ``place`` of this rank's share of ``step``, in words."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Where the run is in the data, for JSON; the same on ranks of any number."""
        ...

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Goes to where ``state`` was taken, after ``step`` steps.

        Args:
            state: As a feed of this data gave it, on ranks of any number; empty: the run has always
                had the global batch that it has. ``BEGINNING``: no sample was taken.
            step: Steps that were made.
        """
        ...

    def close(self) -> None:
        """Ends the processes that read ahead; the feed is not asked again."""
        ...


class AddressedFeed:
    """Shares of a source that is asked by step and place, and so has no state.

    Args:
        source: A ``meshloom.DataSource``, or an object with ``digest`` and ``batch``.
        share: This rank's part of each step.
    """

    notices: Sequence[str] = ()

    def __init__(self, source: DataSource, share: Share) -> None:
        self._source = source
        self._indices = share.places

    def of_share(self, share: Share) -> "AddressedFeed":
        """Another rank's share of the same data."""
        return AddressedFeed(self._source, share)

    @property
    def digest(self) -> str:
        """The source's."""
        return self._source.digest

    @property
    def manifest(self) -> str | None:
        """The source's, if it has one."""
        return self._source.manifest if isinstance(self._source, HasManifest) else None

    @property
    def description(self) -> str:
        """That the source decides."""
        return "samples that follow from the step"

    @property
    def tokenizer_size(self) -> int | None:
        """The source's, if it says it."""
        return tokenizer_size_of(self._source)

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

    def sample(self, count: int = 1) -> Batch:
        """The first of the first step."""
        return self._source.batch(1, range(count))

    def origin(self, step: int, place: int) -> str:
        """Its place in the step."""
        return f"sample {self._indices[place]} of step {step}"

    def state(self) -> Mapping[str, Any]:
        """Nothing: the step says it."""
        return {}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Changes nothing."""

    def close(self) -> None:
        """Does nothing."""


def tokenizer_size_of(source: object) -> int | None:
    """How many tokens the tokenizer of a source or data set has; None: it does not say."""
    size = getattr(source, "tokenizer_size", None)
    return size if isinstance(size, int) else None


def sample_length(batch: Batch) -> int:
    """Elements along the second dim of the first tensor of tokens; 1 for other data."""
    if isinstance(batch, Mapping):
        batch = batch.get("input_ids")
        return batch.shape[1] if isinstance(batch, torch.Tensor) else 1
    is_tokens = isinstance(batch, torch.Tensor) and batch.dtype == torch.int64 and batch.ndim > 1
    return max(1, batch.shape[1] - 1) if is_tokens else 1
