"""Bounds below what an estimate would say, at a fraction of its price.

A search looks at layouts in the order of these bounds and leaves out what cannot be better, so
that few layouts are followed step by step. A bound above its estimate would lose the best layout;
`tests/plan/test_search.py` compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

from fsdp_core.layout import Slicing
from fsdp_core.plan.model.estimating import UnitStep, flops_of, steps_of, work_of
from fsdp_core.plan.model.score import Score, Spent, score
from fsdp_core.plan.model.sharding import (
    MeshPlan,
    ShardingPlan,
    UnitPlan,
    shared_memory_of_unit,
)
from fsdp_core.plan.model.shares import UnitShare, shares_of
from fsdp_core.plan.model.space import Layout, LayoutSpace
from fsdp_core.plan.model.step_time import step_time
from fsdp_core.plan.model.traffic import NOTHING, Kind, Moved, SharedWay, Through


@dataclass(frozen=True)
class _Kind:
    """Parameters that are cut alike.

    Attributes:
        modules: Of the plan's unit.
        whole: Uncut.
        itemsize: Bytes of an element at rest.
        compute: In computation.
        reduce: In a reduction.
        is_trained: Whether the optimizer has it.
        has_grad: Whether backward reaches it.
        is_gathered: Whether backward reaches its unit.
        is_written: Whether forward writes a parameter of its unit.
        can_be_one_copy: Whether ranks of a host may compute with the same memory of it.
    """

    modules: tuple[str, ...]
    whole: Slicing
    itemsize: int
    compute: int
    reduce: int
    is_trained: bool
    has_grad: bool
    is_gathered: bool
    is_written: bool
    can_be_one_copy: bool


@dataclass(frozen=True)
class _Held:
    """Bytes of one rank: between steps, in the optimizer's, whole gradients, and updated."""

    resting: int
    stepping: int
    kept: int
    updated: int


Divided = dict[object, "_Model"]
"""A model as each kind of layout divides it, which questions about one profile can share."""


class Floors:
    """The bounds of a search's layouts."""

    def __init__(self, space: LayoutSpace, divided: Divided | None = None) -> None:
        """Bounds of layouts of one space.

        Args:
            space: Of the layouts.
            divided: Is filled; for another space of the same profile.
        """
        self._space = space
        self._divided: Divided = {} if divided is None else divided
        self._resting: dict[tuple[Layout, int], _Held] = {}
        buffers = space.profile.buffers
        self._buffers = sum(space.profile.rounded(each.nbytes) for each in buffers)

    def memory(self, layout: Layout) -> int:
        """Bytes of which the peak is at least."""
        model, held = self._model(layout)
        forward, peak = model.peaks(layout.micro_batch, is_shared=self._may_share(layout))
        memory = max(held.resting + peak, held.stepping)
        if self._space.training(layout).accumulation > 1:
            memory = max(memory, held.resting + held.kept + forward)
        return memory

    def score(self, layout: Layout) -> Score:
        """The score of which a step's is at least."""
        model, held = self._model(layout)
        plan, training = self._space.plan(layout), self._space.training(layout)
        split = model.tp_bytes(layout.micro_batch) * training.accumulation
        profile, seats, time = self._space.profile, self._space.question.seats, None
        ways = _Ways(plan, profile.device_type)
        moved = _traffic(model, ways, training.accumulation, split)
        if seats.node is not None:
            counted = (moved, held.updated)
            work = work_of(profile, plan, model.shares, training, counted)
            time = step_time(seats.node, plan.mesh, work)
        flops = flops_of(profile, plan, model.shares, training)
        return score(Spent(flops, moved.sent, time, moved.in_groups), plan.mesh, seats)

    def _may_share(self, layout: Layout) -> bool:
        """Whether ranks of a host may compute with one copy of parameters."""
        chosen = self._space.question.workload.shared_memory
        is_host = self._space.profile.device_type == "cpu"
        return is_host and layout.mesh.dp_shard > 1 and chosen in ("auto", "storage")

    def _model(self, layout: Layout) -> tuple[_Model, _Held]:
        mesh = MeshPlan(tp=layout.mesh.tp)
        # Parts that stay after forward are taken for nothing.
        like = replace(layout, mesh=mesh, reshard=layout.reshard is not False, micro_batch=1)
        question, workload = self._space.question, self._space.question.workload
        dtypes = (workload.param_dtype, workload.reduce_dtype, workload.output_dtype)
        shared = (like, dtypes, question.fixed.units, question.tensor_parallel)
        if shared not in self._divided:
            self._divided[shared] = _Model(self._space, like)
        model = self._divided[shared]
        key = (like, layout.mesh.dp_shard)
        if key not in self._resting:
            self._resting[key] = self._held(model, layout.mesh.dp_shard)
        return model, self._resting[key]

    def _held(self, model: _Model, shards: int) -> _Held:
        profile, optimizer = self._space.profile, self._space.question.workload.optimizer
        is_host = profile.device_type == "cpu"
        parameters = state = grads = kept = updated = 0
        copies, largest = 0, 0
        for kind, count in model.kinds.items():
            row, shape = _cut(kind.whole, shards)
            local = prod(shape)
            slices = profile.rounded(row * kind.itemsize)
            own = profile.rounded(local * kind.itemsize)
            mine = optimizer.state_of(shape, own) if kind.is_trained else 0
            if kind.is_trained:
                updated += count * (slices + own + mine)
            if kind.has_grad:
                kept += count * kind.whole.total * kind.reduce
            if model.options[kind.modules].offload and not is_host:
                continue
            parameters += count * slices
            state += count * mine
            if kind.is_trained:
                copies, largest = copies + count * own, max(largest, own)
            if kind.has_grad:
                grads += count * row * kind.itemsize
        resting = self._buffers + parameters + state
        temporary = optimizer.step_copies_of_all * copies
        temporary += optimizer.step_copies_of_largest * largest
        return _Held(resting, resting + grads + temporary, kept, updated)


