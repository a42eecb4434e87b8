"""Layout against brute force: every claim about offsets is checked element by element.

Slices along any dim have their place at the end of this module.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core import torch_private
from fsdp_core.errors import MissingShardError, OverlappingShardsError
from fsdp_core.layout import Box, Chunking, Packing, check_tiling

# The same examples in every run, whatever the machine's load.
stable = settings(derandomize=True, max_examples=150)

worlds = st.integers(1, 9)
shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)
parameter_lists = st.lists(
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5
)

Shape = tuple[int, ...]


def numbered(shape: Shape, start: int = 0) -> torch.Tensor:
    """A tensor in which every element is another number."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float64).view(shape)


def slice_of(tensor: torch.Tensor, chunking: Chunking, rank: int) -> torch.Tensor:
    return tensor.narrow(0, chunking.start(rank), chunking.size(rank))


def padded_slice_of(tensor: torch.Tensor, chunking: Chunking, rank: int) -> torch.Tensor:
    """The slice, filled up to the width with a number that occurs nowhere."""
    padded = tensor.new_full((chunking.width, *tensor.shape[1:]), -1.0)
    padded[: chunking.size(rank)] = slice_of(tensor, chunking, rank)
    return padded


@stable
@given(shapes, worlds)
def test_slices_are_those_of_torch_chunk(shape: Shape, world: int) -> None:
    whole = numbered(shape)
    chunking = Chunking(shape[0], world)
    expected = list(whole.chunk(world)) if shape[0] else []
    for rank in range(world):
        mine = slice_of(whole, chunking, rank)
        theirs = expected[rank] if rank < len(expected) else whole[:0]
        assert torch.equal(mine, theirs)


@stable
@given(shapes, worlds)
def test_padded_slices_end_to_end_are_the_tensor_and_then_padding(shape: Shape, world: int) -> None:
    whole = numbered(shape)
    chunking = Chunking(shape[0], world)
    joined = torch.cat([padded_slice_of(whole, chunking, rank) for rank in range(world)])
    assert joined.shape[0] == chunking.padded_length
    assert torch.equal(joined[: shape[0]], whole)
    assert (joined[shape[0] :] == -1).all()


@stable
@given(shapes, worlds)
def test_no_part_is_wider_than_the_first_and_padding_is_less_than_one_row_each(
    shape: Shape, world: int
) -> None:
    chunking = Chunking(shape[0], world)
    sizes = [chunking.size(rank) for rank in range(world)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == chunking.width
    assert sum(sizes) == shape[0]
    # No narrower width would hold them all.
    assert (chunking.width - 1) * world < max(shape[0], 1)


@stable
@given(parameter_lists, worlds)
def test_a_gather_of_packed_slices_gives_every_parameter_back(
    shapes: list[Shape], world: int
) -> None:
    wholes = [numbered(shape, start=1000 * i) for i, shape in enumerate(shapes)]
    chunkings = [Chunking(shape[0], world) for shape in shapes]
    packing = Packing.of(
        [c.width * whole[:1].numel() for c, whole in zip(chunkings, wholes, strict=True)], world
    )
    rows = []
    for rank in range(world):
        slices = [
            padded_slice_of(w, c, rank).flatten() for w, c in zip(wholes, chunkings, strict=True)
        ]
        row = torch.full((packing.row,), -2.0, dtype=torch.float64)
        for offset, piece in zip(packing.offsets, slices, strict=True):
            row[offset : offset + piece.numel()] = piece
        rows.append(row)
    buffer = torch.cat(rows)
    assert buffer.numel() == packing.total
    for whole, offset, size in zip(wholes, packing.offsets, packing.sizes, strict=True):
        columns = buffer.view(world, packing.row)[:, offset : offset + size]
        assert torch.equal(columns.flatten()[: whole.numel()].view(whole.shape), whole)


@stable
@given(parameter_lists, worlds, st.data())
def test_a_reduction_of_packed_gradients_gives_every_rank_its_slices(
    shapes: list[Shape], world: int, data: st.DataObject
) -> None:
    chunkings = [Chunking(shape[0], world) for shape in shapes]
    sizes = [c.width * torch.Size(s[1:]).numel() for c, s in zip(chunkings, shapes, strict=True)]
    packing = Packing.of(sizes, world)
    total = torch.zeros(packing.total, dtype=torch.float64)
    for rank in range(world):
        grads = [numbered(shape, start=10 * rank) for shape in shapes]
        contribution = torch.empty(world, packing.row, dtype=torch.float64)
        torch_private.chunk_cat(grads, world, contribution)
        total += contribution.flatten()
    rank = data.draw(st.integers(0, world - 1))
    row = total[packing.row * rank : packing.row * (rank + 1)]
    for shape, chunking, offset in zip(shapes, chunkings, packing.offsets, strict=True):
        expected = sum(numbered(shape, start=10 * r) for r in range(world))
        assert isinstance(expected, torch.Tensor)
        mine = slice_of(expected, chunking, rank)
        found = row[offset : offset + mine.numel()].view(mine.shape)
        assert torch.equal(found, mine)


@stable
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), worlds)
def test_every_element_of_a_row_belongs_to_one_slice(sizes: list[int], world: int) -> None:
    packing = Packing.of(sizes, world)
    owners = [0] * packing.row
    for offset, size in zip(packing.offsets, packing.sizes, strict=True):
        for index in range(offset, offset + size):
            owners[index] += 1
    assert owners == [1] * packing.row
    assert packing.total == packing.row * world


