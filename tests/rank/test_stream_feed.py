"""Shares of data that can only be walked through: all ranks see one stream, and go on in it."""

import json
import multiprocessing
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has none

from meshloom import IterableSource
from services.worker.rank.data.batches import BatchShapeError
from services.worker.rank.data.feeds import feed_of
from services.worker.rank.data.share import Share
from services.worker.rank.data.source import BEGINNING, DataError, Feed
from tests.rank.test_map_feed import WALKS, Numbers, Walk, total

# torchdata calls what the newest torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


FEW = settings(max_examples=10, phases=(Phase.explicit, Phase.generate))


class Stream(IterableDataset[torch.Tensor]):
    """Counts ``count`` numbers, each with one that is drawn; the epoch is in them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self._count):
            yield torch.tensor([number, self._epoch, random.randrange(1 << 20)])  # noqa: S311 (no secret)


class Remembering:
    """A stream that can say where it is, and counts what it is made to give."""

    def __init__(self, count: int) -> None:
        self.given = 0
        self._count = count
        self._next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self._next, self._count):
            self.given += 1
            self._next = (number + 1) % self._count
            yield torch.tensor([number])

    def state_dict(self) -> Mapping[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._next = state["next"]


class Drawing:
    """A stream with a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, generator: object = None) -> None:
        self._given = 0
        self._generator = np.random.MT19937(5)
        self._odd = generator

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self._given < 5:
            self._given += 1
            yield torch.tensor([int(self._generator.random_raw())])
        self._given = 0

    def state_dict(self) -> Mapping[str, Any]:
        return {
            "given": np.int64(self._given),
            "generator": self._generator.state,
            "odd": self._odd,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._given, self._generator.state = int(state["given"]), state["generator"]


def made(kind: str, count: int) -> Any:  # noqa: ANN401 (what factories make)
    torch.manual_seed(5)  # as ranks do: samplers draw their seed when they are made
    match kind:
        case "stream":
            return Stream(count)
        case "source":
            return IterableSource(dataset=Stream(count))
        case "batches":
            return DataLoader(Stream(count), batch_size=3)
        case "stateful":
            return StatefulDataLoader(Numbers(count), batch_size=4, shuffle=True)
        case "stateful stream":
            return StatefulDataLoader(Stream(count), batch_size=2)
    return Remembering(count)


KINDS = ("stream", "source", "batches", "stateful", "stateful stream", "remembering")


def walked(kind: str, count: int, walk: Walk) -> list[list[int]]:
    """What attempts of these sizes see, each resumed from the one before, in the global order."""
    state: Mapping[str, Any] = BEGINNING
    step, found = 0, list[list[int]]()
    for ranks, per_rank, steps in walk:
        shares = [Share(per_rank, rank, ranks) for rank in range(ranks)]
        feeds = [feed_of(made(kind, count), share, 3) for share in shares]
        for feed in feeds:
            feed.restore(state, step)
        for _ in range(steps):
            step += 1
            for feed in feeds:
                torch.manual_seed(step + 17 * len(found))  # what else ranks draw is their own
                found += feed.share(step).tolist()
        state, *others = [json.loads(json.dumps(feed.state())) for feed in feeds]
        for other in others:
            assert {**other, "source": None} == {**state, "source": None}
        assert state["samples"] == len(found)
    return found


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(count=st.integers(1, 20), walk=WALKS)
def test_every_epoch_has_every_sample_once_over_restarts_of_any_size(
    kind: str, count: int, walk: Walk
) -> None:
    found = walked(kind, count, walk)
    assert len(found) == total(walk)
    rows = [sample[0] for sample in found]
    for start in range(0, len(rows), count):
        epoch = rows[start : start + count]
        assert len(set(epoch)) == len(epoch)


@pytest.mark.parametrize("kind", ["stream", "batches", "stateful stream"])
@FEW
@given(count=st.integers(1, 20), walk=WALKS)
def test_the_size_of_attempts_does_not_show_in_the_samples(
    kind: str, count: int, walk: Walk
) -> None:
    assert walked(kind, count, walk) == walked(kind, count, [(1, 1, total(walk))])


def test_epochs_of_a_shuffling_loader_differ() -> None:
    rows = [sample[0] for sample in walked("stateful", 20, [(1, 20, 2)])]
    assert rows[:20] != rows[20:]


def test_a_source_that_keeps_its_place_is_not_walked_through_again() -> None:
    first = feed_of(made("remembering", 1_000), Share(2, 0, 2), 3)
    for step in range(1, 101):
        first.share(step)
    again = Remembering(1_000)
    feed = feed_of(again, Share(2, 1, 2), 3)
    looked_at = again.given
    feed.restore(json.loads(json.dumps(first.state())), 100)
    assert feed.share(101).tolist() == [[402], [403]]
    assert again.given - looked_at == 4
    assert "restores its position" in feed.description


def test_a_source_goes_on_with_a_state_of_arrays_and_one_that_cannot_be_saved_is_refused() -> None:
    first = feed_of(Drawing(), Share(2, 0, 1), 3)
    drawn = [first.share(step).tolist() for step in range(1, 10)]
    broken = feed_of(Drawing(), Share(2, 0, 1), 3)
    for step in range(1, 7):
        broken.share(step)
    again = feed_of(Drawing(), Share(2, 0, 1), 3)
    again.restore(json.loads(json.dumps(broken.state())), 6)
    assert [again.share(step).tolist() for step in range(7, 10)] == drawn[6:]
    with pytest.raises(DataError, match="state_dict of the Drawing has what a checkpoint cannot"):
        feed_of(Drawing(random.Random(3)), Share(2, 0, 1), 3)  # noqa: S311 (no secret)


def test_workers_walk_ahead() -> None:
    source = IterableSource(dataset=Stream(10), workers=1)
    feed = feed_of(source, Share(3, 0, 1), 3)
    rows = [int(each[0]) for step in range(1, 6) for each in feed.share(step)]
    assert rows == [*range(10), *range(5)]
    feed.close()


@pytest.fixture
def start_method(request: pytest.FixtureRequest) -> Iterator[str]:
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(request.param, force=True)
    yield request.param
    multiprocessing.set_start_method(before, force=True)


# Python from 3.14 on has a server make all processes that say nothing else.
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"], indirect=True)
def test_workers_of_a_loader_are_those_of_its_rank(start_method: str) -> None:
    loader = DataLoader(Stream(10), batch_size=5, num_workers=1)
    feed = feed_of(loader, Share(5, 0, 1), 3)
    assert [int(each[0]) for each in feed.share(1)] == [*range(5)]
    # Who says "spawn" may not fork: the data set computes on a GPU, or what it reads with has threads.
    assert (loader.multiprocessing_context is None) == (start_method == "spawn")
    feed.close()


def test_a_loader_has_new_workers_in_each_epoch_as_a_resumed_run_has() -> None:
    def begun() -> Feed:
        loader = DataLoader(Stream(40), batch_size=2, num_workers=1, persistent_workers=True)
        return feed_of(loader, Share(4, 0, 1), 3)

    whole, resumed = begun(), begun()
    for step in range(1, 12):
        whole.share(step)
    resumed.restore(json.loads(json.dumps(whole.state())), 11)
    for step in range(12, 22):
        assert resumed.share(step).tolist() == whole.share(step).tolist()
    whole.close()
    resumed.close()


def test_a_stream_without_samples_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.factory: the Stream is empty"):
        feed_of(Stream(0), Share(1, 0, 1), 3)
    once = feed_of(iter([torch.zeros(1)] * 3), Share(2, 0, 1), 3)
    once.share(1)
    with pytest.raises(DataError, match="iterable more than once"):
        once.share(2)


def test_batches_of_other_shapes_are_refused() -> None:
    batches = [torch.zeros(2, 3), torch.zeros(2, 4)]
    loader = StatefulDataLoader(batches, batch_size=1, collate_fn=lambda given: given[0])
    feed = feed_of(loader, Share(4, 0, 1), 3)
    with pytest.raises(BatchShapeError, match=r"data\.factory: samples of two batches"):
        feed.share(1)


def test_a_stream_may_have_data_to_validate_on() -> None:
    feed = feed_of((Stream(5), Numbers(3)), Share(1, 0, 1), 3)
    assert [batch[:, 0].tolist() for batch in feed.validation()] == [[0, 1, 2]]
    assert feed.sample().shape == (1, 3)
