"""A validation pass, shared out over the ranks."""

from dataclasses import dataclass
from typing import cast

import torch

from fsdp_core import FSDPModule
from services.contract.states import RankPhase
from services.worker.rank.loop.run import Run


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats a token over ``tokens`` predicted tokens, the same on all ranks."""

    loss: float
    tokens: int


def evaluate(run: Run) -> Evaluation | None:
    """Evaluates the model on the validation batches; None if the data has none.

    Every rank makes as many passes as the others, because each pass gathers parameters from all:
    where a rank has no batch left, it repeats the first with weight 0.
    """
    batches = run.data.validation()
    if not batches:
        return None
    run.watch.enter(RankPhase.EVAL)
    world, rank = run.gang.data_ranks, run.gang.data_rank
    sums = torch.zeros(2, dtype=torch.float64)
    was_training = run.model.training
    run.model.eval()
    with torch.no_grad():
        for first in range(0, len(batches), world):
            own = first + rank
            tokens = batches[own if own < len(batches) else 0]
            weight = tokens[:, 1:].numel() if own < len(batches) else 0
            loss = float(run.loss(tokens.to(run.gang.device)))
            sums += torch.tensor([loss * weight, weight], dtype=torch.float64)
    run.model.train(was_training)
    # The root stays gathered after a forward pass: nobody needs it whole until the next one.
    cast("FSDPModule", run.model).reshard()
    total, tokens_seen = run.gang.control.all_reduce(sums).wait().tolist()
    # The ranks of one tp group have seen the same tokens.
    return Evaluation(total / tokens_seen, int(tokens_seen) // (run.gang.world_size // world))
