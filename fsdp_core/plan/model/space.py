"""The layouts among which a search chooses, and the plan that each of them means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

from fsdp_core.plan.model.estimating import Training
from fsdp_core.plan.model.profile import Conditions, ModelProfile, Segment
from fsdp_core.plan.model.question import FixedUnit, LayoutQuestion, UnitOption
from fsdp_core.plan.model.sharding import (
    ANY,
    MeshPlan,
    ShardingPlan,
    UnitPlan,
    within_nodes,
)

Units = Literal["settled", "blocks", "apart", "one"]

# A batch of 735 134 400 is divided by 1 344 sizes. A bound of each layout takes time with the model's
# segments and parameters; all of them together are to take seconds.
_MOST_LAYOUTS = 4_096
_MOST_FOLLOWED = 2_000_000
_LEAST_LAYOUTS = 64
_LEAST_MICRO_BATCHES = 4
# A module that weighs less than this part of a block stays with the root.
_SMALL = 4
# Of what operators take within themselves a measurement finds fewer.
_FEW_LINES = 16
_ROOT = UnitPlan(("",))


@dataclass(frozen=True)
class Layout:
    """One choice for all that is open.

    Attributes:
        mesh: Axes.
        units: As the user settled them; each repeated block; these, with embedding and head
            apart from the root; or one for all.
        reshard: Of units where that is open: yes, no, or to groups of so many ranks.
        recompute: Of blocks and units where that is open.
        prefetch: The same.
        offload: The same.
        micro_batch: Samples of one forward.
    """

    mesh: MeshPlan
    units: Units
    reshard: bool | int
    recompute: bool
    prefetch: int | None
    offload: bool
    micro_batch: int

    @property
    def complexity(self) -> tuple[int, ...]:
        """Orders layouts that are equal otherwise: the smaller, the closer to what is usual."""
        return (
            sum(size > 1 for size in (self.mesh.dp_replicate, self.mesh.tp)),
            {"settled": 0, "blocks": 0, "one": 1, "apart": 2}[self.units],
            0 if self.reshard is True else 1 if self.reshard is False else 2,
            int(self.recompute),
            -1 if self.prefetch is None else self.prefetch,
            -self.micro_batch,
            -self.mesh.dp_shard,
            self.mesh.tp,
        )


class LayoutSpace:
    """All layouts that a question leaves open for a model."""

    def __init__(self, profile: ModelProfile, question: LayoutQuestion) -> None:
        self.profile = profile
        self.question = question
        self._known = {trace.conditions for trace in profile.traces}

    @cached_property
    def meshes(self) -> tuple[MeshPlan, ...]:
        """Those that use all ranks and divide the batch; tp within a node, if it is open.

        A settled one is kept as it is, unless ranks or batch do not divide by it.
        """
        seats, settled = self.question.seats, self.question.fixed.mesh
        if settled is not None:
            fits = settled.ranks == seats.ranks and self._divides(settled)
            return (settled,) if fits else ()
        found = []
        for tp in self.tp_sizes:
            data = seats.ranks // tp
            found += [
                MeshPlan(dp_replicate=data // shards, dp_shard=shards, tp=tp)
                for shards in _divisors(data)
            ]
        return tuple(mesh for mesh in found if self._divides(mesh))

    @cached_property
    def tp_sizes(self) -> tuple[int, ...]:
        """Sizes of tp for which there are traces, each within a node."""
        seats = self.question.seats
        together = min(seats.ranks_per_node, seats.ranks)
        sizes = sorted({each.tp for each in self._known})
        if not self.question.tensor_parallel:
            sizes = sizes[:1] if sizes[:1] == [1] else []
        elif self.question.fixed.tensor_parallel:
            sizes = [size for size in sizes if size > 1]
        return tuple(size for size in sizes if not together % size and not seats.ranks % size)

    def _divides(self, mesh: MeshPlan) -> bool:
        share, rest = divmod(self.question.workload.global_batch, mesh.data_ranks)
        wanted = self.question.workload.micro_batch
        return not rest and (wanted is None or not share % wanted)

    def micro_batches(self, mesh: MeshPlan) -> tuple[int, ...]:
        """Those that divide a rank's share of the batch, the largest first."""
        workload = self.question.workload
        if workload.micro_batch is not None:
            return (workload.micro_batch,)
        share = workload.global_batch // mesh.data_ranks
        common = workload.common_share or share
        least = min(self.profile.smallest, share)
        return tuple(
            m for m in _divisors(share)[::-1] if m == share or (common % m == 0 and m >= least)
        )

    @cached_property
    def unit_kinds(self) -> tuple[Units, ...]:
        """Ways to divide the model that differ."""
        if self.question.fixed.units is not None:
            return ("settled",)
        kinds: list[Units] = []
        if self._blocks:
            kinds.append("blocks")
        if self._apart:
            kinds.append("apart")
        return (*kinds, "one")

    def reshards(self, mesh: MeshPlan, units: Units) -> tuple[bool | int, ...]:
        """Ways to go on after forward."""
        if not self.leaves_open("reshard_after_forward", units):
            return (True,)
        # Within one rank there is nothing to be saved by keeping what is whole.
        if mesh.dp_shard == 1:
            return (True,)
        group = self.question.seats.ranks_per_node // mesh.tp
        in_node = 1 < group < mesh.dp_shard and mesh.dp_shard % group == 0
        return (True, False, group) if in_node and self.question.groups else (True, False)

    def recomputes(self, mesh: MeshPlan, units: Units) -> tuple[bool, ...]:
        """Whether to recompute, as far as a trace tells what that does."""
        open_ = self.leaves_open("recompute", units)
        return tuple(
            again
            for again in ((False, True) if open_ else (False,))
            if self._is_known(mesh, units, recompute=again)
        )

    @property
    def offloads(self) -> bool:
        """Whether something could be moved to the host."""
        fixed = self.question.fixed.units
        is_open = fixed is None or any("offload" in unit.free for unit in fixed)
        return is_open and self.profile.device_type != "cpu"

    def layouts(self, *, offload: bool = False) -> Iterator[Layout]:
        """All that may be best.

        Deeper prefetching is not among them: an estimate sees what it costs, and not what it
        gains, so that it never wins. Nor are all micro-batches of a batch that very many sizes divide.
        """
        for mesh, units, recompute, reshard in self._ways:
            for micro_batch in self._some_micro_batches(mesh):
                yield Layout(mesh, units, reshard, recompute, None, offload, micro_batch)

    @property
    def is_whole(self) -> bool:
        """Whether `layouts` has all micro-batches."""
        return all(
            len(self._some_micro_batches(mesh)) == len(self.micro_batches(mesh))
            for mesh in self.meshes
        )

    @cached_property
    def _ways(self) -> tuple[tuple[MeshPlan, Units, bool, bool | int], ...]:
        """Layouts but for their micro-batch."""
        return tuple(
            (mesh, units, recompute, reshard)
            for mesh in self.meshes
            for units in self.unit_kinds
            for recompute in self.recomputes(mesh, units)
            for reshard in self.reshards(mesh, units)
        )

    @cached_property
    def _most_layouts(self) -> int:
        """Fewer of a model with thousands of modules, of which each takes longer."""
        return max(min(_MOST_FOLLOWED // self.weight, _MOST_LAYOUTS), _LEAST_LAYOUTS)

    @cached_property
    def weight(self) -> int:
        """With what the time of an estimate grows: parameters, and a step's segments and their lines."""
        steps = (sum(map(_weight, trace.segments)) for trace in self.profile.traces)
        return len(self.profile.parameters) + max(steps, default=0) + 1

    def _some_micro_batches(self, mesh: MeshPlan) -> tuple[int, ...]:
        """So many that a search ends: evenly chosen, the largest, the smallest and the default's kept."""
        every = self.micro_batches(mesh)
        most = max(self._most_layouts // max(len(self._ways), 1), _LEAST_MICRO_BATCHES)
        if len(every) <= most:
            return every
        last = len(every) - 1
        kept = {every[round(place * last / (most - 1))] for place in range(most)}
        if self.question.default is not None:
            kept |= {self.question.default[1]}
        return tuple(each for each in every if each in kept)

    # -- What a layout means

    def plan(self, layout: Layout) -> ShardingPlan:
        """The plan of a layout."""
        workload = self.question.workload
        plan = ShardingPlan(
            layout.mesh,
            self._units(layout),
            param_dtype=workload.param_dtype,
            reduce_dtype=workload.reduce_dtype,
            output_dtype=workload.output_dtype,
            tensor_parallel=self.question.tensor_parallel if layout.mesh.tp > 1 else (),
            shared_memory=workload.shared_memory,
        )
        return within_nodes(plan, self.question.seats.ranks_per_node)

    def training(self, layout: Layout) -> Training:
        """Sizes of a layout's step."""
        workload = self.question.workload
        share = workload.global_batch // layout.mesh.data_ranks
        return Training(layout.micro_batch, share // layout.micro_batch, workload.optimizer)

    def root_conditions(self, layout: Layout) -> Conditions:
        """Under which the root runs."""
        plan = self.plan(layout)
        return _conditions(plan, next((u for u in plan.units if u.modules == ("",)), _ROOT))

    def _units(self, layout: Layout) -> tuple[UnitPlan, ...]:
        if layout.units == "settled":
            return tuple(_filled(unit, layout) for unit in self.question.fixed.units or ())
        root = (UnitPlan(("",), offload=True),) if layout.offload else ()
        if layout.units == "one":
            return root
        # As few words as possible: what is left out means yes.
        ways = UnitPlan(
            ("",),
            reshard_after_forward=None if layout.reshard is True else layout.reshard,
            offload=layout.offload,
            prefetch=layout.prefetch,
        )
        apart = self._apart if layout.units == "apart" else ()
        return (
            *(replace(ways, modules=(p,), recompute=layout.recompute) for p in self._blocks),
            *(replace(ways, modules=names) for names in apart),
            *root,
        )

    @cached_property
    def _blocks(self) -> tuple[str, ...]:
        """Repeated blocks, by a pattern where it means them alone."""
        names = [unit.module for unit in self.profile.units if unit.kind == "block"]
        blocks = set(names)
        # Parents with a child that is no block: their pattern would mean that one, too.
        mixed = {_parent(each) for each in self.profile.modules if each and each not in blocks}
        found: dict[str, None] = {}
        for name in names:
            parent = _parent(name)
            pattern = f"{parent}.{ANY}" if parent else ANY
            found[name if parent in mixed else pattern] = None
        return tuple(found)

    @cached_property
    def _apart(self) -> tuple[tuple[str, ...], ...]:
        """Embedding, head and other large modules; what is small beside a head goes with it."""
        weights = self._weights
        blocks = [unit.module for unit in self.profile.units if unit.kind == "block"]
        least = min((weights[name] for name in blocks or weights), default=0) // _SMALL
        found: list[tuple[str, ...]] = []
        before: list[str] = []
        for unit in self.profile.units:
            if unit.kind == "block":
                before = []
            elif weights[unit.module] >= max(least, 1):
                found.append((*before, unit.module) if unit.kind == "head" else (unit.module,))
                before = []
            else:
                before.append(unit.module)
        return tuple(found)

    @cached_property
    def _weights(self) -> dict[str, int]:
        """Bytes of the parameters within each module that suits as a unit."""
        found = dict.fromkeys((unit.module for unit in self.profile.units), 0)
        for each in self.profile.parameters:
            module = _parent(each.name)
            while module:
                if module in found:
                    found[module] += prod(each.shape) * each.itemsize
                module = _parent(module)
        return found

    def leaves_open(self, option: UnitOption, units: Units) -> bool:
        """Whether units besides the root may differ in an option."""
        if units == "one":
            return False
        if units != "settled":
            return True
        fixed = self.question.fixed.units or ()
        return any(option in unit.free and unit.plan.modules != ("",) for unit in fixed)

    def _is_known(self, mesh: MeshPlan, units: Units, *, recompute: bool) -> bool:
        """Whether the profile has all traces; no other option needs one."""
        layout = Layout(mesh, units, True, recompute, None, False, 1)  # noqa: FBT003 - fields
        plan = self.plan(layout)
        needed = {_conditions(plan, unit) for unit in plan.units}
        return {*needed, self.root_conditions(layout)} <= self._known


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _conditions(plan: ShardingPlan, unit: UnitPlan) -> Conditions:
    dtype = unit.param_dtype or plan.param_dtype
    return Conditions(dtype, plan.output_dtype, unit.recompute, plan.mesh.tp)


def _filled(unit: FixedUnit, layout: Layout) -> UnitPlan:
    plan = unit.plan
    is_root = plan.modules == ("",)
    if "offload" in unit.free:
        plan = replace(plan, offload=layout.offload)
    if is_root:
        return plan
    if "reshard_after_forward" in unit.free:
        plan = replace(
            plan, reshard_after_forward=None if layout.reshard is True else layout.reshard
        )
    if "recompute" in unit.free:
        plan = replace(plan, recompute=layout.recompute)
    if "prefetch" in unit.free:
        plan = replace(plan, prefetch=layout.prefetch)
    return plan


def _divisors(number: int) -> tuple[int, ...]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


def _weight(segment: Segment) -> int:
    within = 0 if segment.within is None else max(len(segment.within.lines) - _FEW_LINES, 0)
    return 1 + len(segment.peak.lines) + len(segment.change.table) + within
