# ruff: noqa: SLF001 - private names are what this module is for
"""The door to the inside of PyTorch's pipeline schedules.

It is no part of the package's names: `torch.distributed.pipelining` imports PyTorch's own FSDP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from torch.distributed.pipelining.schedules import (
    RESHARD,
    UNSHARD,
    _Action,
    _PipelineContext,
    _PipelineScheduleRuntime,
)

if TYPE_CHECKING:
    from torch import nn

Action = _Action
PipelineContext = _PipelineContext
PipelineScheduleRuntime = _PipelineScheduleRuntime

__all__ = [
    "RESHARD",
    "UNSHARD",
    "Action",
    "PipelineContext",
    "PipelineScheduleRuntime",
    "modules_at",
]


def modules_at(action: Action, context: PipelineContext) -> Iterator[nn.Module]:
    """The modules of the stages that an action is about."""
    # The declared type is a base class that has no stages of its own.
    schedule = cast("PipelineScheduleRuntime", context.schedule_ref)
    for stage in schedule._stages:
        if stage.stage_index == action.stage_index:
            yield stage.submod
