"""What is checked in a cell, by every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.engine.gang import RankContext
from tests.engine.grid.cell import Cell
from tests.engine.grid.cover import memory_of
from tests.engine.grid.engines import OURS, OURS_PACKED_AS_REFERENCE, ours_in, reference
from tests.engine.grid.training import Trace, train, train_alone

# How far rounding may carry ten steps of several ranks from those of one process.
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}
PARAM_TOLERANCE = 1e-6


def check_cell(ctx: RankContext, cell: Cell, steps: int) -> None:
    """Bit for bit the reference's training, the same in every run, and that of one process.

    Sums of three or more depend on their order, and so on the place in the buffer: there ours
    equals the reference when it packs as the reference does, and by default equals itself.
    """
    default = train(ctx, cell, OURS, steps)
    theirs = train(ctx, cell, reference(), steps)
    if cell.reduce_size > 2:
        assert_same(train(ctx, cell, OURS_PACKED_AS_REFERENCE, steps), theirs)
    else:
        assert_same(default, theirs)
    assert_same(train(ctx, cell, OURS, steps), default)
    assert_near_one_process(ctx, cell, default)
    for memory in memory_of(cell) if ctx.device.type == "cpu" else ():
        shared = train(ctx, cell, ours_in(memory), steps)
        if cell.reduce_size > 2:
            # Rank by rank, wherever an element lies: another order than gloo's.
            assert_near_one_process(ctx, cell, shared)
        else:
            assert_same(shared, theirs)


def assert_same(trace: Trace, expected: Trace) -> None:
    assert trace.losses == expected.losses
    for step, (grads, theirs) in enumerate(zip(trace.grads, expected.grads, strict=True)):
        assert grads.keys() == theirs.keys()
        for name, grad in grads.items():
            their_grad = theirs[name]
            if grad is None or their_grad is None:
                assert grad is their_grad, f"step {step}: {name}"
            else:
                _assert_same_bits(grad, their_grad, f"step {step}: gradient of {name}")
    assert trace.params.keys() == expected.params.keys()
    for name, param in trace.params.items():
        _assert_same_bits(param, expected.params[name], name)


def assert_near_one_process(ctx: RankContext, cell: Cell, trace: Trace) -> None:
    # Every rank of a tensor-parallel group has the same loss, so the mean over all is right.
    losses = torch.tensor(trace.losses, dtype=torch.float64, device=ctx.device)
    dist.all_reduce(losses)
    alone = train_alone(
        cell.precision,
        cell.weights,
        cell.accumulate,
        cell.data_ranks,
        str(ctx.device),
        len(trace.grads),
    )
    tolerance = LOSS_TOLERANCE[cell.precision]
    assert (losses / ctx.world).tolist() == pytest.approx(alone.losses, abs=tolerance, rel=0)
    assert alone.losses[-1] < alone.losses[0]
    assert trace.whole.keys() == alone.whole.keys()
    if cell.precision == "fp32":
        for name, param in trace.whole.items():
            distance = (param - alone.whole[name]).abs().max().item()
            assert distance <= PARAM_TOLERANCE, f"{name} is {distance} from that of one process"


def _assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    assert ours.dtype == theirs.dtype, what
    assert torch.equal(ours, theirs), f"{what}: {(ours - theirs).abs().max()} apart"