class _Model:
    """A model as it is divided, whatever the sizes of the data axes."""

    def __init__(self, space: LayoutSpace, layout: Layout) -> None:
        self._profile = space.profile
        plan = _anywhere(space.plan(layout))
        self.shares = shares_of(space.profile, plan)
        self.options = {share.unit.plan.modules: share.unit.plan for share in self.shares}
        self._trace = space.profile.trace(space.root_conditions(layout))
        self._plan = plan
        self._peaks: dict[tuple[int, bool], tuple[int, int]] = {}

    @cached_property
    def _steps(self) -> Sequence[UnitStep]:
        return steps_of(self._profile, self._plan, self.shares)

    @cached_property
    def _reached(self) -> frozenset[int]:
        return frozenset(place for step in self._steps for place in step.segment.grads)

    def is_reached(self, share: UnitShare) -> bool:
        """Whether backward goes through the unit."""
        return any(param.place in self._reached for param in share.own)

    @cached_property
    def kinds(self) -> Counter[_Kind]:
        """How many parameters there are of each kind."""
        return Counter(
            _Kind(
                share.unit.plan.modules,
                param.slicing,
                param.facts.itemsize,
                param.compute,
                param.reduce,
                param.facts.requires_grad,
                param.facts.requires_grad and param.place in self._reached,
                is_reached,
                share.is_written,
                param.can_be_one_copy,
            )
            for share in self.shares
            for is_reached in (self.is_reached(share),)
            for param in share.own
        )

    @cached_property
    def units(self) -> Counter[tuple[tuple[str, ...], bool]]:
        """How many units that communicate each of the plan's makes, by whether forward writes to them."""
        return Counter(
            (share.unit.plan.modules, share.is_written)
            for share in self.shares
            if self.is_reached(share)
        )

    def tp_bytes(self, micro_batch: int) -> int:
        """What split matrices send."""
        return self._trace.tp_bytes.at(micro_batch)

    def peaks(self, micro_batch: int, *, is_shared: bool) -> tuple[int, int]:
        """Most of activations and whole parameters, in forward and ever.

        Args:
            micro_batch: Samples of one forward.
            is_shared: Whether whole parameters may be one copy for all ranks of a host.
        """
        key = micro_batch, is_shared
        if key not in self._peaks:
            self._peaks[key] = self._follow(micro_batch, is_shared=is_shared)
        return self._peaks[key]

    def _follow(self, micro_batch: int, *, is_shared: bool) -> tuple[int, int]:
        """Like the timeline, with nothing gathered ahead and no gradients."""
        unit_of = {name: share for share in self.shares for name in share.unit.names}
        weight = {
            share.index: sum(
                param.whole_bytes
                for param in share.own
                if not (is_shared and param.can_be_one_copy)
            )
            for share in self.shares
        }
        whole: set[int] = set()
        activations = unsharded = forward = peak = 0
        for step in self._steps:
            segment = step.segment
            unit = unit_of.get(segment.module)
            if unit is not None and segment.begins in ("forward", "backward"):
                whole.add(unit.index)
            elif unit is not None and (segment.begins == "backward_end" or unit.reshards):
                whole.discard(unit.index)
            unsharded = sum(weight[index] for index in whole)
            top = activations + max(segment.peak.at(micro_batch), 0) + unsharded
            activations += segment.change.at(micro_batch)
            peak = max(peak, top)
            if segment.begins in ("forward", "forward_end"):
                forward = max(forward, top)
        return forward, peak


