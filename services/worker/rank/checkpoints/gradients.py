"""Gradients that wait for an update: of a trainable that does not step with all of them at each step."""

from collections.abc import Iterable
from typing import Final

import torch
from torch import nn

from fsdp_core.checkpoint import SavedShard, fill_from_shards

PREFIX: Final = "grad."


def pending_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """They, as ``grad.<fqn>``, sharded as their parameters; they share memory with the model's."""
    return {
        PREFIX + name: each.grad.detach()
        for name, each in model.named_parameters()
        if each.grad is not None
    }


def load_gradients(model: nn.Module, saved: Iterable[SavedShard]) -> None:
    """Gives parameters the gradients that were saved, and none to the others.

    Args:
        model: Sharded, between two steps.
        saved: Shards of all ranks; names outside ``grad.`` are ignored.

    Raises:
        CheckpointError: See `fill_from_shards`.
    """
    mine = [shard for shard in saved if shard.fqn.startswith(PREFIX)]
    names = {shard.fqn.removeprefix(PREFIX) for shard in mine}
    for name, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter) if name in names else None
    fill_from_shards(pending_gradients(model), mine)
