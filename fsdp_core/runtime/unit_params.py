"""The parameter groups that one unit computes with, moved together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fsdp_core import torch_private
from fsdp_core.states import ShardedState

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_core.comm import CommContext
    from fsdp_core.options import UnitOptions
    from fsdp_core.param import FSDPParam, FSDPParamGroup
    from fsdp_core.runtime.observer import UnitTracer
    from fsdp_core.runtime.root_context import RootContext


class UnitParams:
    """Unshards and reshards all groups of a unit.

    Transforms of `torch.func` that are active around the unit's forward do not see it: slices
    and buffers are no part of the function that is transformed.

    Attributes:
        groups: The unit's own communicating groups; empty if it has no parameters of its own.
    """

    def __init__(
        self,
        groups: Sequence[FSDPParamGroup],
        borrowed: Sequence[FSDPParamGroup],
        tracer: UnitTracer,
    ) -> None:
        """Takes charge.

        Args:
            groups: The unit's own.
            borrowed: Other units' groups with parameters that it shares.
            tracer: Names the phases.
        """
        self.groups = tuple(groups)
        self._borrowed = tuple(borrowed)
        self._used = (*self.groups, *self._borrowed)
        self._tracer = tracer

    @property
    def are_any(self) -> bool:
        """Whether there are parameters at all, its own or borrowed."""
        return bool(self._used)

    @property
    def are_sliced(self) -> bool:
        """Whether some come from all ranks that have a slice before they are whole, be it in flight.

        They do not where they are whole, nor where a smaller mesh has them between forward and backward.
        """
        return any(group.sharded_state is ShardedState.SHARDED for group in self._used)

    @property
    def gathering_ranks(self) -> frozenset[int]:
        """All ranks that take part in its gathers, this one included; none without parameters."""
        return frozenset().union(*(group.info.shard.ranks for group in self._used))

    @property
    def are_owed(self) -> bool:
        """Whether other units went backward since gradients were taken, or still do.

        The same on all ranks, on which of them these used the parameters or not.
        """
        return any(
            group.borrowed_in_backward or (group.is_borrowed and group.is_held_besides(self))
            for group in self.groups
        )

    @property
    def is_reduction_overdue(self) -> bool:
        """Whether gradients of earlier backwards wait for one that reduces."""
        return any(group.is_reduction_overdue for group in self.groups)

    @property
    def all(self) -> list[FSDPParam]:
        """The parameters of all groups."""
        return [param for group in self.groups for param in group.params]

    def issue_unshard(self, comm: CommContext, *, after_compute: bool) -> None:
        """Starts the gathers that are needed; see `FSDPParamGroup.issue_unshard`."""
        for group in self._used:
            if group.is_unsharded or group.is_gathering:
                continue
            with torch_private.outside_transforms(), self._tracer.span("all_gather"):
                group.issue_unshard(comm, after_compute=after_compute)

    def finish_unshard(self) -> None:
        """Waits for the gathers in flight and registers the whole parameters."""
        for group in self._used:
            if not group.is_gathering:
                continue
            with torch_private.outside_transforms(), self._tracer.span("all_gather_copy_out"):
                group.finish_unshard()

    def reshard(self) -> None:
        """Registers the slices and frees the whole parameters."""
        with torch_private.outside_transforms():
            for group in self._used:
                group.reshard()

    def reshard_unused(self) -> None:
        """The same, except for what another unit is computing with."""
        with torch_private.outside_transforms():
            for group in self._used:
                if not group.is_held:
                    group.reshard()

    def hold(self) -> None:
        """The unit begins to compute with them: units that share some must not free those."""
        for group in self._used:
            group.hold(self)

    def let_go(self) -> None:
        """It has finished."""
        for group in self._used:
            group.let_go(self)

    def end_use_in_backward(self) -> None:
        """Its backward has ended: the owners of what it borrows may have new gradients."""
        for group in self._borrowed:
            group.borrowed_in_backward = True

    def forget_use(self) -> None:
        """The iteration ends, and all gradients were taken."""
        self.let_go()
        for group in self.groups:
            group.borrowed_in_backward = False

    def reshard_after_forward(self, comm: CommContext) -> None:
        """Frees what no other unit needs where forward ends, or keeps slices of a smaller mesh."""
        with torch_private.outside_transforms():
            for group in self._used:
                if not group.is_held:
                    group.reshard_after_forward(comm)

    def reduce(
        self, options: UnitOptions, context: RootContext, *, was_reached: bool, frees: bool
    ) -> None:
        """Takes the whole gradients, frees the parameters that no unit needs, and reduces.

        Args:
            options: Whether to reduce, or to keep the gradients whole.
            context: Takes the reductions into its window.
            was_reached: See `FSDPParamGroup.take_grads`.
            frees: Whether to free.
        """
        with torch_private.outside_transforms():
            self._reduce(options, context, was_reached=was_reached, frees=frees)

    def _reduce(
        self, options: UnitOptions, context: RootContext, *, was_reached: bool, frees: bool
    ) -> None:
        for group in reversed(self.groups):
            if not options.reduce_grads:
                self._reshard_after_backward(group, frees=frees)
                group.keep_grads(was_reached=was_reached)
                continue
            batches = group.take_grads(was_reached=was_reached)
            self._reshard_after_backward(group, frees=frees)
            for batch in batches:
                with self._tracer.span("post_backward_rs_wait"):
                    context.make_room_for_reduce()
                with self._tracer.span("post_backward_reduce"):
                    context.admit_reduce(group.issue_reduce(batch, context.comm))

    def _reshard_after_backward(self, group: FSDPParamGroup, *, frees: bool) -> None:
        if frees and not group.is_held:
            with self._tracer.span("post_backward_reshard"):
                group.reshard()

    def reshard_borrowed(self) -> None:
        """Frees what was borrowed and no other unit needs, where backward ends."""
        for group in self._borrowed:
            if not group.is_held:
                group.reshard()

    def watch_grads(self, on_arrival: Callable[[torch.Tensor], None]) -> None:
        """Has `on_arrival` called each time autograd has added to the gradient of a parameter."""
        for param in self.all:
            param.watch_grads(on_arrival)

    def watch_state_dicts(self, *, before_load: Callable[..., None]) -> None:
        """Has state dicts see slices only, and padding restored after a load.

        Args:
            before_load: Registers the slices and makes what is on its way obsolete.
        """
        owners: dict[nn.Module, list[FSDPParam]] = {}
        for param in (param for group in self._used for param in group.params):
            for owner in param.slot.modules:
                owners.setdefault(owner, []).append(param)
        for owner, params in owners.items():
            owner.register_state_dict_pre_hook(self._before_save)  # type: ignore[no-untyped-call]  # PyTorch's
            torch_private.register_load_pre_hook(owner, before_load)
            owner.register_load_state_dict_post_hook(partial(_refresh, params))  # type: ignore[no-untyped-call]  # PyTorch's

    def _before_save(self, *_: object) -> None:
        self.reshard()

    def settle(self) -> None:
        """Takes over what the user did since sharding; see `FSDPParamGroup.settle`."""
        for group in self.groups:
            group.settle()

    def refresh(self) -> None:
        """Takes over what the user did to the slices."""
        for group in self.groups:
            group.refresh()

    def await_released(self) -> None:
        """Waits until no rank computes with what is one copy for all ranks of the host."""
        for group in self.groups:
            group.await_released()

    def drop_gathers(self) -> None:
        """Ends gathers in flight that nobody used."""
        for group in self._used:
            group.drop_gather()

    def reset(self) -> None:
        """Registers the slices and drops whatever is in flight, gradients included."""
        for group in self.groups:
            group.reset()


def _refresh(params: Sequence[FSDPParam], *_: object) -> None:
    for param in params:
        param.refresh()
