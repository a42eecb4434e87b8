"""Gradients of one rank, from whole ones to those of its slices, on a ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fsdp_core.layout import Slicing
from fsdp_core.plan.model.ledger import Ledger
from fsdp_core.plan.model.segments import BoxUse, Segments
from fsdp_core.plan.model.shares import DTYPE_WORD, ParamShare, Placement, UnitShare
from fsdp_core.plan.model.traffic import Traffic
from fsdp_core.schedule import InFlightWindow

_RING_SEGMENT: Final = 1 << 20
"""Of gloo's ring."""


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


class Reductions:
    """Whole gradients, the reductions in flight, and what they leave.

    Args:
        shares: Of all units, by index.
        placement: Where they are sharded.
        ledger: That memory is counted on.
        traffic: That bytes are counted on.
        segments: Memory that ranks share.
    """

    def __init__(
        self,
        shares: Sequence[UnitShare],
        placement: Placement,
        ledger: Ledger,
        traffic: Traffic,
        segments: Segments,
    ) -> None:
        self._placement = placement
        self._ledger = ledger
        self._traffic = traffic
        self._segments = segments
        self._params = {param.place: param for share in shares for param in share.own}
        self._window: InFlightWindow[_Reduction] = InFlightWindow()
        self._grads: dict[int, int] = {}  # whole gradients by place of the parameter
        self._sums: dict[int, int] = {}  # those of earlier micro-batches in another dtype
        self._kept: set[int] = set()  # units whose gradients an earlier backward kept
        self._held = 0  # a reduced row that an all-reduce on another lane has read

    def add_grads(self, places: Iterable[int]) -> None:
        """Autograd has added to the whole gradients of parameters, named by place."""
        for place in places:
            if place not in self._grads:
                whole = self._params[place].whole_bytes
                self._grads[place] = self._ledger.add("whole_gradients", whole)

    def take_grads(self, share: UnitShare, *, covers_unused: bool) -> dict[str, list[ParamShare]]:
        """Parameters with a gradient to reduce, by the dtype that it travels in."""
        taken: dict[str, list[ParamShare]] = {}
        for param in share.own:
            if self._take_grad(param, covers_unused=covers_unused):
                taken.setdefault(param.reduces_as, []).append(param)
        return taken

    def issue(
        self, share: UnitShare, taken: Mapping[str, Sequence[ParamShare]], *, flagged: bool
    ) -> None:
        """Starts the reductions of what `take_grads` gave.

        Args:
            share: The unit's.
            taken: By dtype.
            flagged: Whether one flag for each parameter travels with them.
        """
        keeps = share.index in self._kept
        self._kept.discard(share.index)
        if not keeps and self._reduces_alone(share, taken):
            (params,) = taken.values()
            self._reduce_alone(params, share)
            return
        for params in taken.values():
            self._make_room()
            flags = len(params) if flagged else 0
            self._window.admit(self._issue_reduction(params, flags, share))

    def land_all(self) -> None:
        """Lands what is in flight."""
        for reduction in self._window.drain():
            self._land_any(reduction)

    def let_go_held(self) -> None:
        """Backward has ended: no other lane reads a reduced row."""
        self._ledger.free("communication", self._held)
        self._held = 0

    def _reduces_alone(self, share: UnitShare, taken: Mapping[str, Sequence[ParamShare]]) -> bool:
        """Whether whole gradients are those of the slices; not where each parameter has to be asked."""
        count = sum(map(len, taken.values()))
        has_all = count == sum(param.facts.requires_grad for param in share.own)
        return (
            self._placement.is_local(share)
            and self._placement.replicas == 1 == len(taken)
            and has_all
        )

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

    def keep_grads(self, share: UnitShare) -> None:
        """Keeps whole gradients for a later backward, in the dtype that they are reduced in."""
        self._kept.add(share.index)
        for param in share.own:
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
            box, grown = self._segments.take_box(use)
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
            self._segments.give_back(reduction.box)
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
