"""Shares of map-style data: nothing is lost or repeated, whatever happens to the run."""

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from meshloom import MapSource, Mixture
from meshloom.data import Batch
from services.worker.rank.checkpoints.state import restore_position
from services.worker.rank.data.batches import BatchShapeError
from services.worker.rank.data.feeds import feed_of
from services.worker.rank.data.share import Share
from services.worker.rank.data.source import BEGINNING, DataError, Feed


class Numbers(Dataset[torch.Tensor]):
    """Sample ``i`` is ``i``, and what is drawn while it is read."""

    def __init__(self, count: int, *, broken: int | None = None) -> None:
        self._count = count
        self._broken = broken

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self._broken:
            raise KeyError(f"no file for {index}")
        drawn = random.randrange(1 << 20)  # noqa: S311 (no secret)
        drawn += np.random.randint(1 << 20) + int(torch.randint(1 << 20, ()))
        return torch.tensor([index, drawn])


def numbers(count: int) -> MapSource:
    return MapSource(dataset=Numbers(count), digest="numbers")


Walk = list[tuple[int, int, int]]
"""Of each attempt: ranks, samples on each, steps."""
WALKS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=5
)


def walked(made: object, walk: Walk, *, seed: int = 3) -> list[list[int]]:
    """What attempts of these sizes see, each resumed from the one before, in the global order."""
    state: Mapping[str, Any] = BEGINNING
    step, found = 0, []
    for ranks, per_rank, steps in walk:
        feeds = [feed_of(made, Share(per_rank, rank, ranks), seed) for rank in range(ranks)]
        for feed in feeds:
            feed.restore(state, step)
        for _ in range(steps):
            step += 1
            for feed in feeds:
                found += feed.share(step).tolist()
        states = [json.dumps(feed.state()) for feed in feeds]
        for feed in feeds:
            feed.close()
        assert len(set(states)) == 1
        state = json.loads(states[0])
    return found


def total(walk: Walk) -> int:
    return sum(ranks * per_rank * steps for ranks, per_rank, steps in walk)


@settings(max_examples=30)
@given(count=st.integers(1, 40), walk=WALKS)
def test_every_epoch_has_every_sample_once_over_restarts_of_any_size(
    count: int, walk: Walk
) -> None:
    found = walked(numbers(count), walk)
    assert len(found) == total(walk)
    rows = [sample[0] for sample in found]
    for start in range(0, len(rows), count):
        epoch = rows[start : start + count]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(count))


@settings(max_examples=30)
@given(count=st.integers(1, 40), walk=WALKS)
def test_the_size_of_attempts_does_not_show_in_the_samples(count: int, walk: Walk) -> None:
    # What was drawn at random while they were read, too.
    whole = [(1, 1, total(walk))]
    assert walked(numbers(count), walk) == walked(numbers(count), whole)


@settings(max_examples=30)
@given(walk=WALKS)
def test_a_mixture_goes_on_where_it_was(walk: Walk) -> None:
    made = Mixture([(numbers(7), 2.0), (numbers(100), 1.0)])
    assert walked(made, walk) == walked(made, [(1, 1, total(walk))])


def test_workers_read_what_the_rank_would_have_read() -> None:
    walk = [(1, 3, 4), (2, 2, 5)]
    with_workers = MapSource(dataset=Numbers(11), workers=2, prefetch=1)
    assert walked(with_workers, walk) == walked(Numbers(11), walk)


@pytest.fixture
def feed() -> Iterator[Feed]:
    feed = feed_of(MapSource(dataset=Numbers(10), workers=1), Share(2, 1, 3), 5)
    yield feed
    feed.close()


def test_a_step_may_be_asked_for_out_of_turn(feed: Feed) -> None:
    plain = feed_of(Numbers(10), Share(2, 1, 3), 5)
    for step in (1, 2, 7, 8, 3, 1):
        assert torch.equal(feed.share(step), plain.share(step))
    assert feed.state() == {"samples": 6, "taken": [6]}


