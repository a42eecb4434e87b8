"""Optimizers by short name.

An optimizer factory takes an iterable of (FQN, parameter) and the arguments of
``optimizer.args``, and returns a ``torch.optim.Optimizer`` whose groups hold ``lr``; the trainer
multiplies that by the schedule's factor.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]

_MATRIX_DIMS: Final = 2


def adamw(
    parameters: NamedParameters,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) that decays matrices only.

    Norm weights and biases keep their scale: decay would pull a norm's gain towards zero.
    """
    first, second = betas
    return torch.optim.AdamW(
        _by_decay(parameters, weight_decay), lr=lr, betas=(first, second), eps=eps, fused=True
    )


def sgd(
    parameters: NamedParameters,
    lr: float = 1e-2,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    *,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """Gradient descent with momentum; decays matrices only."""
    return torch.optim.SGD(
        _by_decay(parameters, weight_decay),
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        foreach=True,  # DTensor has no fused one
    )


def _by_decay(parameters: NamedParameters, weight_decay: float) -> list[dict[str, Any]]:
    trained = [(name, p) for name, p in parameters if p.requires_grad]
    matrices = [(name, p) for name, p in trained if p.ndim >= _MATRIX_DIMS]
    others = [(name, p) for name, p in trained if p.ndim < _MATRIX_DIMS]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
