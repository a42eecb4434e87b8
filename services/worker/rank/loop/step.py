"""One optimizer step over all ranks."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from fsdp_core import FSDPModule
from meshloom.data import Batch
from services.contract.words.states import RankPhase
from services.worker.rank.data import batches
from services.worker.rank.data.checks import explain, not_finite
from services.worker.rank.gang.agreement import first_told
from services.worker.rank.loop.context import LoopContext, NonFiniteLossError
from services.worker.rank.loop.run import Run
from services.worker.rank.models.loss import Computed, checked
from services.worker.rank.optim.loss_scale import MOST_IN_A_ROW


@dataclass(frozen=True)
class StepFigures:
    """What a step was.

    Attributes:
        loss: The mean over the global batch; in nats a token where it is that of the next token.
        grad_norm: Of all gradients before clipping; NaN of a step that was skipped.
        learning_rate: Of the first group.
        samples: Of the global batch: tokens that are predicted, or samples where these are no tokens.
        metrics: What the loss gave beside, each the mean over micro-batches and ranks; with fp16 also
            ``loss_scale``, and ``skipped_steps`` so far.
        data_wait_s: How long this rank waited for its share of the data.
        is_skipped: Whether gradients overflowed in fp16, so that something was not updated.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    samples: int
    metrics: Mapping[str, float]
    data_wait_s: float
    is_skipped: bool = False


@dataclass(frozen=True)
class _Share:
    """This rank's part of a step.

    Attributes:
        batch: On the CPU.
        micro_batches: On the device.
        divisors: By what the mean loss of each is divided: how many there are, where all weigh alike.
        counted: Tokens or samples of the global batch.
        data_wait_s: How long the data let this rank wait.
    """

    batch: Batch
    micro_batches: Sequence[Batch]
    divisors: Sequence[float]
    counted: int
    data_wait_s: float


def train_step(run: Run, step: int, before_update: Callable[[], None]) -> StepFigures:
    """Makes step number ``step`` (from 1): data, forward and backward, clip, optimizers.

    Args:
        run: Its parts.
        step: Its number.
        before_update: Called before parameters and the optimizers' state change: until it returns
            they are those of the step before.

    Raises:
        VocabularyError, UnfitBatchError: The model fails because it does not take the batch.
        NonFiniteLossError: The mean loss over the global batch, or the norm of the gradients, is
            not a number; the parameters were not changed (but by a trainable that steps itself). With
            fp16 a norm that overflows has the step skipped, until too many are in a row.
    """
    run.watch.enter(RankPhase.DATA)
    share = _own_share(run, step)
    try:
        return _trained(run, step, share, before_update)
    except NonFiniteLossError as error:
        # All ranks raise it at once, and the first of them that is heard speaks for all.
        doubt = not_finite(share.batch)
        own = None if doubt is None else doubt.told(run.data, step)
        found = first_told(run.gang, own)
        if found is None:
            raise
        raise NonFiniteLossError(f"{error}; {found}") from error
    except Exception as error:
        explain(error, share.batch, run.model, run.data, step)
        raise


def _trained(
    run: Run, step: int, share: "_Share", before_update: Callable[[], None]
) -> StepFigures:
    context = LoopContext(run, step, before_update)
    passes = _accumulate(run, share, context)
    names = sorted(passes.metrics)
    own = torch.stack([passes.loss, *(passes.metrics[name].to(passes.loss) for name in names)])
    # fp64: the order of summation must not show in what is compared across world sizes.
    mean = run.gang.control.all_reduce(own.to("cpu", torch.float64) / run.gang.world_size)

    means: list[float] = []

    def check_loss() -> None:
        means.extend(mean.wait().tolist())
        if not math.isfinite(means[0]):
            raise NonFiniteLossError(
                f"the loss of step {step} is {means[0]}; of this rank's share it is {float(passes.loss)}"
            )

    if run.trainable.steps_itself:
        check_loss()
    else:
        context.update(None, check_loss)
    if run.ema is not None and not context.has_overflowed:
        run.ema.follow(step)
    mean_loss, *metrics = means
    return StepFigures(
        mean_loss,
        context.norm,
        run.optimizers.first_rate * run.schedule(step),
        share.counted,
        {**dict(zip(names, metrics, strict=True)), **note_scale(run, context)},
        share.data_wait_s,
        context.has_overflowed,
    )