def test_without_a_state_the_step_says_where_the_run_is(feed: Feed) -> None:
    plain = feed_of(Numbers(10), Share(2, 1, 3), 5)
    feed.restore({}, 4)
    assert torch.equal(feed.share(5), plain.share(5))
    assert feed.state()["samples"] == 5 * 6


@pytest.mark.parametrize(
    ("about", "samples"),
    [
        ({"data_digest": "mine", "data": {"samples": 50, "taken": [50]}, "step": 9}, 50),
        ({"data_digest": "mine", "step": 9}, 9 * 6),  # as older versions saved it
        ({"data_digest": "another", "data": {"samples": 50, "taken": [50]}, "step": 9}, 0),
    ],
    ids=["the same data", "no position", "other data of a clone"],
)
def test_a_checkpoint_says_where_its_data_goes_on(about: dict[str, Any], samples: int) -> None:
    feed = feed_of(MapSource(dataset=Numbers(10)), Share(2, 1, 3), 5)
    restore_position(feed, "mine", about)
    assert feed.state()["samples"] == samples
    assert torch.equal(feed.share(10), shares_after(samples)[2:4])


def shares_after(samples: int) -> torch.Tensor:
    """The global batch of six after so many samples."""
    alone = feed_of(Numbers(10), Share(1, 0, 1), 5)
    return torch.cat([alone.share(number + 1) for number in range(samples, samples + 6)])


def test_reading_draws_nothing_from_the_generators_of_the_run() -> None:
    made = [Numbers(10), MapSource(dataset=Numbers(10), workers=1)]
    for source in made:
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        feed = feed_of(source, Share(2, 0, 1), 5)
        feed.share(1)
        assert torch.equal(torch.rand(3), expected)
        feed.close()


def test_a_sample_and_validation_take_nothing() -> None:
    made = (Numbers(10), TensorDataset(torch.arange(5)))
    feed = feed_of(made, Share(2, 0, 1), 5)
    first = feed.sample()
    assert first.shape == (1, 2)
    assert torch.equal(feed.share(1)[:1], first)
    assert torch.equal(feed.sample(2), feed.share(1))
    held = feed.validation()
    assert [batch[0].tolist() for batch in held] == [[0, 1, 2, 3, 4]]
    assert feed.state()["samples"] == 2


def test_a_part_can_be_held_out() -> None:
    made = MapSource(dataset=Numbers(100), validation_fraction=0.2, validation_batch=4)
    feed = feed_of(made, Share(10, 0, 1), 5)
    held = {int(each[0]) for batch in feed.validation() for each in batch}
    assert 8 < len(held) < 35
    steps = [feed.share(step) for step in range(1, 30)]
    assert {int(each[0]) for batch in steps for each in batch} == set(range(100)) - held
    again = feed_of(made, Share(5, 1, 2), 6).validation()
    assert all(torch.equal(*pair) for pair in zip(again, feed.validation(), strict=True))


def test_samples_of_different_shapes_are_named() -> None:
    ragged = [torch.zeros(3 + (index == 4)) for index in range(6)]
    feed = feed_of(MapSource(dataset=ragged), Share(6, 0, 1), 5)
    with pytest.raises(
        BatchShapeError, match=r"data\.factory: .*sample 4 \(number .*float32 \(4,\)"
    ):
        feed.share(1)
    padded = MapSource(dataset=ragged, collate_fn=torch.nn.utils.rnn.pad_sequence)
    assert feed_of(padded, Share(6, 0, 1), 5).share(1).shape == (4, 6)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_data_set_raises_names_the_sample(workers: int) -> None:
    made = MapSource(dataset=Numbers(4, broken=2), digest="broken", workers=workers)
    feed = feed_of(made, Share(4, 0, 1), 5)
    with pytest.raises(KeyError, match="no file for 2") as raised:
        feed.share(1)
    assert any("raised by sample 2 (number" in note for note in raised.value.__notes__)


