"""One rank's step as the engine makes it, on a ledger instead of in memory.

It follows `fsdp_core.runtime` and `fsdp_core.param` hook by hook, with the same arithmetic of
order and window, so that what is allocated together there is counted together here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fsdp_core.layout import Slicing
from fsdp_core.plan.model.ledger import Ledger
from fsdp_core.plan.model.segments import BoxUse, Segments
from fsdp_core.plan.model.shares import DTYPE_WORD, ParamShare, UnitShare
from fsdp_core.plan.model.traffic import Traffic
from fsdp_core.schedule import BackwardOrder, ForwardOrder, InFlightWindow

State = Literal["idle", "forward", "pre_backward", "post_backward"]


@dataclass(frozen=True)
class Placement:
    """Where and over how many ranks a model is sharded.

    Attributes:
        shards: Ranks that share a parameter.
        replicas: Ranks that hold the same slice.
        is_host: Whether models compute on the host, so that offloading moves nothing.
        has_gloo: Whether gloo communicates, which has memory of its own while it does.
        shard_rank: The rank's place among those that share a parameter.
        splits: Whether matrices are split between ranks besides.
    """

    shards: int
    replicas: int
    is_host: bool
    splits: bool = False
    has_gloo: bool = False
    shard_rank: int = 0


@dataclass
class _Group:
    """Parameters of one unit that are gathered and reduced together."""

    share: UnitShare
    state: Literal["sharded", "part", "gathering", "whole"] = "sharded"
    holders: set[int] = field(default_factory=set)
    gather: int = 0  # the buffer in flight, and what is copied to the device for it
    beside: int = 0  # what the communication library has while it is in flight
    unsharded: int = 0
    is_borrowed: bool = False
    from_part: bool = False
    keeps_grads: bool = False


@dataclass
class _Unit:
    share: UnitShare
    used: list[_Group]
    state: State = "idle"
    yet_to_run: set[str] = field(default_factory=set)
    depth: int = 0
    first: str = ""  # the module whose inputs the end of backward hangs on


@dataclass(frozen=True)
class _Reduction:
    contribution: int  # what is sent; through shared memory: copies of this rank's own part
    result: int
    beside: int
    grads: int
    is_cast: bool
    offloads: bool
    box: int | None = None  # in which others find their parts, if memory is shared
    wholes: int = 0  # gradients of which this rank's own part is a view
    is_local: bool = False  # one rank's, whose whole gradients are those of its slices


class Timeline:
    """The units of one rank, told of the model's boundaries one by one."""

    def __init__(
        self, shares: Sequence[UnitShare], placement: Placement, ledger: Ledger, traffic: Traffic
    ) -> None:
        self._placement = placement
        self._ledger = ledger
        self._traffic = traffic
        self.segments = Segments(shares, with_heads=placement.has_gloo)
        ledger.shift("communication", self.segments.nbytes)
        self._groups = {share.index: _Group(share) for share in shares}
        self._units = [
            _Unit(
                share,
                [self._groups[i] for i in (share.index, *share.borrowed) if shares[i].own],
            )
            for share in shares
        ]
        for share in shares:
            for index in share.borrowed:
                self._groups[index].is_borrowed = True
        self._unit_of = {name: unit for unit in self._units for name in unit.share.unit.names}
        self._params = {param.place: param for share in shares for param in share.own}
        self._forward = ForwardOrder()
        self._backward = BackwardOrder()
        self._window: InFlightWindow[_Reduction] = InFlightWindow()
        self._opener: _Unit | None = None
        self._prefetched: list[_Unit] = []
        self._grads: dict[int, int] = {}  # whole gradients by place of the parameter
        self._sums: dict[int, int] = {}  # those of earlier micro-batches in another dtype
        self._gathered = 0  # what is copied out while the next gather is on its way, on streams
        self._held = 0  # a reduced row that an all-reduce on another lane has read
        self.reduces = True

    def owns(self, module: str) -> bool:
        """Whether `module` is one of a unit's."""
        return module in self._unit_of

    # -- Forward

    def enter_forward(self, module: str) -> None:
        """Before forward of `module`."""
        unit = self._unit_of[module]
        is_first = unit.state != "forward"
        unit.yet_to_run = unit.yet_to_run or set(unit.share.unit.names)
        unit.depth += 1
        if is_first:
            unit.state, unit.first = "forward", module
            self._hold(unit)
            if self._opener is None:
                self._opener = unit
                self._forward.begin()
        self._make_whole(unit)
        if is_first:
            predicted = self._forward.enter(unit.share.index)
            for target in self._targets(unit.share.forward_prefetch, predicted):
                self._issue_all(target)
                self._prefetched.append(target)
        self._let_go_gathered()

    def leave_forward(self, module: str) -> None:
        """After forward of `module`."""
        unit = self._unit_of[module]
        unit.depth -= 1
        if unit.depth == 0:
            unit.yet_to_run.discard(module)
            if not unit.yet_to_run:
                self._complete_forward(unit)
        if self._opener is unit and unit.state == "idle":
            for other in reversed(self._units):
                if other.yet_to_run:
                    other.yet_to_run.clear()
                    self._complete_forward(other)
            self._forward.end()
            for guess in self._prefetched:
                self._drop(guess)
            self._prefetched.clear()
            self._opener = None

    def _complete_forward(self, unit: _Unit) -> None:
        self._let_go(unit)
        if unit.share.reshards:
            for group in unit.used:
                if not group.holders:
                    self._reshard_after_forward(group)
        self._backward.record(unit.share.index)
        unit.state = "idle"

    def enter_again(self, module: str) -> None:
        """Before forward of `module` within backward, which the model asked for by itself.

        What it gathers stays until its backward.
        """
        self._make_whole(self._unit_of[module])

    # -- Backward

    def enter_backward(self, module: str) -> None:
        """Before backward of `module`."""
        unit = self._unit_of[module]
        if unit.state == "pre_backward":
            return
        unit.state = "pre_backward"
        self._hold(unit)
        self._make_whole(unit)
        chosen = unit.share.backward_prefetch
        predicted = None if chosen else self._backward.take(unit.share.index)
        for target in self._targets(chosen, predicted):
            self._issue_all(target)

    def leave_backward(self, module: str) -> None:
        """The gradients of the inputs of `module` are known."""
        unit = self._unit_of[module]
        if unit.first == module:
            self._post_backward(unit, reached=True)

    def add_grads(self, places: Iterable[int]) -> None:
        """Autograd has added to the whole gradients of parameters, named by place."""
        for place in places:
            if place not in self._grads:
                whole = self._params[place].whole_bytes
                self._grads[place] = self._ledger.add("whole_gradients", whole)

    def end_backward(self) -> None:
        """All of backward has run."""
        for unit in self._units:
            is_borrowed = any(group.is_borrowed for group in unit.used if group.share is unit.share)
            if unit.state != "post_backward" or is_borrowed:
                self._post_backward(unit, reached=unit.state == "pre_backward")
        for reduction in self._window.drain():
            self._land_any(reduction)
        self.segments.end_backward()
        for unit in self._units:
            self._drop(unit)
            unit.state = "idle"
        self._backward.clear()
        self._ledger.free("communication", self._held)
        self._held = 0

    def _post_backward(self, unit: _Unit, *, reached: bool) -> None:
        unit.state = "post_backward"
        self._let_go(unit)
        for group in unit.used:
            if group.share is not unit.share and not group.holders:
                self._reshard(group)
        for group in unit.used:
            if group.share is unit.share:
                self._reduce(group, reached=reached)

    def _reduce(self, group: _Group, *, reached: bool) -> None:
        if not self.reduces:
            if not group.holders:
                self._reshard(group)
            self._keep_grads(group)
            return
        agrees = reached and self._placement.shards * self._placement.replicas > 1
        taken: dict[str, list[ParamShare]] = {}
        for param in group.share.own:
            if self._take_grad(param, covers_unused=agrees):
                taken.setdefault(param.reduces_as, []).append(param)
        if not group.holders:
            self._reshard(group)
        keeps, group.keeps_grads = group.keeps_grads, False
        if not keeps and self._reduces_alone(group.share, taken):
            (params,) = taken.values()
            self._reduce_alone(params, group.share)
            return
        for params in taken.values():
            self._make_room()
            flags = len(params) if agrees else 0
            self._window.admit(self._issue_reduction(params, flags, group.share))

    def _is_local(self, share: UnitShare) -> bool:
        """Whether this rank's slices are the whole parameters."""
        is_alone = self._placement.shards == 1 and not self._placement.splits
        return is_alone and not share.unit.plan.offload and all(p.slicing.leads for p in share.own)

    def _reduces_alone(self, share: UnitShare, taken: Mapping[str, Sequence[ParamShare]]) -> bool:
        """Whether whole gradients are those of the slices; not where each parameter has to be asked."""
        count = sum(map(len, taken.values()))
        has_all = count == sum(param.facts.requires_grad for param in share.own)
        return self._is_local(share) and self._placement.replicas == 1 == len(taken) and has_all

    def _reduce_alone(self, params: Sequence[ParamShare], share: UnitShare) -> None:
        self._make_room()
        wholes = sum(self._grads.pop(param.place) for param in params)
        is_cast = any({p.compute, p.reduce} != {p.facts.itemsize} for p in params)
        grads = sum(self._ledger.taken_by(p.slicing.row * p.facts.itemsize) for p in params)
        self._window.admit(
            _Reduction(
                0, 0, 0, grads, is_cast, share.unit.plan.offload, wholes=wholes, is_local=True
            )
        )

    def _make_room(self) -> None:
        for landed in self._window.room_for_one():
            self._land_any(landed)

    def _keep_grads(self, group: _Group) -> None:
        group.keeps_grads = True
        for param in group.share.own:
            if param.place in self._grads and param.reduce != param.compute:
                if param.place not in self._sums:
                    cast = param.slicing.total * param.reduce
                    self._sums[param.place] = self._ledger.add("whole_gradients", cast)
                self._ledger.free("whole_gradients", self._grads.pop(param.place))

    def _take_grad(self, param: ParamShare, *, covers_unused: bool) -> bool:
        """Whether there is a gradient to reduce, by itself or as a sum."""
        if param.place in self._sums:
            self._ledger.free("whole_gradients", self._grads.pop(param.place, 0))
            self._grads[param.place] = self._sums.pop(param.place)
        if param.place not in self._grads and covers_unused and param.facts.requires_grad:
            zeros = param.slicing.total * param.reduce
            self._grads[param.place] = self._ledger.add("whole_gradients", zeros)
        return param.place in self._grads

    def _issue_reduction(
        self, params: Sequence[ParamShare], flags: int, share: UnitShare
    ) -> _Reduction:
        ledger, shards = self._ledger, self._placement.shards
        itemsize, orig = params[0].reduce, {param.facts.itemsize for param in params}
        row = sum(param.slicing.row for param in params) + flags
        self._traffic.reduce_scatter(row * itemsize, share.shared)
        if self._placement.replicas > 1:
            self._traffic.all_reduce(row * itemsize)
        is_cast = orig != {itemsize} or params[0].reduces_as not in (
            params[0].facts.dtype,
            DTYPE_WORD.get(params[0].facts.dtype, ""),
        )
        grads, offloads = row * max(orig), share.unit.plan.offload
        if share.shared != "none":
            use = self._box_use(params, flags)
            box, grown = self.segments.take_box(use)
            ledger.shift("communication", grown)
            own, wholes = (0, 0) if use.holds_own else self._keep_own_part(params)
            self._free_grads(params)
            return _Reduction(own, row * itemsize, 0, grads, is_cast, offloads, box, wholes)
        stacked = sum(ledger.add("communication", p.stacked_bytes) for p in params)
        whole = [param for param in params if param.stacked_bytes]
        self._free_grads(whole)
        contribution = ledger.add("communication", shards * row * itemsize)
        self._free_grads(params)
        ledger.free("communication", stacked)
        result = ledger.add("communication", row * itemsize)
        beside = 0
        if self._placement.has_gloo and shards > 1:
            # gloo reduces a copy of the whole contribution, and keeps it until it is waited for.
            beside = ledger.add("communication", shards * row * itemsize)
            self._pass_by(self._in_ring(shards * row * itemsize, shards))
        return _Reduction(contribution, result, beside, grads, is_cast, offloads)

    def _box_use(self, params: Sequence[ParamShare], flags: int) -> BoxUse:
        slicings = [param.slicing for param in params]
        if flags:
            slicings.append(Slicing.of((flags,), None, self._placement.shards))
        return BoxUse.of(slicings, params[0].reduce, self._placement.shard_rank)

    def _keep_own_part(self, params: Sequence[ParamShare]) -> tuple[int, int]:
        """Of whole gradients in the memory that is shared: bytes of copies, and of those kept whole.

        This rank's part is a view where it can be, so that the whole is there until it is added.
        """
        copies = wholes = 0
        for param in params:
            held = self._grads[param.place]
            is_view = held == self._ledger.taken_by(param.slicing.total * param.reduce)
            if is_view and param.reduces_as != "fp16":
                wholes += self._grads.pop(param.place)
            else:
                copies += self._ledger.add("communication", param.slicing.row * param.reduce)
        return copies, wholes

    def _pass_by(self, nbytes: int) -> None:
        """What a collective allocates and frees while it runs."""
        self._ledger.shift("communication", 0, peak=nbytes)

    @staticmethod
    def _in_ring(nbytes: int, ranks: int) -> int:
        """Two segments of a ring, which is how gloo reduces."""
        return 2 * min(_RING_SEGMENT, -(-nbytes // (2 * ranks)))

    def _land_any(self, reduction: _Reduction) -> None:
        if reduction.is_local:
            self._land_alone(reduction)
        else:
            self._land_reduction(reduction)

    def _land_reduction(self, reduction: _Reduction) -> None:
        ledger, replicas = self._ledger, self._placement.replicas
        if reduction.box is not None:
            self.segments.give_back(reduction.box)
            reduction = replace(reduction, result=ledger.add("communication", reduction.result))
            ledger.free("whole_gradients", reduction.wholes)
            if replicas > 1:
                self._pass_by(reduction.result)  # slices, of which one row is made
        ledger.free("communication", reduction.contribution + reduction.beside)
        if self._placement.has_gloo and replicas > 1:
            self._pass_by(self._in_ring(reduction.result, replicas))
        if not reduction.is_cast:
            ledger.shift("communication", -reduction.result)
            ledger.shift("gradients", reduction.result)
            own = reduction.result
        else:
            own = ledger.add("gradients", reduction.grads)
            if replicas > 1:
                ledger.free("communication", self._held)
                self._held = reduction.result
            else:
                ledger.free("communication", reduction.result)
        if reduction.offloads and not self._placement.is_host:
            ledger.free("gradients", own)

    def _land_alone(self, reduction: _Reduction) -> None:
        if reduction.is_cast:
            self._ledger.shift("gradients", reduction.grads)
        self._ledger.free("whole_gradients", reduction.wholes)
        if not reduction.is_cast:
            self._ledger.shift("gradients", reduction.wholes)

    def _free_grads(self, params: Iterable[ParamShare]) -> None:
        for param in params:
            self._ledger.free("whole_gradients", self._grads.pop(param.place, 0))

    # -- Whole and sliced parameters

    def _targets(self, chosen: tuple[int, ...] | None, predicted: int | None) -> list[_Unit]:
        wanted = chosen or (() if predicted is None else (predicted,))
        return [self._units[index] for index in wanted]

    def _make_whole(self, unit: _Unit) -> None:
        self._issue_all(unit)
        for group in unit.used:
            if group.state == "gathering":
                self._land(group)

    def _issue_all(self, unit: _Unit) -> None:
        for group in unit.used:
            if group.state in ("sharded", "part"):
                self._issue(group)

    def _issue(self, group: _Group) -> None:
        share, ledger = group.share, self._ledger
        from_part = group.state == "part"
        ranks = self._placement.shards
        if from_part:
            ranks = next(param.smaller.parts for param in share.own if param.smaller)
        row = share.gather_row(from_smaller=from_part)
        self._traffic.all_gather(row, ranks, share.shared, share.copied_row)
        group.state, group.from_part = "gathering", from_part
        if share.shared != "none" or self._is_local(share):
            return  # rows are copied from where they lie
        held = 0
        if share.unit.plan.offload and not self._placement.is_host and not from_part:
            held = sum(ledger.add("communication", param.slice_bytes) for param in share.own)
        casts = 0
        if share.travels_as_bytes:
            casts = sum(
                ledger.add("communication", param.slicing.row * param.compute)
                for param in share.own
                if param.compute != param.facts.itemsize
            )
        group.gather = held + ledger.add("communication", row * ranks)
        ledger.free("communication", casts)
        if self._placement.has_gloo and ranks > 1:
            # gloo gathers into memory of its own first, and frees it once all rows are there, which
            # may be as late as they are waited for.
            group.beside = ledger.add("communication", row * ranks)

    def _land(self, group: _Group) -> None:
        ledger, from_part = self._ledger, group.from_part
        self._free_beside(group)
        landing = 0
        part, group.unsharded = group.unsharded, 0
        for param in group.share.own:
            if group.share.is_one_copy(param):
                continue
            group.unsharded += ledger.add("unsharded", param.unsharded_bytes)
            if group.share.shared != "none":
                continue
            landing += ledger.add("communication", param.landing_bytes(from_smaller=from_part))
        if self._opener is None or self._placement.is_host or group.share.travels_as_bytes:
            landing += group.gather
        else:
            self._gathered += group.gather
        ledger.free("communication", landing)
        ledger.free("unsharded", part)
        group.gather, group.state = 0, "whole"

    def _let_go_gathered(self) -> None:
        self._ledger.free("communication", self._gathered)
        self._gathered = 0

    def _free_beside(self, group: _Group) -> None:
        self._ledger.free("communication", group.beside)
        group.beside = 0

    def _drop(self, unit: _Unit) -> None:
        for group in unit.used:
            if group.state == "gathering":
                self._free_beside(group)
                self._ledger.free("communication", group.gather)
                group.gather = 0
                group.state = "part" if group.from_part else "sharded"

    def _reshard(self, group: _Group) -> None:
        if group.state in ("whole", "part"):
            self._ledger.free("unsharded", group.unsharded)
            group.unsharded, group.state = 0, "sharded"

    def _reshard_after_forward(self, group: _Group) -> None:
        if not group.share.keeps_part:
            self._reshard(group)
        elif group.state == "whole":
            kept = 0
            for param in group.share.own:
                way = param.smaller or param.slicing
                kept += self._ledger.add("unsharded", way.row * param.compute)
                self._ledger.free("unsharded", self._ledger.taken_by(param.unsharded_bytes))
            group.unsharded, group.state = kept, "part"

    def _hold(self, unit: _Unit) -> None:
        for group in unit.used:
            group.holders.add(unit.share.index)

    def _let_go(self, unit: _Unit) -> None:
        for group in unit.used:
            group.holders.discard(unit.share.index)


# Of gloo's ring.
_RING_SEGMENT = 1 << 20
