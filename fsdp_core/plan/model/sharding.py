"""A sharding plan as plain, versioned data. Imports no torch.

The dataclasses hold only JSON's types (tuples become lists), so pydantic's TypeAdapter and
``dataclasses.asdict`` can carry them over any wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from fsdp_core.errors import PlanError

PLAN_VERSION = 1

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
TensorParallelStyle = Literal["colwise", "rowwise", "colwise_gather"]
SharedMemory = Literal["auto", "none", "copy", "storage"]

ANY = "*"


@dataclass(frozen=True)
class MeshPlan:
    """Ranks along each mesh axis, each at least 1.

    Attributes:
        dp_replicate: Copies of the sharded model.
        dp_shard: Ranks that share one copy's parameters.
        tp: Ranks that share one matrix multiplication.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp_replicate", "dp_shard", "tp"):
            if getattr(self, axis) < 1:
                raise PlanError(f"mesh.{axis} is {getattr(self, axis)}; it must be at least 1.")

    @property
    def ranks(self) -> int:
        """Ranks of the whole mesh."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks that train on different data: those of one tp group see the same."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True)
class ShardDim:
    """A parameter of a unit and the dim along which it is sharded.

    Attributes:
        parameter: Its name below the unit's module, segments joined by dots; a segment may be
            ``*``.
        dim: From 0; negative counts from the end.
    """

    parameter: str
    dim: int


@dataclass(frozen=True)
class TensorParallelPlan:
    """Linear and embedding modules whose weights are split over the `tp` axis.

    Attributes:
        modules: Patterns as of a unit; each match is split by itself.
        style: ``colwise`` splits what comes out: each rank computes its part of the outputs from
            whole inputs. ``rowwise`` splits what goes in: each rank computes a summand of whole
            outputs from its part of the inputs. ``colwise_gather`` is ``colwise``, with the
            outputs gathered afterwards. Source: Shoeybi et al. 2019 (arXiv:1909.08053).
    """

    modules: tuple[str, ...]
    style: TensorParallelStyle


@dataclass(frozen=True)
class UnitPlan:
    """Modules that become units.

    A pattern is a module's name from the root, segments joined by dots, in which a whole
    segment may be ``*`` for any one name. ``"blocks.*"`` is each direct child of ``blocks``,
    ``"*"`` each direct child of the root, ``""`` the root itself.

    A pattern with ``*`` stands alone and makes *each* match a unit. Names without it may stand
    together and make *one* unit of all.

    Attributes:
        modules: Patterns, at least one.
        reshard_after_forward: None means yes, except for the root. A number reshards to groups
            of so many ranks; it divides `dp_shard`.
        param_dtype: Of computation and gathers; None means the plan's.
        reduce_dtype: Of gradient reduction; None means the plan's.
        offload: Whether slices, gradients and optimizer state live in host memory.
        shard_dims: Parameters that are sharded along another dim than 0.
        prefetch: How many units after it are gathered while it computes, and how many before
            it in backward. None leaves the order to the engine.
        recompute: Whether its activations are computed again in backward instead of being kept.
        compile: Whether its forward goes through `torch.compile`.
    """

    modules: tuple[str, ...]
    reshard_after_forward: bool | int | None = None
    param_dtype: Precision | None = None
    reduce_dtype: Precision | None = None
    offload: bool = False
    shard_dims: tuple[ShardDim, ...] = ()
    prefetch: int | None = None
    recompute: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        if self.prefetch is not None and self.prefetch < 0:
            raise PlanError(f"prefetch is {self.prefetch}; it counts units, so it is 0 or more.")
        if not self.modules:
            raise PlanError("A unit needs at least one module pattern.")
        if len(self.modules) > 1 and any(is_pattern(name) for name in self.modules):
            raise PlanError(
                f"A pattern with {ANY!r} makes one unit per match, so it stands alone; "
                f"split {list(self.modules)} into several units."
            )
        if len(self.modules) > 1 and "" in self.modules:
            raise PlanError("The root ('') is a unit of its own.")


@dataclass(frozen=True)
class ShardingPlan:
    """How a model is sharded.

    The root is always a unit, the last one, whether or not `units` names it; naming it ("")
    sets its options. Units may be given in any order; they are applied bottom-up.

    Attributes:
        mesh: Ranks per axis.
        units: Modules that communicate together, besides the root.
        param_dtype: Of computation and gathers; None means each parameter's own.
        reduce_dtype: Of gradient reduction; None means `param_dtype`.
        output_dtype: To which the root's floating-point outputs are cast; None leaves them.
        tensor_parallel: What is split over the `tp` axis; everything else is whole on each of
            its ranks.
        shared_memory: How CPU ranks of one host exchange what `dp_shard` gathers and reduces.
            ``none``: through their process group. ``copy``: through memory that all map, from which
            each copies whole parameters. ``storage``: the same, and all compute with one copy of
            the parameters. ``auto``: ``storage`` for units of which nothing is cast and whose forward
            writes no parameter, as far as that is known; else ``copy``. On accelerators it changes
            nothing.
        version: Of this schema.
    """

    mesh: MeshPlan
    units: tuple[UnitPlan, ...] = field(default=())
    param_dtype: Precision | None = None
    reduce_dtype: Precision | None = None
    output_dtype: Precision | None = None
    tensor_parallel: tuple[TensorParallelPlan, ...] = ()
    shared_memory: SharedMemory = "none"
    version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        if self.version != PLAN_VERSION:
            raise PlanError(
                f"This plan has version {self.version}, and this engine reads {PLAN_VERSION}."
            )


def shared_memory_of_unit(
    plan: ShardingPlan, unit: UnitPlan, device_type: str, *, is_written: bool = False
) -> Literal["none", "copy", "storage"]:
    """How the ranks of one host exchange what a unit gathers and reduces.

    Args:
        plan: For any number of ranks.
        unit: Of the plan.
        device_type: On which it computes.
        is_written: Whether its forward writes a parameter, which ranks must not do to a common copy.
    """
    keeps_part = unit.reshard_after_forward not in (None, True, False, 1, plan.mesh.dp_shard)
    if device_type != "cpu" or plan.mesh.dp_shard == 1 or keeps_part:
        return "none"
    if plan.shared_memory != "auto":
        return plan.shared_memory
    is_cast = (unit.param_dtype or plan.param_dtype) is not None
    return "copy" if is_cast or is_written else "storage"


def within_nodes(plan: ShardingPlan, ranks_per_node: int) -> ShardingPlan:
    """The plan as it works out: ranks of several nodes share no memory, whatever it says.

    Args:
        plan: For any number of ranks.
        ranks_per_node: That sit on one node.
    """
    spans_nodes = plan.mesh.tp * plan.mesh.dp_shard > ranks_per_node
    return replace(plan, shared_memory="none") if spans_nodes else plan


def is_pattern(name: str) -> bool:
    """Whether `name` has a ``*`` segment."""
    return ANY in name.split(".")


def matches(pattern: str, name: str) -> bool:
    """Whether module `name` is meant by `pattern`; segments are compared one by one."""
    wanted, given = pattern.split("."), name.split(".")
    if name == "" or pattern == "":
        return name == pattern
    return len(wanted) == len(given) and all(
        w in (ANY, g) for w, g in zip(wanted, given, strict=True)
    )
