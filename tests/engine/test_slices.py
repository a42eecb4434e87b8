"""Cutting, padding, joining and stacking are inverse to each other, for any shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_core.errors import ArgumentError
from fsdp_core.layout import Slicing
from fsdp_core.param import slices
from fsdp_core.param.slices import MemoryOrder


@st.composite
def slicings(draw: st.DrawFn, *, cut: bool = False) -> Slicing:
    shape = draw(st.lists(st.integers(0, 5), min_size=1 if cut else 0, max_size=4))
    dims: list[int | None] = [] if cut else [None]
    dims += range(len(shape))
    return Slicing.of(shape, draw(st.sampled_from(dims)), draw(st.integers(1, 6)))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, math.prod(shape) + 1).view(shape)


@given(slicings(cut=True))
def test_slices_without_padding_are_what_torch_chunks(slicing: Slicing) -> None:
    whole, dim = numbered(slicing.shape), cast("int", slicing.dim)
    chunks = list(torch.chunk(whole, slicing.parts, dim)) if whole.size(dim) else []
    for part in range(slicing.parts):
        padded = slices.cut(whole, slicing, part)
        mine = slices.own(padded, slicing, part)
        expected = chunks[part] if part < len(chunks) else whole.narrow(dim, 0, 0)
        assert torch.equal(mine, expected)
        assert tuple(mine.shape) == slicing.shape_of(part)
        assert tuple(padded.shape) == slicing.padded_shape
        assert padded.numel() == slicing.row
        assert mine.is_contiguous()
        assert mine.data_ptr() == padded.data_ptr() or not mine.numel()
        # All else is zeros.
        assert padded.sum() == mine.sum()


@given(slicings())
def test_joined_slices_are_the_whole(slicing: Slicing) -> None:
    whole = numbered(slicing.shape)
    rows = torch.stack([slices.cut(whole, slicing, p).view(-1) for p in range(slicing.parts)])
    again = torch.zeros_like(whole)
    slices.join(rows, slicing, again)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("rows", [64, 61])
@pytest.mark.parametrize("operation", ["join", "stack"])
def test_copies_do_not_grow_with_the_ranks(rows: int, operation: str) -> None:
    slicing = Slicing.of((3, rows, 2), 1, 16)
    whole = torch.zeros(slicing.shape)
    with CountedCopies() as counted:
        if operation == "join":
            slices.join(torch.zeros(16, slicing.row), slicing, whole)
        else:
            slices.stack(whole, slicing)
    assert counted.copies == (1 if rows == 64 else 2)


class CountedCopies(TorchDispatchMode):
    """Counts kernels that copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        self.copies = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        del types
        self.copies += func is torch.ops.aten.copy_.default
        return func(*args, **dict(kwargs or {}))


@given(slicings())
def test_leading_slices_end_to_end_are_the_whole_and_padding(slicing: Slicing) -> None:
    whole = numbered(slicing.shape)
    rows = [slices.cut(whole, slicing, p).view(-1) for p in range(slicing.parts)]
    if slicing.leads:
        flat = torch.cat(rows)
        assert torch.equal(flat[: slicing.total], whole.flatten())
        assert not flat[slicing.total :].any()


@given(slicings())
def test_padding_a_slice_again_gives_what_was_cut(slicing: Slicing) -> None:
    whole = numbered(slicing.shape)
    for part in range(slicing.parts):
        padded = slices.cut(whole, slicing, part)
        mine = slices.own(padded, slicing, part).clone()
        again = slices.pad(mine, slicing)
        assert torch.equal(again, padded)
        assert torch.equal(slices.own(again, slicing, part), mine)


@given(slicings())
def test_a_stacked_tensor_is_cut_into_the_padded_slices(slicing: Slicing) -> None:
    whole = numbered(slicing.shape)
    stacked = slices.stack(whole, slicing)
    out = torch.full((slicing.parts, slicing.row), -1)
    if out.numel():
        torch._chunk_cat([stacked], 0, slicing.parts, out=out)
    for part in range(slicing.parts):
        assert torch.equal(out[part], slices.cut(whole, slicing, part).view(-1))


@given(st.lists(st.integers(1, 4), max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_memory_is_found_and_undone(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]  # a random.Random
    tensor = numbered(tuple(shape)).permute(order)
    found = MemoryOrder.of(tensor)
    physical = found.physical(tensor)
    assert physical.is_contiguous()
    assert torch.equal(found.seen(physical), tensor)
    assert found.seen_shape(physical.shape) == tensor.shape


def test_a_tensor_with_gaps_lies_as_a_contiguous_one() -> None:
    assert MemoryOrder.of(torch.zeros(6, 4).t()[:, ::2]).dims == (0, 1)
    assert MemoryOrder.of(torch.zeros(3, 1).expand(3, 4)).dims == (0, 1)


def test_impossible_slicings_are_refused() -> None:
    for shape, dim, parts in (((2, 3), 2, 2), ((2, 3), -1, 2), ((), 0, 2), ((2,), 0, 0)):
        with pytest.raises(ArgumentError):
            Slicing.of(shape, dim, parts)
    with pytest.raises(ArgumentError, match="held whole"):
        Slicing.of((2, 3), None, 2).bounds(0)
    with pytest.raises(ArgumentError, match="Part 2 does not exist"):
        Slicing.of((2, 3), 0, 2).bounds(2)
