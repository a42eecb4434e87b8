"""One rank's step as the engine makes it, on a ledger instead of in memory.

It follows `fsdp_core.runtime` and `fsdp_core.param` hook by hook, with the same arithmetic of
order and window, so that what is allocated together there is counted together here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fsdp_core.plan.model.ledger import Ledger
from fsdp_core.plan.model.reductions import Reductions
from fsdp_core.plan.model.segments import Segments
from fsdp_core.plan.model.shares import Placement, UnitShare
from fsdp_core.plan.model.traffic import Traffic
from fsdp_core.schedule import BackwardOrder, ForwardOrder

State = Literal["idle", "forward", "pre_backward", "post_backward"]


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

    @property
    def is_sliced(self) -> bool:
        """Whether the parameters come from all ranks that have a slice, be it in flight."""
        return self.state == "sharded" or (self.state == "gathering" and not self.from_part)


@dataclass
class _Unit:
    share: UnitShare
    used: list[_Group]
    state: State = "idle"
    yet_to_run: set[str] = field(default_factory=set)
    depth: int = 0
    first: str = ""  # the module whose inputs the end of backward hangs on


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
        self._reductions = Reductions(shares, placement, ledger, traffic, self.segments)
        self._forward = ForwardOrder()
        self._backward = BackwardOrder()
        self._opener: _Unit | None = None
        self._prefetched: list[_Unit] = []
        self._gathered = 0  # what is copied out while the next gather is on its way, on streams
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
                self._forward.begin(unit.share.index)
        were_sliced = any(group.is_sliced for group in unit.used)
        self._make_whole(unit)
        if is_first:
            predicted = self._forward.enter(unit.share.index) if were_sliced else None
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
        if unit.used:
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
        self._reductions.add_grads(places)

    def end_backward(self) -> None:
        """All of backward has run."""
        for unit in self._units:
            is_borrowed = any(group.is_borrowed for group in unit.used if group.share is unit.share)
            if unit.state != "post_backward" or is_borrowed:
                self._post_backward(unit, reached=unit.state == "pre_backward")
        self._reductions.land_all()
        self.segments.end_backward()
        for unit in self._units:
            self._drop(unit)
            unit.state = "idle"
        self._backward.clear()
        self._reductions.let_go_held()

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
        share = group.share
        if not self.reduces:
            if not group.holders:
                self._reshard(group)
            self._reductions.keep_grads(share)
            return
        agrees = reached and self._placement.shards * self._placement.replicas > 1
        taken = self._reductions.take_grads(share, covers_unused=agrees)
        if not group.holders:
            self._reshard(group)
        self._reductions.issue(share, taken, flagged=agrees)

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
        if share.shared != "none" or self._placement.is_local(share):
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