def test_a_loader_gives_all_but_its_order() -> None:
    def doubled(samples: list[torch.Tensor]) -> Batch:
        return torch.stack(samples) * 2

    loader = DataLoader(Numbers(10), batch_size=3, shuffle=True, collate_fn=doubled)
    batch = feed_of(loader, Share(4, 0, 1), 5).share(1)
    assert torch.equal(batch, feed_of(Numbers(10), Share(4, 0, 1), 5).share(1) * 2)


ODD = WeightedRandomSampler([1.0] * 10, 10)


class Pairs(BatchSampler):
    """Batches as only this class joins them."""


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({}, None),
        ({"shuffle": True, "batch_size": 4, "drop_last": True}, None),
        ({"batch_size": None}, None),
        ({"sampler": DistributedSampler(Numbers(10), 2, 0)}, None),
        ({"sampler": SubsetRandomSampler([1, 2])}, "SubsetRandomSampler"),
        (
            {"sampler": RandomSampler(Numbers(10), replacement=True, num_samples=99)},
            "RandomSampler of 99 samples",
        ),
        ({"sampler": [3, 1, 2]}, "list"),
        ({"batch_sampler": Pairs(SequentialSampler(Numbers(10)), 2, drop_last=False)}, "Pairs"),
        (
            {"batch_sampler": BatchSampler(ODD, 2, drop_last=False)},
            "WeightedRandomSampler",
        ),
    ],
)
def test_a_loaders_own_choice_of_samples_is_said_to_have_no_effect(
    chosen: dict[str, Any], named: str | None
) -> None:
    loader = DataLoader(Numbers(10), **chosen)
    plain = DataLoader(Numbers(4))
    ways: list[object] = [
        loader,
        (loader, plain),
        {"train": plain, "validation": loader},
        Mixture([(loader, 1.0), (loader, 2.0)]),
        (MapSource(dataset=Numbers(10), validation=loader)),
    ]
    for made in ways:
        notices = feed_of(made, Share(4, 0, 1), 5).notices
        assert len(notices) == (named is not None)
        assert all(f"the DataLoader's {named} is not used" in notice for notice in notices)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([], "to train on is empty"),
        ((Numbers(3), Numbers(0)), "to validate on is empty"),
        ({"test": Numbers(3)}, "mapping of test; it needs 'train'"),
        ((torch.zeros(3, 2), torch.zeros(3)), r"made a tuple of Tensor, Tensor.*TensorDataset"),
        (7, "made a int, which gives no batches"),
        (torch.nn.Linear(1, 1), "made a Linear"),
        (MapSource(dataset=Numbers(2), validation_fraction=0.01), "to validate on is empty"),
        (Mixture([(3, 1.0)]), "this part is a int"),
    ],
)
def test_what_gives_no_samples_is_refused(made: object, said: str) -> None:
    with pytest.raises(DataError, match=rf"data\.factory.*{said}"):
        feed_of(made, Share(1, 0, 1), 5)


def test_digests_name_the_samples() -> None:
    def digest(made: object) -> str:
        return feed_of(made, Share(1, 0, 1), 5).digest

    values = torch.arange(6.0)
    assert digest(Numbers(10)) == digest(Numbers(10))
    assert digest(TensorDataset(values)) == digest(TensorDataset(values.clone()))
    different = [
        Numbers(10),
        Numbers(11),
        TensorDataset(values),
        TensorDataset(values.double()),
        TensorDataset(values + 1),
        [{"x": value} for value in values],
        [(value,) for value in values],
        MapSource(dataset=Numbers(10), validation_fraction=0.5),
        MapSource(dataset=Numbers(10), shuffle=False),
        MapSource(dataset=Numbers(10), digest="mine"),
    ]
    assert len({digest(made) for made in different}) == len(different)
