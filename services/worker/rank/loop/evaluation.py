"""A validation pass, shared out over the ranks."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from meshloom.data import Batch
from services.contract.words.states import RankPhase
from services.worker.rank.data import batches
from services.worker.rank.loop.context import LoopContext
from services.worker.rank.loop.run import Run
from services.worker.rank.models.loss import LossError, checked


@dataclass(frozen=True)
class Evaluation:
    """The mean over the validation data, the same on all ranks.

    Attributes:
        loss: In nats a token where it is that of the next token.
        tokens: Over how many predicted tokens, or samples where these are no tokens.
        metrics: What the loss gave beside.
    """

    loss: float
    tokens: int
    metrics: Mapping[str, float]

    @property
    def figures(self) -> dict[str, float]:
        """The loss, and then the metrics beside it, by name."""
        return {"loss": self.loss, **self.metrics}


def evaluate(run: Run, step: int) -> Evaluation | None:
    """Evaluates the models after ``step`` on the validation batches; None if the data has none.

    With averages of the weights it is these that are evaluated.

    Every rank makes as many passes as the others, because each pass gathers parameters from all:
    where a rank has no batch left, it repeats the first with weight 0.

    Raises:
        LossError: The trainable leaves out what the spec has measured.
    """
    validation = run.data.validation()
    if not validation:
        return None
    run.watch.enter(RankPhase.EVAL)
    world, rank = run.gang.data_ranks, run.gang.data_rank
    sums: dict[str, float] = {}
    context = LoopContext(run, step, None)
    averages = contextlib.nullcontext() if run.ema is None else run.ema.in_place_of_weights()
    with torch.no_grad(), averages, _evaluated(run):
        for own in range(rank, rank + len(validation), world):
            is_own = own < len(validation)
            found = _sums(run, validation[own if is_own else 0], context)
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value * is_own
        if run.spec.evaluation is not None and not context.has_called_loss:
            raise LossError(
                f"evaluation.metrics: {type(run.trainable).__name__}.eval_batch did not call context.loss, "
                "which measures them; call it, or return the metrics beside the loss"
            )
        names = sorted(sums)
        # Within: no rank may exchange its slices while another computes with them.
        own_sums = torch.tensor([sums[name] for name in names], dtype=torch.float64)
        totals = dict(
            zip(names, run.gang.control.all_reduce(own_sums).wait().tolist(), strict=True)
        )
    loss, counted = totals.pop(_LOSS), totals.pop(_COUNTED)
    # The ranks of one tp group have seen the same samples.
    seen = int(counted) // (run.gang.world_size // world)
    return Evaluation(
        loss / counted, seen, {name: value / counted for name, value in totals.items()}
    )


_LOSS, _COUNTED = "", " "  # no names of metrics


@contextlib.contextmanager
def _evaluated(run: Run) -> Iterator[None]:
    """Within, the models evaluate; afterwards each module trains if it did, and no parameter is gathered."""
    models = run.models.by_name.values()
    # A module may be frozen in evaluation mode below one that trains.
    were_training = [
        (model, [(each, each.training) for each in model.modules()]) for model in models
    ]
    for model in models:
        model.eval()
    yield
    for model, of_modules in were_training:
        model.train(of_modules[0][1])  # an own ``train`` may do more than to set what follows
        for module, was_training in of_modules:
            module.training = was_training
    # Nobody needs them whole until the next pass.
    run.models.reshard()


def _sums(run: Run, batch: Batch, context: LoopContext) -> dict[str, float]:
    """Loss and metrics times what they are the mean over, and that."""
    count = batches.predicted_tokens if run.counts_tokens else batches.rows
    weight = count(batch) or 0
    computed = checked(run.trainable.eval_batch(batches.moved(batch, run.gang.device), context))
    found = {_LOSS: float(computed.loss), **{k: float(v) for k, v in computed.metrics.items()}}
    # The mean over no token is no number.
    sums = {name: value * weight if weight else 0.0 for name, value in found.items()}
    return {_COUNTED: float(weight), **sums}
