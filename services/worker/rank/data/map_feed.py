"""Feeds of map-style sources: one, or a mixture; the rank reads itself, or has workers read ahead."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

from meshloom.data import Batch
from services.worker.rank.data.loading import Workers, read_ahead
from services.worker.rank.data.order import Position, Ref, SampleOrder
from services.worker.rank.data.samples import SampleReader
from services.worker.rank.data.share import Share

_SAMPLES: Final = "samples"
_TAKEN: Final = "taken"


class ValidationBatches(Sequence[Batch]):
    """Batches that are read when they are asked for; the same at each time.

    Args:
        reader: Of the data sets that are validated on.
        batch: Samples of each.
    """

    def __init__(self, reader: SampleReader, batch: int) -> None:
        self._reader = reader
        self._batches = [
            (source, range(start, min(start + batch, len(dataset))))
            for source, dataset in enumerate(reader.datasets)
            for start in range(0, len(dataset), batch)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, place: Any) -> Any:  # noqa: ANN401 (a slice has batches, a number one)
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        source, places = self._batches[place]
        return self._reader.batch([Ref(index, source, 0, index) for index in places])


@dataclass(frozen=True)
class MapData:
    """What a feed of map-style sources gives.

    Attributes:
        reader: Of the sources to train on.
        order: Of their samples.
        digest: Names them.
        validation: What is never trained on.
        workers: Who reads ahead; None: the rank reads itself.
        notices: What of the sources has no effect.
        tokenizer_size: How many tokens there may be, in any of the sources.
    """

    reader: SampleReader
    order: SampleOrder
    digest: str
    validation: Sequence[Batch] = ()
    workers: Workers | None = None
    notices: Sequence[str] = ()
    tokenizer_size: int | None = None


class MapFeed:
    """A rank's share of map-style data.

    Args:
        data: The same on all ranks.
        share: This rank's part of each step.
    """

    manifest: str | None = None

    def __init__(self, data: MapData, share: Share) -> None:
        self._data = data
        self._share = share
        self._step, self._position = 0, data.order.start
        self._ahead: Iterator[Batch] | None = None

    def of_share(self, share: Share) -> "MapFeed":
        """Another rank's share of the same data, which is read without workers."""
        return MapFeed(replace(self._data, workers=None), share)

    @property
    def digest(self) -> str:
        """Of all sources, and what chooses among their samples."""
        return self._data.digest

    @property
    def description(self) -> str:
        """How many samples, in which order."""
        counts = " + ".join(f"{len(dataset):,}" for dataset in self._data.reader.datasets)
        return f"{counts} samples an epoch, in an order that follows from seed and epoch"

    @property
    def notices(self) -> Sequence[str]:
        """What of the sources has no effect."""
        return self._data.notices

    @property
    def tokenizer_size(self) -> int | None:
        """The largest of the sources."""
        return self._data.tokenizer_size

    def share(self, step: int) -> Batch:
        """The samples of this rank's places.

        Raises:
            BatchShapeError: They do not collate.
            Exception: Whatever a data set or a worker raises.
        """
        if step != self._step + 1:
            self._end_workers()
            self._position, self._step = self._before(step), step - 1
        refs = self._refs(self._position)
        if self._data.workers is None:
            batch = self._data.reader.batch(refs)
        else:
            if self._ahead is None:
                steps = self._steps_from(self._position)
                self._ahead = read_ahead(self._data.reader, steps, self._data.workers)
            batch = next(self._ahead)
        self._step, self._position = step, self._after(self._position)
        return batch

    def validation(self) -> Sequence[Batch]:
        """What was given to validate on, or held out."""
        return self._data.validation

    def baselines(self) -> Mapping[str, float]:
        """None."""
        return {}

    def sample(self, count: int = 1) -> Batch:
        """The first of the job."""
        return self._data.reader.batch(self._data.order.refs(self._data.order.start, range(count)))

    def origin(self, step: int, place: int) -> str:
        """The sample at ``place`` of this rank's share of ``step``, in words."""
        return self._data.reader.named(self._refs(self._before(step))[place])

    def state(self) -> Mapping[str, Any]:
        """Samples taken, and how many of them from each source."""
        return {_SAMPLES: self._position.samples, _TAKEN: list(self._position.taken)}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Goes to ``state``; without one to where ``step`` steps of this global batch lead."""
        self._end_workers()
        order = self._data.order
        samples = state.get(_SAMPLES, step * self._share.whole)
        taken = tuple(state.get(_TAKEN, ()))
        is_whole = len(taken) == len(order.start.taken) and sum(taken) == samples
        self._position = Position(samples, taken) if is_whole else order.after(order.start, samples)
        self._step = step

    def close(self) -> None:
        """Ends the workers."""
        self._end_workers()

    def _before(self, step: int) -> Position:
        """Where ``step`` begins, seen from where the feed is."""
        order, missing = self._data.order, (step - 1 - self._step) * self._share.whole
        if missing >= 0:
            return order.after(self._position, missing)
        return order.after(order.start, max(0, self._position.samples + missing))

    def _after(self, position: Position) -> Position:
        return self._data.order.after(position, self._share.whole)

    def _refs(self, position: Position) -> list[Ref]:
        return self._data.order.refs(position, self._share.places)

    def _steps_from(self, position: Position) -> Iterator[list[Ref]]:
        while True:
            yield self._refs(position)
            position = self._after(position)

    def _end_workers(self) -> None:
        if self._ahead is not None:
            with closing(self._ahead):  # type: ignore[type-var]  # it is a generator
                self._ahead = None
