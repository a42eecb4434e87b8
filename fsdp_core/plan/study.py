"""The model that is profiled: how it is built, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_core.plan.model import TensorParallelPlan


@dataclass(frozen=True)
class ModelUnderStudy:
    """How to build a model and to run it.

    Attributes:
        make: Builds it.
        loss: Runs it on a micro-batch of so many samples, which it makes on the default device,
            and returns a scalar.
        device_type: Where the job will run.
        tensor_parallel: What is split over the `tp` axis, where there is one.
        built_whole: Whether ranks build it with values, and not on the meta device.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    device_type: str = "cpu"
    tensor_parallel: tuple[TensorParallelPlan, ...] = ()
    built_whole: bool = False
