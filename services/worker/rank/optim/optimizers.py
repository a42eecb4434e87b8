"""Optimizers by short name.

An optimizer factory takes an iterable of (FQN, parameter) and the arguments of ``optimizer.args``, and
returns a ``torch.optim.Optimizer`` whose groups hold ``lr``, or a dict of several by name. The trainer
multiplies each ``lr`` by the schedule's factor. With ``optimizer.groups`` it takes an iterable of groups
instead: see ``groups.Parameters``. Every class of ``torch.optim`` is such a factory.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import torch

from services.worker.rank.optim.groups import Named, Parameters, as_groups, by_decay

_MATRIX_DIMS: Final = 2
NOT_HIDDEN: Final = (
    *("*embed*", "wte.*", "*.wte.*", "wpe.*", "*.wpe.*"),
    *("head.*", "*.head.*", "*lm_head*", "*classifier*", "score.*", "*.score.*"),
)
"""Names of embeddings and heads as models usually have them."""


def adamw(
    parameters: Parameters,
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
        by_decay(parameters, weight_decay), lr=lr, betas=(first, second), eps=eps, fused=True
    )


def sgd(
    parameters: Parameters,
    lr: float = 1e-2,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    *,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum; decays matrices only."""
    return torch.optim.SGD(
        by_decay(parameters, weight_decay),
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        foreach=True,  # DTensor has no fused one
    )


def muon(
    parameters: Parameters,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    *,
    momentum: float = 0.95,
    betas: Sequence[float] = (0.9, 0.95),
    exclude: Sequence[str] = NOT_HIDDEN,
) -> Mapping[str, torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for matrices within the model, AdamW for all other parameters.

    Updates of matrices are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so one
    ``lr`` and ``weight_decay`` serve both. Muon needs whole matrices: one rank of ``dp_shard`` holds
    each, so there must be no tensor parallelism. Its steps are computed in bf16.

    Args:
        parameters: To be trained.
        lr: Of both.
        weight_decay: Of matrices.
        momentum: Of Muon.
        betas: Of AdamW.
        exclude: Patterns of names of matrices that AdamW trains: of embeddings and heads.

    Returns:
        ``muon`` and ``adamw``, as far as they have parameters.
    """
    matrices: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for group in as_groups(parameters):
        pairs: list[Named] = group["params"]
        hidden = {name for name, each in pairs if is_hidden(name, each, exclude)}
        matrices.append({**group, "params": [pair for pair in pairs if pair[0] in hidden]})
        others.append({**group, "params": [pair for pair in pairs if pair[0] not in hidden]})
    made: dict[str, torch.optim.Optimizer] = {}
    if matrices := [group for group in matrices if group["params"]]:
        made["muon"] = torch.optim.Muon(
            matrices,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
    if others := [group for group in others if group["params"]]:
        made["adamw"] = adamw(others, lr, weight_decay, betas)
    return made


def is_hidden(
    name: str, parameter: torch.nn.Parameter, exclude: Sequence[str] = NOT_HIDDEN
) -> bool:
    """Whether ``muon`` trains this parameter by Muon."""
    return (
        parameter.requires_grad
        and parameter.ndim == _MATRIX_DIMS
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    )