def note_scale(run: Run, context: LoopContext) -> Mapping[str, float]:
    """Takes note of whether the step was skipped; the figures of it.

    Raises:
        NonFiniteLossError: So many were in a row that no scale of the loss will do.
    """
    if run.scaler is None:
        return {}
    run.scaler.now = now = run.scaler.now.after(overflowed=context.has_overflowed)
    if now.in_a_row >= MOST_IN_A_ROW:
        raise NonFiniteLossError(
            f"the gradients of {now.in_a_row} steps in a row, up to step {context.step_number}, "
            f"are not finite, down to a loss scale of {now.scale}"
        )
    return {"loss_scale": now.scale, "skipped_steps": float(now.skipped)}


def _own_share(run: Run, step: int) -> _Share:
    began = time.perf_counter()
    batch = run.data.share(step)
    waited = time.perf_counter() - began
    size = batches.rows(batch) if run.trainable.steps_itself else run.micro_batch
    divisors: Sequence[float] | None = None
    counted = 0
    if run.weighs_tokens:
        own = [batches.predicted_tokens(each) or 0 for each in batches.split(batch, size)]
        divisors, counted = _weighed(run, step, own)
    micro_batches = list(batches.split(batches.moved(batch, run.gang.device), size))
    if divisors is None:
        divisors = [float(len(micro_batches))] * len(micro_batches)
        count = batches.predicted_tokens if run.counts_tokens else batches.rows
        counted = run.gang.data_ranks * sum(count(each) or 0 for each in micro_batches)
    return _Share(batch, micro_batches, divisors, counted, waited)


def _weighed(run: Run, step: int, own: Sequence[int]) -> tuple[Sequence[float], int]:
    """Divisors by which each token of the global batch weighs the same, and how many there are.

    Where all micro-batches of all ranks predict as many, each divisor is exactly their number.

    Raises:
        NonFiniteLossError: There is no token.
    """
    total = int(run.gang.control.all_reduce(torch.tensor([sum(own)])).wait())
    if total == 0:
        raise NonFiniteLossError(
            f"the loss of step {step} is the mean over no token: all labels of its batch are masked"
        )
    world = run.gang.world_size
    return (
        [total / (each * world) if each else math.inf for each in own],
        total // (world // run.gang.data_ranks),
    )


def _accumulate(run: Run, share: _Share, context: LoopContext) -> Computed:
    """Gradients of the mean over this rank's share; reduced over ranks with the last pass."""
    models = [cast("FSDPModule", each) for each in run.models.by_name.values()]
    total = torch.zeros((), device=run.gang.device)
    metrics: dict[str, torch.Tensor] = {}
    count = len(share.micro_batches)
    for number, (batch, divisor) in enumerate(
        zip(share.micro_batches, share.divisors, strict=True), start=1
    ):
        for model in models:
            model.set_requires_gradient_sync(number == count)
        computed = checked(run.trainable.train_batch(batch, context))
        loss = _part(computed.loss, divisor)
        if not run.trainable.steps_itself:
            context.go_backward(loss)
        total += loss.detach()
        for name, value in computed.metrics.items():
            part = _part(value.to(total), divisor)
            metrics[name] = metrics[name] + part if name in metrics else part
    return Computed(total, metrics)


def _part(value: torch.Tensor, divisor: float) -> torch.Tensor:
    if divisor < math.inf:
        return value / divisor
    # The mean over no token is no number, but all ranks must go backward as often.
    return torch.nan_to_num(value) * 0.0
