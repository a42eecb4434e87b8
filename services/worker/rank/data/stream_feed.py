"""Feeds of data that can only be walked through: iterable data sets, loaders with an order of their own."""

import base64
import copy
import io
import itertools
import multiprocessing
import os
import pickle
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from meshloom.data import Batch, IterableSource
from services.worker.rank.data import digests
from services.worker.rank.data.batches import BatchShapeError, joined, map_tensors, rows
from services.worker.rank.data.loading import Workers, begin_worker, begun, processes
from services.worker.rank.data.samples import collated, own_random_state, seed_all
from services.worker.rank.data.share import Share
from services.worker.rank.data.source import DataError, tokenizer_size_of
from services.worker.rank.seeds import derive

_NAMED_BY: Final = 16
_SAMPLES: Final = "samples"
_EPOCH: Final = "epoch"
_IN_EPOCH: Final = "in_epoch"
_SOURCE: Final = "source"
_AGAIN: Final = "again"
_OF_ARRAYS: Final[list[Any]] = [
    *(
        each.__reduce__()[0] for each in (np.zeros(1), np.float64(0))
    ),  # what makes arrays and scalars
    *(np.ndarray, np.dtype, *(type(np.dtype(code)) for code in np.typecodes["All"] if code != "O")),
]
"""What NumPy's arrays and scalars are read back with."""


class _Stateful(Protocol):
    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass
class _Item:
    """What the source gave at once: a sample, or a batch of ``size``; ``used`` of it were passed.

    ``before`` is the state of the source before it gave this, None where it has none.
    """

    content: Any
    size: int
    epoch: int
    in_epoch: int
    before: "_Mark | None"
    used: int = 0