# -- Boxes


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    """Any box that lies within `shape`."""
    offsets = [draw(st.integers(0, length)) for length in shape]
    ends = [draw(st.integers(o, length)) for o, length in zip(offsets, shape, strict=True)]
    return Box(tuple(offsets), tuple(e - o for o, e in zip(offsets, ends, strict=True)))


@st.composite
def several_boxes(draw: st.DrawFn, count: int) -> list[Box]:
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    return [draw(boxes_in(shape)) for _ in range(count)]


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(o, e) for o, e in zip(box.offsets, box.ends, strict=True))))


def elements_or_none(box: Box | None) -> set[tuple[int, ...]]:
    return set() if box is None else elements(box)


@stable
@given(several_boxes(2))
def test_an_intersection_holds_the_common_elements(boxes: list[Box]) -> None:
    one, other = boxes
    common = one.intersect(other)
    assert elements_or_none(common) == elements(one) & elements(other)
    assert other.intersect(one) == common
    assert common is None or common.volume == len(elements(common)) > 0


@stable
@given(several_boxes(3))
def test_intersections_may_be_taken_in_any_order(boxes: list[Box]) -> None:
    one, two, three = boxes
    left = one.intersect(two)
    right = two.intersect(three)
    assert (left and left.intersect(three)) == (right and one.intersect(right))


@stable
@given(several_boxes(2))
def test_slices_within_select_exactly_the_box(boxes: list[Box]) -> None:
    outer, other = boxes
    inner = outer.intersect(other)
    if inner is None:
        return
    held = torch.zeros(outer.shape, dtype=torch.int64)
    held[inner.slices_within(outer)] = 1
    selected = {
        tuple(o + i for o, i in zip(outer.offsets, index, strict=True))
        for index in (tuple(row) for row in held.nonzero().tolist())
    }
    assert selected == elements(inner)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    """A shape and boxes that tile it, made by cutting, in any order."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        first = tuple(at if d == dim else n for d, n in enumerate(box.shape))
        rest = tuple(n - at if d == dim else n for d, n in enumerate(box.shape))
        offsets = tuple(o + at if d == dim else o for d, o in enumerate(box.offsets))
        boxes += [Box(box.offsets, first), Box(offsets, rest)]
    return shape, draw(st.permutations(boxes))


@stable
@given(tilings())
def test_boxes_made_by_cutting_tile(tiling: tuple[Shape, list[Box]]) -> None:
    shape, boxes = tiling
    check_tiling("w", shape, boxes)


@stable
@given(tilings(), st.data())
def test_any_boxes_are_judged_as_painting_them_would(
    tiling: tuple[Shape, list[Box]], data: st.DataObject
) -> None:
    shape, boxes = tiling
    dropped = data.draw(st.sets(st.integers(0, len(boxes) - 1), max_size=2))
    boxes = [box for index, box in enumerate(boxes) if index not in dropped]
    boxes += data.draw(st.lists(boxes_in(shape), max_size=2))
    painted = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        painted[box.slices_within(Box.whole(shape))] += 1
    if (painted == 1).all():
        check_tiling("w", shape, boxes)
    elif (painted > 1).any():
        with pytest.raises(OverlappingShardsError, match="'w'"):
            check_tiling("w", shape, boxes)
    else:
        with pytest.raises(MissingShardError, match="'w'"):
            check_tiling("w", shape, boxes)


@stable
@given(tilings(), st.data())
def test_a_box_that_reaches_outside_is_found(
    tiling: tuple[Shape, list[Box]], data: st.DataObject
) -> None:
    shape, boxes = tiling
    if not shape:
        return
    dim = data.draw(st.integers(0, len(shape) - 1))
    outside = Box(tuple(n if d == dim else 0 for d, n in enumerate(shape)), tuple(1 for _ in shape))
    with pytest.raises(MissingShardError, match="reaches outside"):
        check_tiling("w", shape, [*boxes, outside])
