"""Plans, profiles and estimates as plain data and integer arithmetic. Imports no torch.

`sharding`: what a plan says. `profile`: what was measured of a model. `estimate`: what a plan will
cost a rank in memory, traffic and time. `question`, `search`, `answer`: which layout to take.
"""

from __future__ import annotations

from fsdp_core.plan.model.answer import (
    Advice,
    Alternative,
    Candidate,
    Change,
    LayoutAnswer,
    RankedBy,
)
from fsdp_core.plan.model.estimate import Estimate, Training, estimate
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