class Walk:
    """The one way through a stream, the same on all ranks.

    Args:
        source: What is walked through.
        seed: The job's.
    """

    def __init__(self, source: IterableSource, seed: int) -> None:
        loader = source.dataset if isinstance(source.dataset, DataLoader) else None
        self.gives_batches = (loader is not None and loader.batch_sampler is not None) or (
            loader is not None and loader.batch_size is not None
        )
        if loader is not None and loader.num_workers:
            loader.worker_init_fn = partial(begin_worker, os.getpid(), loader.worker_init_fn)
            chosen = multiprocessing.get_start_method(allow_none=True)
            # From Python 3.14 on the default is a server, whose processes are not the rank's.
            if loader.multiprocessing_context is None and chosen != "spawn":
                loader.multiprocessing_context = "fork"
            # Workers of an earlier epoch go on with random states, and copies of the data set, that a resumed run lacks.
            vars(loader)["persistent_workers"] = False
        self._source = source
        self._seed = seed
        self._stateful = _stateful(source)
        self.samples = 0
        with own_random_state():
            self._begin(0)
            self._random = _get_random()

    @property
    def keeps_state(self) -> bool:
        """Whether the source can say where it is."""
        return self._stateful is not None

    def share(self, share: Share) -> list[Any]:
        """Passes the samples of a step; those of this rank, one by one or as parts of batches."""
        with self._walking():
            self._take(share.places.start)
            found = self._take(share.per_rank)
            self._take(share.whole - share.places.stop)
        return found

    def _take(self, count: int) -> list[Any]:
        found: list[Any] = []
        while count:
            item = self._pending[0] if self._pending else self._pull()
            size = min(count, item.size - item.used)
            found.append(self._part(item, size))
            item.used += size
            count -= size
            self.samples += size
            if item.used == item.size:
                self._pending.popleft()
        return found

    def peek(self, count: int) -> list[Any]:
        """What the source gives first, ``count`` samples or some more; nothing is taken."""
        with self._walking():
            while sum(item.size for item in self._pending) < count and self._has_more():
                pass
        return [item.content for item in self._pending]

    def state(self) -> dict[str, Any]:
        """Where the walk is, for JSON."""
        item = self._pending[0] if self._pending else None
        if item is None:
            place = {_EPOCH: self._epoch, _IN_EPOCH: self._in_epoch}
            with self._walking():
                mark, again = self._mark(), 0
        else:
            place = {_EPOCH: item.epoch, _IN_EPOCH: item.in_epoch + item.used}
            mark, again = item.before, item.used
        state = {_SAMPLES: self.samples, **place}
        source = None if mark is None else mark.text(type(self._source.dataset).__name__)
        return state if source is None else {**state, _SOURCE: source, _AGAIN: again}

    def go_to(self, state: Mapping[str, Any]) -> None:
        """To where ``state`` was taken."""
        with self._walking():
            self._go_to(state)

    def _go_to(self, state: Mapping[str, Any]) -> None:
        samples = int(state[_SAMPLES])
        source = state.get(_SOURCE)
        if source is not None and self._stateful is not None:
            again = int(state[_AGAIN])
            self._begin(int(state[_EPOCH]), source)
            self._in_epoch = int(state[_IN_EPOCH]) - again
            self._take(again)
        elif _EPOCH in state:
            self._begin(int(state[_EPOCH]))
            self._take(int(state[_IN_EPOCH]))
        elif samples >= self.samples:
            self._take(samples - self.samples)
        else:
            self._begin(0)
            self.samples = 0
            self._take(samples)
        self.samples = samples

    def close(self) -> None:
        """Ends worker processes."""
        self._pending.clear()
        self._given = iter(())

    def _begin(self, epoch: int, state: str | None = None) -> None:
        self._pending: deque[_Item] = deque()
        self._epoch, self._in_epoch = epoch, 0
        dataset = getattr(self._source.dataset, "dataset", self._source.dataset)
        for each in (dataset, self._source.dataset):
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(epoch)
                break
        seed_all(derive(self._seed, "stream", epoch))
        if state is not None and self._stateful is not None:
            found = _loaded(base64.b64decode(state))
            self._stateful.load_state_dict(found["source"])
            self._given = self._iterate()
            _set_random(found["random"])
        else:
            self._given = self._iterate()

    def _iterate(self) -> Iterator[Any]:
        source = self._source
        if isinstance(source.dataset, DataLoader):
            return begun(source.dataset)
        if not source.workers:
            return iter(source.dataset)
        loader: DataLoader[Any] = DataLoader(
            source.dataset,  # type: ignore[arg-type]  # it is iterable, which is all that counts
            batch_size=None,
            collate_fn=_same,
            worker_init_fn=partial(begin_worker, os.getpid(), source.worker_init_fn),
            **processes(Workers(source.workers, source.prefetch)),
        )
        return begun(loader)

    @contextmanager
    def _walking(self) -> Iterator[None]:
        """The stream draws from generators that go on where it left them; the run's are kept."""
        with own_random_state():
            _set_random(self._random)
            yield
            self._random = _get_random()

    def _pull(self) -> _Item:
        if not self._has_more():
            self._begin(self._epoch + 1)
            if not self._has_more():
                raise DataError(
                    f"data.factory: the {type(self._source.dataset).__name__} gives no sample in "
                    f"epoch {self._epoch}; it must be iterable more than once"
                )
        return self._pending[-1]

    def _has_more(self) -> bool:
        """Takes one more item from the source, unless the epoch ends."""
        # A sample is never left in part; only those that were looked at ahead may wait.
        marks = self.gives_batches or (self.samples == 0 and self._epoch == 0)
        before = self._mark() if marks else None
        try:
            content: Any = next(self._given)
        except StopIteration:
            return False
        size = rows(content) if self.gives_batches else 1
        self._pending.append(_Item(content, size, self._epoch, self._in_epoch, before))
        self._in_epoch += size
        return True

    def _part(self, item: _Item, size: int) -> object:
        if not self.gives_batches or size == item.size:
            return item.content
        start, stop = item.used, item.used + size
        return map_tensors(lambda tensor: tensor[start:stop], item.content)

    def _mark(self) -> "_Mark | None":
        """What the source says of where it is; None: nothing."""
        if self._stateful is None:
            return None
        return _Mark(copy.deepcopy(self._stateful.state_dict()), _get_random())


@dataclass(frozen=True)
class _Mark:
    """Where a source is: what it says, and the random state beside it."""

    source: Any
    random: list[Any]

    def text(self, source: str) -> str | None:
        """As text; None: the source, a class of the name ``source``, says nothing.

        Raises:
            DataError: It says what cannot be read without running code.
        """
        if not self.source:
            return None
        kept = io.BytesIO()
        try:
            torch.save({"source": self.source, "random": _plain(self.random)}, kept)
            _loaded(kept.getvalue())
        except (pickle.PickleError, RuntimeError, TypeError, AttributeError, ValueError) as error:
            raise DataError(
                f"data.factory: the state_dict of the {source} has what a checkpoint cannot hold: give dicts, lists "
                "and tuples of numbers, text, bytes, tensors and NumPy's arrays, or no state_dict, and "
                "a resumed run reads the stream again"
            ) from error
        return base64.b64encode(kept.getvalue()).decode()


def _loaded(content: bytes) -> Any:  # noqa: ANN401 (what was saved)
    with torch.serialization.safe_globals(_OF_ARRAYS):
        return torch.load(io.BytesIO(content), weights_only=True)


