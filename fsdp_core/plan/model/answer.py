"""What a search for a layout answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp_core.plan.model.estimating import Estimate
from fsdp_core.plan.model.sharding import ShardingPlan

RankedBy = Literal["seconds", "recomputation and bytes"]
Change = Literal[
    "mesh",
    "tensor_parallel",
    "units",
    "micro_batch",
    "recompute",
    "offload",
    "param_dtype",
    "ranks",
    "global_batch",
]


@dataclass(frozen=True)
class Candidate:
    """A layout, and what it was estimated to cost.

    Attributes:
        plan: How the model is sharded.
        micro_batch: Samples of one forward.
        accumulation: Forwards of a step.
        estimate: As `estimate` gives it for these.
        fits: Whether its peak is within the ranks' memory.
    """

    plan: ShardingPlan
    micro_batch: int
    accumulation: int
    estimate: Estimate
    fits: bool


@dataclass(frozen=True)
class Alternative:
    """A candidate that was not chosen.

    Attributes:
        candidate: This.
        why: The reason, for people.
    """

    candidate: Candidate
    why: str


@dataclass(frozen=True)
class Advice:
    """Something that would make the model fit, computed like every candidate.

    Attributes:
        change: What would have to change.
        text: For people, with figures.
        candidate: The fastest that then fits; None where only a figure of the job is at fault.
    """

    change: Change
    text: str
    candidate: Candidate | None = None


@dataclass(frozen=True)
class LayoutAnswer:
    """The layout to train with, and what speaks against the others.

    Attributes:
        feasible: Whether a candidate fits.
        best: The fastest that fits; if none does, the one that needs least; None if there is no
            candidate at all.
        alternatives: In the order of predicted time, those that do not fit among them.
        advice: What would make it fit, if nothing does.
        reasons: Why nothing fits; empty if something does.
        ranked_by: What was compared. Without a node's facts there are no seconds.
        considered: Layouts between which was chosen.
        estimated: How many of these were followed step by step; bounds ruled out the others.
        exhaustive: Whether bounds ruled out *all* others. Else the search ended early, and a
            better layout may exist.
        by_default: Whether the best is the default, than which no other is clearly faster.
    """

    feasible: bool
    best: Candidate | None
    alternatives: tuple[Alternative, ...]
    advice: tuple[Advice, ...]
    reasons: tuple[str, ...]
    ranked_by: RankedBy
    considered: int
    estimated: int
    exhaustive: bool
    by_default: bool = False
