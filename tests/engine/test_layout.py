"""Slices tile, padding is only behind the end, and boxes round-trip exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_core.errors import ArgumentError, MissingShardError, OverlappingShardsError
from fsdp_core.layout import Box, Chunking, Packing, check_tiling

lengths = st.integers(0, 200)
ranks = st.integers(1, 17)


@given(lengths, ranks)
def test_chunks_are_those_of_torch_chunk(length: int, parts: int) -> None:
    chunking = Chunking(length, parts)
    pieces = torch.chunk(torch.arange(length), parts) if length else ()
    for part in range(parts):
        start, size = chunking.start(part), chunking.size(part)
        expected = pieces[part].tolist() if part < len(pieces) else []
        assert list(range(start, start + size)) == expected


@given(lengths, ranks)
def test_chunks_are_disjoint_and_covering_with_padding_only_at_the_end(
    length: int, parts: int
) -> None:
    chunking = Chunking(length, parts)
    padded: list[int | None] = []
    for part in range(parts):
        start, size = chunking.start(part), chunking.size(part)
        assert 0 <= size <= chunking.width
        padded += [*range(start, start + size), *[None] * (chunking.width - size)]
    assert len(padded) == chunking.padded_length
    assert padded[:length] == list(range(length))
    assert all(row is None for row in padded[length:])


@given(st.lists(st.integers(0, 30), min_size=1), ranks)
def test_packed_slices_are_disjoint_and_covering(sizes: list[int], parts: int) -> None:
    packing = Packing.of(sizes, parts)
    ends = [o + s for o, s in zip(packing.offsets, packing.sizes, strict=True)]
    assert list(packing.offsets) == [0, *ends[:-1]]
    assert ends[-1] == packing.row
    assert packing.total == packing.row * parts


shapes = st.lists(st.integers(0, 6), max_size=3)


@given(shapes, ranks, ranks)
def test_saved_at_one_size_and_filled_at_another_is_exact(
    shape: list[int], before: int, after: int
) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    saved = boxes_of(shape, before)
    check_tiling("w", shape, saved)
    for target in boxes_of(shape, after):
        filled = torch.full(target.shape, -1)
        for box in saved:
            if (common := target.intersect(box)) is not None:
                source = whole[box.slices_within(Box.whole(shape))]
                filled[common.slices_within(target)] = source[common.slices_within(box)]
        assert torch.equal(filled, whole[target.slices_within(Box.whole(shape))])


def boxes_of(shape: list[int], parts: int) -> list[Box]:
    if not shape:
        return [Box((), ())]
    chunking = Chunking(shape[0], parts)
    rest = tuple(shape[1:])
    return [
        Box((chunking.start(p), *[0] * len(rest)), (chunking.size(p), *rest)) for p in range(parts)
    ]


@given(st.integers(1, 40), st.integers(2, 8), st.data())
def test_a_missing_or_repeated_box_is_found(length: int, parts: int, data: st.DataObject) -> None:
    boxes = [box for box in boxes_of([length, 3], parts) if box.volume]
    victim = data.draw(st.sampled_from(boxes))
    with pytest.raises(MissingShardError, match="'w'"):
        check_tiling("w", (length, 3), [box for box in boxes if box != victim])
    with pytest.raises(OverlappingShardsError, match="'w'"):
        check_tiling("w", (length, 3), [*boxes, victim])


def test_boxes_on_two_dims_tile() -> None:
    quarters = [Box((i, j), (2, 3)) for i in (0, 2) for j in (0, 3)]
    check_tiling("w", (4, 6), quarters)
    with pytest.raises(OverlappingShardsError):
        check_tiling("w", (4, 6), [*quarters[:3], Box((1, 3), (3, 3))])
    with pytest.raises(MissingShardError, match="outside"):
        check_tiling("w", (4, 6), [*quarters[:3], Box((2, 4), (2, 3))])


def test_scalars_are_one_box() -> None:
    check_tiling("step", (), [Box((), ())])
    with pytest.raises(MissingShardError):
        check_tiling("step", (), [])
    with pytest.raises(OverlappingShardsError):
        check_tiling("step", (), [Box((), ()), Box((), ())])


IMPOSSIBLE: dict[str, Callable[[], object]] = {
    "negative length": lambda: Chunking(-1, 2),
    "no parts": lambda: Chunking(3, 0),
    "part past the last": lambda: Chunking(3, 2).start(2),
    "offsets and shape of different rank": lambda: Box((0,), (1, 2)),
    "negative offset": lambda: Box((-1,), (1,)),
    "boxes of different rank": lambda: Box((0,), (1,)).intersect(Box((), ())),
    "box outside": lambda: Box((0,), (3,)).slices_within(Box((1,), (2,))),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_arguments_are_refused(case: str) -> None:
    with pytest.raises(ArgumentError):
        IMPOSSIBLE[case]()
