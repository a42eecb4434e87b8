"""Batches of any nesting: what is changed in them, split off, counted and refused."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from meshloom.data import Batch
from services.worker.rank.data import batches


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


@dataclass
class Record:
    image: torch.Tensor
    name: str


def image(count: int) -> torch.Tensor:
    return torch.arange(count * 2.0).reshape(count, 2)


NESTED: list[Any] = [
    image(5),
    (image(5), torch.arange(5)),
    [image(5), (torch.arange(5),)],
    Pair(image(5), torch.arange(5)),
    Record(image(5), "five"),
    {"pixels": image(5), "deep": {"label": torch.arange(5)}, "tag": "x"},
    UserDict({"pixels": image(5)}),
]


@pytest.mark.parametrize("batch", NESTED, ids=lambda batch: type(batch).__name__)
def test_parts_of_a_batch_are_of_its_kind_and_joined_they_are_it(batch: Batch) -> None:
    parts = list(batches.split(batch, 2))
    assert [batches.rows(part) for part in parts] == [2, 2, 1]
    assert {type(part) for part in parts} == {type(batch)}
    whole = batches.joined(parts)
    assert type(whole) is type(batch)
    pairs = zip(batches.tensors_of(whole), batches.tensors_of(batch), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_what_is_no_tensor_stays_as_it_is() -> None:
    record = batches.map_tensors(lambda tensor: tensor + 1, Record(image(1), "one"))
    assert record == Record(record.image, "one")
    assert torch.equal(record.image, image(1) + 1)


@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        ((image(3), torch.arange(4)), r"\(3, 2\), \(4,\)"),
        (torch.tensor(1.0), r"this one has \(\)"),
        ({"text": "no numbers"}, "no tensor"),
    ],
)
def test_a_batch_without_one_number_of_samples_is_refused(batch: Batch, shown: str) -> None:
    with pytest.raises(batches.BatchShapeError, match=shown):
        batches.rows(batch)


def test_tokens_are_counted_where_they_are_predicted() -> None:
    tokens = torch.zeros(3, 9, dtype=torch.int64)
    labels = tokens.clone()
    labels[0, :5] = -100
    assert batches.predicted_tokens(tokens) == 3 * 8
    assert batches.predicted_tokens({"input_ids": tokens, "labels": labels}) == 3 * 8 - 4
    assert batches.predicted_tokens({"input_ids": tokens}) == 3 * 9
    assert batches.predicted_tokens((image(3), torch.arange(3))) is None
    assert batches.predicted_tokens(torch.zeros(3, 9)) is None
