"""A validation pass, shared out over the ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from fsdp_core import FSDPModule
from meshloom.data import Batch
from services.contract.states import RankPhase
from services.worker.rank.data import batches
from services.worker.rank.loop.run import Run


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


def evaluate(run: Run) -> Evaluation | None:
    """Evaluates the model on the validation batches; None if the data has none.

    Every rank makes as many passes as the others, because each pass gathers parameters from all:
    where a rank has no batch left, it repeats the first with weight 0.
    """
    validation = run.data.validation()
    if not validation:
        return None
    run.watch.enter(RankPhase.EVAL)
    world, rank = run.gang.data_ranks, run.gang.data_rank
    sums: dict[str, float] = {}
    was_training = run.model.training
    run.model.eval()
    with torch.no_grad():
        for own in range(rank, rank + len(validation), world):
            is_own = own < len(validation)
            for name, value in _sums(run, validation[own if is_own else 0]).items():
                sums[name] = sums.get(name, 0.0) + value * is_own
    run.model.train(was_training)
    # The root stays gathered after a forward pass: nobody needs it whole until the next one.
    cast("FSDPModule", run.model).reshard()
    names = sorted(sums)
    own_sums = torch.tensor([sums[name] for name in names], dtype=torch.float64)
    totals = dict(zip(names, run.gang.control.all_reduce(own_sums).wait().tolist(), strict=True))
    loss, counted = totals.pop(_LOSS), totals.pop(_COUNTED)
    # The ranks of one tp group have seen the same samples.
    seen = int(counted) // (run.gang.world_size // world)
    return Evaluation(
        loss / counted, seen, {name: value / counted for name, value in totals.items()}
    )


_LOSS, _COUNTED = "", " "  # no names of metrics


def _sums(run: Run, batch: Batch) -> dict[str, float]:
    """Loss and metrics times what they are the mean over, and that."""
    count = batches.predicted_tokens if run.counts_tokens else batches.rows
    weight = count(batch) or 0
    computed = run.loss(batches.moved(batch, run.gang.device))
    found = {_LOSS: float(computed.loss), **{k: float(v) for k, v in computed.metrics.items()}}
    return {_COUNTED: float(weight), **{name: value * weight for name, value in found.items()}}
