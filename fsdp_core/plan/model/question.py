"""What a search for a layout is asked: where, what is trained, what is settled, what is open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal, get_args

from fsdp_core.errors import PlanError
from fsdp_core.plan.model.optimizer import OptimizerFacts
from fsdp_core.plan.model.profile import Conditions
from fsdp_core.plan.model.sharding import (
    MeshPlan,
    Precision,
    ShardingPlan,
    SharedMemory,
    TensorParallelPlan,
    UnitPlan,
)
from fsdp_core.plan.model.step_time import NodeFacts

UnitOption = Literal["reshard_after_forward", "recompute", "prefetch", "offload"]

_WIDEST_SPLIT = 8


@dataclass(frozen=True)
class Seats:
    """Where the ranks will run.

    Attributes:
        ranks: All of them.
        ranks_per_node: Of one node; the last node may have fewer.
        memory: Bytes that a rank may hold on its device.
        node: What a node was measured to do; None: layouts are compared by what they compute
            again and by bytes, not by seconds.
    """

    ranks: int
    ranks_per_node: int
    memory: int
    node: NodeFacts | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node", "memory"):
            if getattr(self, name) < 1:
                raise PlanError(f"seats.{name} is {getattr(self, name)}; it must be at least 1.")


@dataclass(frozen=True)
class Workload:
    """What is trained, as far as a layout depends on it.

    Attributes:
        global_batch: Samples of a step over all ranks.
        optimizer: What it keeps and needs.
        micro_batch: Samples of one forward; None: to be found.
        param_dtype: Of computation; None: each parameter's own.
        reduce_dtype: Of gradients on their way; None: that of computation.
        output_dtype: To which the root's outputs are cast.
        shared_memory: See `ShardingPlan`.
        common_share: What divides a rank's share of the batch on every number of ranks that the
            job may have: a micro-batch divides it, too, or is the whole share. None: there is one.
    """

    global_batch: int
    optimizer: OptimizerFacts
    micro_batch: int | None = None
    param_dtype: Precision | None = None
    reduce_dtype: Precision | None = None
    output_dtype: Precision | None = None
    shared_memory: SharedMemory = "none"
    common_share: int | None = None

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise PlanError(f"global_batch is {self.global_batch}; it must be at least 1.")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise PlanError(f"micro_batch is {self.micro_batch}; it must be at least 1.")


@dataclass(frozen=True)
class FixedUnit:
    """A unit that the user named.

    Attributes:
        plan: As the user gave it.
        free: Options that the user said nothing of; what `plan` says of these is ignored. Of
            the root only `offload` is searched.
    """

    plan: UnitPlan
    free: tuple[UnitOption, ...] = ()


@dataclass(frozen=True)
class Fixed:
    """What is settled before the search, and kept as it is.

    Attributes:
        mesh: All axes; None: searched.
        units: All units; None: searched.
        tensor_parallel: What is split; then tp is above 1. An empty one forbids tp; None leaves
            it open.
    """

    mesh: MeshPlan | None = None
    units: tuple[FixedUnit, ...] | None = None
    tensor_parallel: tuple[TensorParallelPlan, ...] | None = None


@dataclass(frozen=True)
class LayoutQuestion:
    """All that a search needs besides a profile.

    Attributes:
        seats: Where.
        workload: What.
        fixed: What the user settled.
        splits: What could be split over tp, if the user settles nothing; empty: not known, so
            that tp stays 1.
        groups: Whether slices may be kept for some ranks of dp_shard; not where its size changes.
        default: Plan and micro-batch by which it would run without a search; taken unless another
            is clearly faster.
    """

    seats: Seats
    workload: Workload
    fixed: Fixed = Fixed()
    splits: tuple[TensorParallelPlan, ...] = ()
    groups: bool = True
    default: tuple[ShardingPlan, int] | None = None

    @property
    def tensor_parallel(self) -> tuple[TensorParallelPlan, ...]:
        """What is split where tp is above 1."""
        settled = self.fixed.tensor_parallel
        return self.splits if settled is None else settled


def fixed_by(plan: ShardingPlan, said: Mapping[str, object]) -> Fixed:
    """What a plan settles that was given in part.

    Args:
        plan: As it was read; what was left out has any value.
        said: The document it was read from: only keys that are there are settled. `null` for an
            option of a unit leaves that option open.
    """
    units = None
    given = said.get("units")
    if isinstance(given, Sequence) and not isinstance(given, str):
        units = tuple(
            FixedUnit(unit, _open(document))
            for unit, document in zip(plan.units, given, strict=True)
        )
    return Fixed(
        mesh=plan.mesh if "mesh" in said else None,
        units=units,
        tensor_parallel=plan.tensor_parallel if "tensor_parallel" in said else None,
    )


def _open(document: object) -> tuple[UnitOption, ...]:
    said = document if isinstance(document, Mapping) else {}
    return tuple(option for option in get_args(UnitOption) if said.get(option) is None)


def tp_sizes(question: LayoutQuestion) -> tuple[int, ...]:
    """Sizes of tp among which to search: none, or as wide as a node's ranks allow, at most 8.

    Two alone, since each needs traces of its own.
    """
    mesh, seats = question.fixed.mesh, question.seats
    if mesh is not None:
        return (mesh.tp,)
    common = gcd(seats.ranks, min(seats.ranks_per_node, seats.ranks))
    widest = max(size for size in range(1, _WIDEST_SPLIT + 1) if common % size == 0)
    if not question.tensor_parallel or widest == 1:
        return (1,)
    return (widest,) if question.fixed.tensor_parallel else (1, widest)


def conditions_for(question: LayoutQuestion) -> tuple[Conditions, ...]:
    """What a probe must measure so that a search can answer; at most four, in a fixed order.

    A user's units that differ in `param_dtype` add to that.
    """
    found: dict[Conditions, None] = {}
    for tp in tp_sizes(question):
        for dtype, recompute in _ways(question):
            found[Conditions(dtype, question.workload.output_dtype, recompute, tp)] = None
    return tuple(found)


def _ways(question: LayoutQuestion) -> Iterator[tuple[Precision | None, bool]]:
    general, units = question.workload.param_dtype, question.fixed.units
    if units is None or all(unit.plan.modules != ("",) for unit in units):
        yield general, False  # the root
    if units is None:
        yield general, True
        return
    for unit in units:
        dtype = unit.plan.param_dtype or general
        if "recompute" not in unit.free or unit.plan.modules == ("",):
            yield dtype, unit.plan.recompute
        else:
            yield dtype, False
            yield dtype, True
