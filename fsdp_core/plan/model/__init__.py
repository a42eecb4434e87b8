"""Plans, profiles and estimates as plain data and integer arithmetic. Imports no torch.

`sharding`: what a plan says. `profile`: what was measured of a model. `estimating`: what a plan will
cost a rank in memory, traffic and time. `question`, `search`, `answer`: which layout to take.
The names below are loaded on first use (PEP 562): who only reads a plan, as a client does, does not wait for the search.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_core.plan.model.answer import (
        Advice,
        Alternative,
        Candidate,
        Change,
        LayoutAnswer,
        RankedBy,
    )
    from fsdp_core.plan.model.estimating import Estimate, Training, estimate
    from fsdp_core.plan.model.growth import Growth, Highest
    from fsdp_core.plan.model.ledger import Memory, MemoryKind, Peak
    from fsdp_core.plan.model.optimizer import ADAMW_FUSED, SGD, MatrixState, OptimizerFacts
    from fsdp_core.plan.model.profile import (
        PROFILE_VERSION,
        BufferFacts,
        Conditions,
        ModelProfile,
        ParameterFacts,
        Segment,
        Trace,
        UnitFacts,
    )
    from fsdp_core.plan.model.question import (
        Fixed,
        FixedUnit,
        LayoutQuestion,
        Seats,
        UnitOption,
        Workload,
        conditions_for,
        fixed_by,
        tp_sizes,
    )
    from fsdp_core.plan.model.resolve import ResolvedUnit, matching, resolve_units
    from fsdp_core.plan.model.search import search_layout
    from fsdp_core.plan.model.sharding import (
        ANY,
        PLAN_VERSION,
        MeshPlan,
        Precision,
        ShardDim,
        ShardingPlan,
        SharedMemory,
        TensorParallelPlan,
        TensorParallelStyle,
        UnitPlan,
        is_pattern,
        matches,
        shared_memory_of_unit,
        within_nodes,
    )
    from fsdp_core.plan.model.step_time import Exchange, NodeFacts, PassTimes, StepTime

__all__ = [
    "ADAMW_FUSED",
    "ANY",
    "PLAN_VERSION",
    "PROFILE_VERSION",
    "SGD",
    "Advice",
    "Alternative",
    "BufferFacts",
    "Candidate",
    "Change",
    "Conditions",
    "Estimate",
    "Exchange",
    "Fixed",
    "FixedUnit",
    "Growth",
    "Highest",
    "LayoutAnswer",
    "LayoutQuestion",
    "MatrixState",
    "Memory",
    "MemoryKind",
    "MeshPlan",
    "ModelProfile",
    "NodeFacts",
    "OptimizerFacts",
    "ParameterFacts",
    "PassTimes",
    "Peak",
    "Precision",
    "RankedBy",
    "ResolvedUnit",
    "Seats",
    "Segment",
    "ShardDim",
    "ShardingPlan",
    "SharedMemory",
    "StepTime",
    "TensorParallelPlan",
    "TensorParallelStyle",
    "Trace",
    "Training",
    "UnitFacts",
    "UnitOption",
    "UnitPlan",
    "Workload",
    "conditions_for",
    "estimate",
    "fixed_by",
    "is_pattern",
    "matches",
    "matching",
    "resolve_units",
    "search_layout",
    "shared_memory_of_unit",
    "tp_sizes",
    "within_nodes",
]

_OWNERS = (
    "sharding",
    "step_time",
    "growth",
    "optimizer",
    "profile",
    "resolve",
    "ledger",
    "estimating",
    "question",
    "answer",
    "search",
)
"""Modules that own a public name; those that import others of them come later."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    owners = (importlib.import_module(f"{__name__}.{owner}") for owner in _OWNERS)
    value: object = next(getattr(owner, name) for owner in owners if hasattr(owner, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