def _anywhere(plan: ShardingPlan) -> ShardingPlan:
    """For one rank, where no part of a unit can stay."""
    units = (
        unit
        if unit.reshard_after_forward in (None, True, False)
        else replace(unit, reshard_after_forward=unit.reshard_after_forward != 1)
        for unit in plan.units
    )
    return replace(plan, units=tuple(units))


class _Ways:
    """How units of a plan exchange what they gather and reduce."""

    def __init__(self, plan: ShardingPlan, device_type: str) -> None:
        self.mesh = plan.mesh
        self._plan = plan
        self._device_type = device_type
        self._options = {unit.modules: unit for unit in plan.units}

    def of(self, modules: tuple[str, ...], *, is_written: bool) -> SharedWay | Literal["none"]:
        """Whether through shared memory."""
        unit = self._options.get(modules) or UnitPlan(modules)
        return shared_memory_of_unit(self._plan, unit, self._device_type, is_written=is_written)

    def gathers(self, modules: tuple[str, ...]) -> tuple[int, ...]:
        """Over how many ranks each gather of a pass goes."""
        return _gathers(self._options.get(modules), self.mesh.dp_shard)


def _traffic(model: _Model, ways: _Ways, passes: int, split: int) -> Moved:
    """What is sent at least: without mistaken gathers; `split` is what tp sends."""
    shards, replicas = ways.mesh.dp_shard, ways.mesh.dp_replicate
    gathered = reduced = averaged = 0
    groups: Counter[int] = Counter()
    shared: dict[tuple[SharedWay, Kind], Through] = {}
    started = 0

    def share(
        way: SharedWay | Literal["none"], kind: Kind, sent: int, copied: int, count: int
    ) -> None:
        if way != "none":
            known = shared.get((way, kind), NOTHING)
            shared[way, kind] = known.and_also(sent, copied, count)

    for (modules, is_written), count in model.units.items():
        gathers = passes * len(ways.gathers(modules))
        started += count * (gathers + 1)
        way = ways.of(modules, is_written=is_written)
        share(way, "all_gather", 0, 0, count * gathers)
        share(way, "reduce_scatter", 0, 0, count)
    for kind, count in model.kinds.items():
        row, _ = _cut(kind.whole, shards)
        way = ways.of(kind.modules, is_written=kind.is_written)
        if kind.is_gathered:
            for ranks in ways.gathers(kind.modules):
                part = row if ranks == shards else _cut(_from_first(kind.whole), ranks)[0]
                moved = count * passes * part * kind.compute * (ranks - 1)
                gathered += moved
                if ranks < shards:
                    groups[ranks] += moved
                is_read_there = way == "storage" and kind.can_be_one_copy
                share(way, "all_gather", moved, 0 if is_read_there else moved, 0)
        if kind.has_grad:
            moved = count * row * kind.reduce * (shards - 1)
            reduced += moved
            averaged += count * row * kind.reduce
            share(way, "reduce_scatter", moved, moved, 0)
    units = sum(model.units.values())
    # Each average is rounded down by itself; there are no more than parameters.
    mean = max(2 * averaged * (replicas - 1) // replicas - sum(model.kinds.values()), 0)
    total: dict[str, int] = {
        "dp_replicate": mean,
        "dp_shard": gathered + reduced,
        "tp": split,
    }
    collectives: dict[str, int] = {
        "dp_replicate": units if replicas > 1 else 0,
        "dp_shard": started if shards > 1 else 0,
        "tp": 0,
    }
    reductions = (reduced, units if shards > 1 else 0)
    return Moved(total, collectives, reductions, dict(groups), shared)


def _gathers(unit: UnitPlan | None, shards: int) -> tuple[int, ...]:
    """Over how many ranks each gather of a pass goes."""
    if unit is None or (unit.modules == ("",) and unit.reshard_after_forward is None):
        return (shards,)
    match unit.reshard_after_forward:
        case None | True:
            return (shards, shards)
        case False | 1:
            return (shards,)
        case ranks:
            return (shards, ranks)


def _from_first(whole: Slicing) -> Slicing:
    return Slicing.of(whole.shape, None if whole.dim is None else 0, 1)


@lru_cache(maxsize=65_536)
def _cut(whole: Slicing, parts: int) -> tuple[int, tuple[int, ...]]:
    """Elements of a padded slice, and the shape of the first rank's own."""
    cut = Slicing.of(whole.shape, whole.dim, parts)
    return cut.row, tuple(cut.shape_of(0))
