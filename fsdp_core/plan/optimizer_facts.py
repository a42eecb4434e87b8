"""What an optimizer keeps and needs, seen by letting it step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import TypeAlias

import torch
from torch import nn

from fsdp_core.plan.live_storage import LiveStorage
from fsdp_core.plan.model import MatrixState, OptimizerFacts

MakeOptimizer: TypeAlias = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
_Shape: TypeAlias = tuple[int, ...]

_NUMEL, _SIDE, _MANY = 4096, 64, 3
_ITEMSIZE = 4


def optimizer_facts(make: MakeOptimizer, device_type: str = "cpu") -> OptimizerFacts:
    """Steps over one, and over several small parameters of some shapes, and compares.

    An optimizer that takes no vectors, or no matrices, is taken to treat them as the others.

    Args:
        make: Builds it over parameters.
        device_type: Where the parameters are.

    Raises:
        Exception: What the optimizer raises, of vectors and of matrices.
    """
    try:
        vectors = _of_vectors(make, device_type)
    except Exception:  # noqa: BLE001 - the user's code; what is no fault of vectors comes again
        return _of_matrices(make, device_type)
    try:
        matrices = _of_matrices(make, device_type)
    except Exception:  # noqa: BLE001 - as above
        return vectors
    kept = matrices.matrices
    alike = MatrixState(
        vectors.state_copies, vectors.state_element_bytes, bytes=vectors.state_bytes
    )
    return OptimizerFacts(
        vectors.state_copies,
        vectors.state_bytes,
        max(vectors.step_copies_of_all, matrices.step_copies_of_all),
        max(vectors.step_copies_of_largest, matrices.step_copies_of_largest),
        vectors.state_element_bytes,
        None if kept == alike else kept,
    )


def _of_vectors(make: MakeOptimizer, device_type: str) -> OptimizerFacts:
    small, of_all, of_largest = _per_parameter(make, (_NUMEL,), device_type)
    large, _, _ = _per_parameter(make, (2 * _NUMEL,), device_type)
    copies, element_bytes = _copies((large - small) / _NUMEL)
    rest = round(2 * small - large)
    return OptimizerFacts(copies, rest, of_all, of_largest, element_bytes)


def _of_matrices(make: MakeOptimizer, device_type: str) -> OptimizerFacts:
    """By its sizes at four shapes, which are bilinear in rows and columns."""
    side = _SIDE
    square, of_all, of_largest = _per_parameter(make, (side, side), device_type)
    high, _, _ = _per_parameter(make, (2 * side, side), device_type)
    wide, _, _ = _per_parameter(make, (side, 2 * side), device_type)
    both, _, _ = _per_parameter(make, (2 * side, 2 * side), device_type)
    elements = (both - high - wide + square) / side**2
    rows = (high - square) / side - elements * side
    columns = (wide - square) / side - elements * side
    rest = square - elements * side**2 - (rows + columns) * side
    copies, element_bytes = _copies(elements)
    kept = MatrixState(copies, element_bytes, rows, columns, round(rest))
    return OptimizerFacts(copies, round(rest), of_all, of_largest, element_bytes, kept)


def _copies(element_bytes: float) -> tuple[int, float]:
    copies, rest = divmod(element_bytes, _ITEMSIZE)
    return int(copies), rest


def _per_parameter(make: MakeOptimizer, shape: _Shape, device_type: str) -> tuple[float, int, int]:
    """Bytes of state for each parameter; copies of all, and of one, that a step needs besides."""
    nbytes = _ITEMSIZE * prod(shape)
    state, temporary_of_one = _second_step(make, [shape], device_type)
    states, temporary_of_many = _second_step(make, [shape] * _MANY, device_type)
    of_all = max(0, temporary_of_many - temporary_of_one) // ((_MANY - 1) * nbytes)
    of_largest = max(0, temporary_of_one // nbytes - of_all)
    return (states - state) / (_MANY - 1), of_all, of_largest


def _second_step(
    make: MakeOptimizer, shapes: Iterable[_Shape], device_type: str
) -> tuple[int, int]:
    """Bytes of state, and temporary bytes of a step that finds its state."""
    with LiveStorage() as live:
        parameters = [nn.Parameter(torch.ones(shape, device=device_type)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        before = live.live
        optimizer = make(parameters)
        optimizer.step()
        held = live.live
        live.forget_peak()
        optimizer.step()
        return held - before, live.peak - held
