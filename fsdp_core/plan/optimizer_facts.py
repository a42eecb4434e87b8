"""What an optimizer keeps and needs, seen by letting it step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from fsdp_core.plan.live_storage import LiveStorage
from fsdp_core.plan.model import OptimizerFacts

_NUMEL, _MANY = 4096, 3
_BYTES = 4 * _NUMEL


def optimizer_facts(
    make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer], device_type: str = "cpu"
) -> OptimizerFacts:
    """Steps over one, and over several small parameters, and compares.

    Args:
        make: Builds it over parameters.
        device_type: Where the parameters are.
    """
    state, temporary_of_one = _second_step(make, 1, device_type)
    states, temporary_of_many = _second_step(make, _MANY, device_type)
    of_all = max(0, temporary_of_many - temporary_of_one) // ((_MANY - 1) * _BYTES)
    per_parameter = (states - state) // (_MANY - 1)
    return OptimizerFacts(
        state_copies=per_parameter // _BYTES,
        state_bytes=per_parameter % _BYTES,
        step_copies_of_all=of_all,
        step_copies_of_largest=max(0, temporary_of_one // _BYTES - of_all),
    )


def _second_step(
    make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer], count: int, device_type: str
) -> tuple[int, int]:
    """Bytes of state, and temporary bytes of a step that finds its state."""
    with LiveStorage() as live:
        parameters = [nn.Parameter(torch.ones(_NUMEL, device=device_type)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        before = live.live
        optimizer = make(parameters)
        optimizer.step()
        held = live.live
        live.forget_peak()
        optimizer.step()
        return held - before, live.peak - held
