"""One optimizer step over all ranks."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from fsdp_core import FSDPModule, clip_grad_norm_
from meshloom.data import Batch
from services.contract.states import RankPhase
from services.worker.rank.data import batches
from services.worker.rank.loop.run import Run
from services.worker.rank.models.loss import Computed


class NonFiniteLossError(ArithmeticError):
    """Loss or gradients are infinite or not numbers; all ranks see it at the same step."""


@dataclass(frozen=True)
class StepFigures:
    """What a step was.

    Attributes:
        loss: The mean over the global batch; in nats a token where it is that of the next token.
        grad_norm: Of all gradients before clipping.
        learning_rate: Of the first group.
        samples: Of the global batch: tokens that are predicted, or samples where these are no tokens.
        metrics: What the loss gave beside, each the mean over micro-batches and ranks.
        data_wait_s: How long this rank waited for its share of the data.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    samples: int
    metrics: Mapping[str, float]
    data_wait_s: float


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
    began = time.perf_counter()
    share = run.data.share(step)
    waited = time.perf_counter() - began
    micro_batches = list(batches.split(batches.moved(share, run.gang.device), run.micro_batch))

    passes = _accumulate(run, micro_batches)
    names = sorted(passes.metrics)
    own = torch.stack([passes.loss, *(passes.metrics[name].to(passes.loss) for name in names)])
    # fp64: the order of summation must not show in what is compared across world sizes.
    mean = run.gang.control.all_reduce(own.to("cpu", torch.float64) / run.gang.world_size)

    run.watch.enter(RankPhase.OPTIMIZER)
    limit = run.spec.train.clip_norm
    norm = clip_grad_norm_(run.model.parameters(), math.inf if limit is None else limit)
    mean_loss, *metrics = mean.wait().tolist()
    if not math.isfinite(mean_loss):
        raise NonFiniteLossError(
            f"the loss of step {step} is {mean_loss}; of this rank's share it is {float(passes.loss)}"
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
    return StepFigures(
        mean_loss,
        norm_value,
        run.base_rates[0] * factor,
        _counted(run, micro_batches),
        dict(zip(names, metrics, strict=True)),
        waited,
    )


def _counted(run: Run, micro_batches: Sequence[Batch]) -> int:
    count = batches.predicted_tokens if run.counts_tokens else batches.rows
    return run.gang.data_ranks * sum(count(each) or 0 for each in micro_batches)


def _accumulate(run: Run, micro_batches: Sequence[Batch]) -> Computed:
    """Gradients of the mean over this rank's share; reduced over ranks with the last pass."""
    model = cast("FSDPModule", run.model)
    total = torch.zeros((), device=run.gang.device)
    metrics: dict[str, torch.Tensor] = {}
    for number, batch in enumerate(micro_batches, start=1):
        model.set_requires_gradient_sync(number == len(micro_batches))
        computed = run.loss(batch)
        loss = computed.loss / len(micro_batches)
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's
        total += loss.detach()
        for name, value in computed.metrics.items():
            share = value.to(total) / len(micro_batches)
            metrics[name] = metrics[name] + share if name in metrics else share
    return Computed(total, metrics)
