"""The loss of a batch: the model's own, or the cross entropy of the next token."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from fsdp_core import register_fsdp_forward_method
from services.worker.rank.models.protocol import LossModel

Loss = Callable[[torch.Tensor], torch.Tensor]


def loss_of(model: nn.Module) -> Loss:
    """A function from int64 tokens ``[batch, length + 1]`` to their mean loss, a scalar.

    Args:
        model: Sharded. If it has a method ``loss``, that is called, with parameters gathered
            around it as around ``forward``.
    """
    if isinstance(model, LossModel):
        register_fsdp_forward_method(model, "loss")
        return model.loss

    def next_token_loss(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens[:, :-1])
        # In fp32 whatever the model's precision: the sum over a vocabulary is long.
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return next_token_loss