class StreamFeed:
    """A rank's share of a stream.

    Args:
        source: What is walked through.
        share: This rank's part of each step.
        seed: The job's.
        validation: What is never trained on.

    Raises:
        DataError: There is no sample.
    """

    manifest: str | None = None
    notices: Sequence[str] = ()

    def __init__(
        self, source: IterableSource, share: Share, seed: int, validation: Sequence[Batch] = ()
    ) -> None:
        self._source = source
        self._share = share
        self._validation = validation
        self._walk = Walk(source, seed)
        self._step = 0
        first = self._walk.peek(_NAMED_BY)
        if not first:
            raise DataError(
                f"data.factory: the {type(source.dataset).__name__} is empty; it gave no sample"
            )
        self._walk.state()  # what cannot be saved is refused at once
        self._first = first
        self._sample = self._joined(first[:1], 1)
        self._digest = _digest(source, first)

    @property
    def digest(self) -> str:
        """Of the first samples, unless another was chosen."""
        return self._digest

    @property
    def description(self) -> str:
        """That it is a stream, and how a resumed run finds its place in it."""
        finds = "restores its position" if self._walk.keeps_state else "reads it again"
        return (
            "a stream that every rank reads and filters; a run that resumes from a checkpoint "
            f"{finds}, and gets the same samples if the stream repeats them"
        )

    @property
    def tokenizer_size(self) -> int | None:
        """The data set's, if it says it."""
        return tokenizer_size_of(self._source.dataset)

    def share(self, step: int) -> Batch:
        """The samples at this rank's places of the stream.

        Raises:
            DataError: The stream is empty when it is started over.
            BatchShapeError: Samples do not collate.
        """
        if step != self._step + 1:
            missing = (step - 1 - self._step) * self._share.whole
            self._walk.go_to({_SAMPLES: max(0, self._walk.samples + missing)})
        parts = self._walk.share(self._share)
        self._step = step
        return self._joined(parts, self._share.per_rank)

    def validation(self) -> Sequence[Batch]:
        """What was given to validate on."""
        return self._validation

    def baselines(self) -> Mapping[str, float]:
        """None."""
        return {}

    def sample(self, count: int = 1) -> Batch:
        """The first of the stream, as far as it was looked into."""
        return self._sample if count == 1 else self._joined(self._first[:count], count)

    def origin(self, step: int, place: int) -> str:
        """Its place in the step; nothing more is known of a stream."""
        return f"sample {self._share.places[place]} of step {step}"

    def state(self) -> Mapping[str, Any]:
        """Samples taken, the place in the epoch, and what the source says of it."""
        return self._walk.state()

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Goes to ``state``, or walks to where ``step`` steps of this global batch lead."""
        self._walk.go_to(state or {_SAMPLES: step * self._share.whole})
        self._step = step

    def close(self) -> None:
        """Ends worker processes."""
        self._walk.close()

    def _joined(self, parts: list[Any], count: int) -> Batch:
        if not self._walk.gives_batches:
            return collated(parts, self._source.collate_fn)
        try:
            whole = joined(parts)
        except (RuntimeError, ValueError) as error:
            raise BatchShapeError(
                "data.factory: samples of two batches of the loader do not make one: "
                f"{str(error).splitlines()[0]}; have it give all batches one shape, or return its data "
                "set in a meshloom.IterableSource"
            ) from error
        return map_tensors(lambda tensor: tensor[:count], whole)


def _stateful(source: IterableSource) -> _Stateful | None:
    """Who of the source can say where it is. With worker processes only a loader can."""
    made = source.dataset
    inner = getattr(made, "dataset", None)
    if source.workers or not _has_state(made):
        return None
    # Such a loader counts batches that it skips twice; walking through its data again is right.
    if isinstance(inner, IterableDataset) and not _has_state(inner):
        return None
    if any(_draws_from_a_buffer(getattr(each, "_ex_iterable", None)) for each in (made, inner)):
        return None
    return cast("_Stateful", made)


def _draws_from_a_buffer(stage: object) -> bool:
    """Whether a stream of Hugging Face's is shuffled: its state leaves out the samples that wait in the buffer."""
    if stage is None:
        return False
    before = [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())]
    return hasattr(stage, "buffer_size") or any(map(_draws_from_a_buffer, before))


def _has_state(made: object) -> bool:
    return all(callable(getattr(made, name, None)) for name in ("state_dict", "load_state_dict"))


def _digest(source: IterableSource, first: Sequence[Any]) -> str:
    if source.digest == "files":
        return digests.of_files(source.files)
    if source.digest != "content":
        return source.digest
    return digests.of_values("stream", list(itertools.islice(first, _NAMED_BY)))


def _get_random() -> list[Any]:
    return [random.getstate(), np.random.get_state(), torch.get_rng_state()]


def _plain(states: list[Any]) -> list[Any]:
    """Random states of kinds that can be read back without running code."""
    python, (name, words, *rest), torch_state = states
    return [list(python), [name, words.tolist(), *rest], torch_state]


def _set_random(states: list[Any]) -> None:
    (version, words, gauss), numpy_state, torch_state = states
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(numpy_state))
    torch.set_rng_state(torch_state)


def _same(sample: object) -> object:
    return sample
