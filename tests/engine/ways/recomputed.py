"""Forwards that run again in backward."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.engine.ways.run import (
    Run,
    way,
    way_beyond_the_reference,
)


def recomputed(run: Run, **which: bool) -> None:
    model = run.net()
    model.recompute = which
    for step in range(2):
        run.backward(model(run.x(step, grad=True)))


@way
def all_recomputed(run: Run) -> None:
    recomputed(run, first=False, second=False, norm=False, head=False)


@way
def all_recomputed_reentrantly(run: Run) -> None:
    recomputed(run, first=True, second=True, norm=True, head=True)


@way_beyond_the_reference
def head_of_a_group_recomputed_reentrantly(run: Run) -> None:
    recomputed(run, head=True)


@way
def norm_of_a_group_recomputed_reentrantly(run: Run) -> None:
    recomputed(run, norm=True)


@way
def root_recomputed(run: Run, *, reentrant: bool = False) -> None:
    model = run.net()
    for step in range(2):
        run.backward(checkpoint(model, run.x(step, grad=True), use_reentrant=reentrant))


@way
def root_recomputed_reentrantly(run: Run) -> None:
    root_recomputed(run, reentrant=True)


@way
def selectively_recomputed(run: Run) -> None:
    def saved(_: object, op: object, *__: object, **___: object) -> CheckpointPolicy:
        is_dear = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE

    model = run.net("first second norm head")
    contexts = partial(create_selective_checkpoint_contexts, saved)
    for step in range(2):
        x = run.x(step)
        output = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        run.backward(cast("torch.Tensor", output))
        run.step()
