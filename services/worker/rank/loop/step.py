"""One optimizer step over all ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from fsdp_core import FSDPModule, clip_grad_norm_
from services.contract.states import RankPhase
from services.worker.rank.loop.run import Run


class NonFiniteLossError(ArithmeticError):
    """Loss or gradients are infinite or not numbers; all ranks see it at the same step."""


@dataclass(frozen=True)
class StepFigures:
    """Mean loss over the global batch (nats a token), gradient norm before clipping, rate."""

    loss: float
    grad_norm: float
    learning_rate: float


def train_step(run: Run, step: int, before_update: Callable[[], None]) -> StepFigures:
    """Makes step number ``step`` (from 1): data, forward and backward, clip, optimizer.

    Args:
        run: Its parts.
        step: Its number.
        before_update: Called before parameters and the optimizer's state change: until it returns
            they are those of the step before.

    Raises:
        NonFiniteLossError: The mean loss over the global batch, or the norm of the gradients, is
            not a number; the parameters were not changed.
    """
    run.watch.enter(RankPhase.DATA)
    micro_batches = _own_share(run, step)

    loss = _accumulate(run, micro_batches)
    # fp64: the order of summation must not show in what is compared across world sizes.
    mean = run.gang.control.all_reduce(loss.to("cpu", torch.float64) / run.gang.world_size)

    run.watch.enter(RankPhase.OPTIMIZER)
    limit = run.spec.train.clip_norm
    norm = clip_grad_norm_(run.model.parameters(), math.inf if limit is None else limit)
    mean_loss = float(mean.wait())
    if not math.isfinite(mean_loss):
        raise NonFiniteLossError(
            f"the loss of step {step} is {mean_loss}; of this rank's share it is {float(loss)}"
        )
    if not math.isfinite(norm_value := float(norm)):
        # An update by it would poison every parameter, and the next checkpoint with them.
        raise NonFiniteLossError(
            f"the gradient norm of step {step} is {norm_value}, the loss is {mean_loss}"
        )
    factor = run.schedule(step)
    for group, rate in zip(run.optimizer.param_groups, run.base_rates, strict=True):
        group["lr"] = rate * factor
    before_update()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return StepFigures(mean_loss, norm_value, run.base_rates[0] * factor)


def _own_share(run: Run, step: int) -> Sequence[torch.Tensor]:
    per_rank = run.spec.train.global_batch // run.gang.data_ranks
    first = run.gang.data_rank * per_rank
    tokens = run.data.batch(step, range(first, first + per_rank))
    return torch.split(tokens.to(run.gang.device), run.micro_batch)


def _accumulate(run: Run, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Gradients of the mean over this rank's share; reduced over ranks with the last pass."""
    model = cast("FSDPModule", run.model)
    total = torch.zeros((), device=run.gang.device)
    for number, tokens in enumerate(micro_batches, start=1):
        model.set_requires_gradient_sync(number == len(micro_batches))
        loss = run.loss(tokens) / len(micro_batches)
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's
        total += loss.detach()
    return total
