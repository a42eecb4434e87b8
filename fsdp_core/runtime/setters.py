"""The setters of `FSDPModule`: each writes options, which are read where the next phase begins."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

import torch.distributed as dist

from fsdp_core import torch_private
from fsdp_core.comm import (
    AllGather,
    ProcessGroupAllGather,
    ProcessGroupReduceScatter,
    ReduceScatter,
    SymmetricAllGather,
    SymmetricReduceScatter,
)
from fsdp_core.errors import ArgumentError, ArgumentTypeError, StateError
from fsdp_core.runtime.fsdp_state import FSDPState, state_of, states_in

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_core.options import UnitOptions
    from fsdp_core.param import FSDPParamGroup


class Setters:
    """With several groups in a unit, what concerns communication holds for each of them."""

    # -- When parameters are resharded, and gradients reduced

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether forward ends by resharding the parameters; overrides the root's rule.

        Raises:
            ArgumentError: Not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ArgumentError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for state in self._states(recurse=recurse):
            state.options.reshard_after_forward = reshard_after_forward
            for group in state.groups:
                group.options.reshards_to_smaller_mesh = False

    def set_reshard_after_backward(
        self,
        reshard_after_backward: bool,
        *,
        recurse: bool = True,
    ) -> None:
        """Sets whether backward ends by resharding the parameters; the default is yes.

        False saves the gathers of the following microbatches.
        """
        for state in self._states(recurse=recurse):
            state.options.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Sets whether backward unshards this unit; an embedding does not need it."""
        self._get_fsdp_state().options.unshard_in_backward = unshard_in_backward

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Sets, for all units below, whether forward and backward gather on the current stream.

        That spares the memory pools of other streams, but only explicit prefetching then overlaps.
        """
        for state in self._states(recurse=True):
            state.options.unshard_inline = async_op

    def set_requires_gradient_sync(
        self,
        requires_gradient_sync: bool,
        *,
        recurse: bool = True,
    ) -> None:
        """Sets whether backward reduces gradients; False accumulates them unsharded."""
        for state in self._states(recurse=recurse):
            state.options.reduce_grads = requires_gradient_sync
            for group in state.groups:
                group.options.all_reduce_grads = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backwards below this module accumulate gradients without communication.

        At the end, even after an exception, every unit reduces as before.
        """
        before = [
            (state, state.options.reduce_grads, [g.options.all_reduce_grads for g in state.groups])
            for state in self._states(recurse=True)
        ]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for state, reduce_grads, all_reduce_grads in before:
                state.options.reduce_grads = reduce_grads
                for group, value in zip(state.groups, all_reduce_grads, strict=True):
                    group.options.all_reduce_grads = value

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Sets, on the root, whether the next backward is the last before the optimizer.

        Only the last one makes the current stream wait for the gradients, and resets the prefetch
        order.
        """
        self._root_options.is_last_backward = is_last_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Sets, on the root, what the gathers of the next forward wait for.

        Without it they wait for everything that is on the current stream then. It is used once:
        record a new event after each optimizer step.
        """
        self._root_options.post_optim_event = event

    # -- What is reduced

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether replicas average (HSDP); False keeps partial sums of the slices."""
        for group in self._groups(recurse=recurse):
            group.options.all_reduce_grads = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sets by what gradients are divided, instead of by the number of ranks."""
        for group in self._groups():
            group.options.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        warnings.warn("Use `set_gradient_divide_factor` instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sets whether collectives only sum and divisions are separate, for zero-copy transfers."""
        for group in self._groups():
            group.options.force_sum = enable

    def set_reduce_scatter_unused_params(
        self,
        reduce_scatter_unused_params: bool,
        *,
        recurse: bool = True,
    ) -> None:
        """Sets whether trainable parameters without a gradient are reduced as zeros."""
        for group in self._groups(recurse=recurse):
            group.options.reduce_unused = reduce_scatter_unused_params

    def set_agree_on_unused_params(self, agree: bool, *, recurse: bool = True) -> None:
        """Sets whether ranks exchange which gradients they lack; on by default.

        So ranks may use different parameters of a unit, and a gradient that no rank has stays
        None. Without it all ranks must use the same ones.
        """
        for group in self._groups(recurse=recurse):
            group.options.agree_on_unused = agree

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Sets how many reductions may be in flight besides the one being packed.

        More of them hide a slow network but need more buffers. The largest number of the root's
        units applies.

        Raises:
            ArgumentTypeError: Not an int.
            ArgumentError: Less than 1, or more with symmetric memory, whose pool has one buffer.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise ArgumentTypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ArgumentError(
                f"max_input_buffers must be a positive int, got {max_input_buffers}"
            )
        states = list(self._states(recurse=recurse))
        for state in states:
            for group in state.groups:
                _check_buffers(group.options.reduce_scatter, max_input_buffers, state.fqn)
        for state in states:
            state.options.max_reduces = max_input_buffers

    # -- Who communicates, and in which memory

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Replaces the all-gather and the allocation of its buffer."""
        for group in self._groups():
            group.options.all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Replaces the reduce-scatter and the allocation of its buffers."""
        for group in self._groups():
            group.options.reduce_scatter = comm

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Sets what is called with the reduced gradients, before they are divided and cast.

        Args:
            hook: Changes its argument in place: 1D, the slices of one group end to end. After
                the reduce-scatter, and after the all-reduce over replicas if there is one.
            stream: Where it runs; not with replicas, whose all-reduce decides.

        Raises:
            ArgumentError: A stream although the mesh has replicas.
        """
        groups = list(self._groups())
        if stream is not None and any(group.replicates for group in groups):
            raise ArgumentError("stream cannot be set when using native HSDP")
        for group in groups:
            group.options.all_reduce_hook = hook
            if stream is not None:
                group.options.all_reduce_hook_stream = stream

    def set_separate_reduce_scatter_group(
        self,
        enable: bool = True,
        *,
        recurse: bool = True,
    ) -> None:
        """Sets whether reduce-scatters have process groups of their own.

        One communicator does one collective at a time; with two, all-gathers and
        reduce-scatters of backward overlap on the wire. There is one new group per distinct set
        of ranks. Collective: call it on all ranks of the mesh.
        """
        groups = [g for g in self._groups(recurse=recurse) if g.shard_group is not None]
        made: dict[tuple[int, ...], dist.ProcessGroup] = {
            _ranks_of(group): group.options.reduce_group
            for group in groups
            if group.options.reduce_group is not None
        }
        for group in groups:
            group.options.reduce_group = _separate_group(_ranks_of(group), made) if enable else None

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Sets whether communication buffers come from the process group's own allocator.

        Without such an allocator, ordinary memory is used.

        Raises:
            StateError: A custom collective was set, which allocates for itself.
        """
        replaceable = (ProcessGroupAllGather, ProcessGroupReduceScatter)
        for group, shard_group in self._sharding_groups():
            _check_replaceable(group, replaceable, "set_allocate_memory_from_process_group")
            group.options.all_gather = ProcessGroupAllGather(shard_group) if enable else None
            group.options.reduce_scatter = (
                ProcessGroupReduceScatter(group.options.reduce_group or shard_group)
                if enable
                else None
            )

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Takes communication buffers from symmetric memory, for NCCL's faster collectives.

        The reduce-scatter takes part only after `set_force_sum_reduction_for_comms(True)`: its
        symmetric kernel supports only sums.

        Raises:
            ArgumentError: Another backend of symmetric memory, or several reductions in flight.
            UnsupportedError: The process group does not communicate through NCCL.
            StateError: A custom collective was set, which allocates for itself.
        """
        replaceable = (SymmetricAllGather, SymmetricReduceScatter)
        state = self._get_fsdp_state()
        for group, shard_group in self._sharding_groups():
            _check_replaceable(group, replaceable, "set_symm_mem")
            gather = SymmetricAllGather(shard_group, backend)
            if group.options.force_sum:
                reduce = SymmetricReduceScatter(group.options.reduce_group or shard_group, backend)
                _check_buffers(reduce, state.options.max_reduces, state.fqn)
                group.options.reduce_scatter = reduce
            group.options.all_gather = gather

    # -- From a module to its unit

    def _get_fsdp_state(self) -> FSDPState:
        state = state_of(cast("nn.Module", self))
        if state is None:
            raise StateError(f"No FSDP state found on {self}")
        return state

    def _states(self, *, recurse: bool) -> Iterator[FSDPState]:
        if recurse:
            yield from states_in(cast("nn.Module", self))
        else:
            yield self._get_fsdp_state()

    def _groups(self, *, recurse: bool = False) -> Iterator[FSDPParamGroup]:
        for state in self._states(recurse=recurse):
            yield from state.groups

    @property
    def _root_options(self) -> UnitOptions:
        return self._get_fsdp_state().context.root.options

    def _sharding_groups(self) -> Iterator[tuple[FSDPParamGroup, dist.ProcessGroup]]:
        for group in self._groups():
            if (shard_group := group.shard_group) is not None:
                yield group, shard_group


def _ranks_of(group: FSDPParamGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group.shard_group))


def _separate_group(
    ranks: tuple[int, ...], made: dict[tuple[int, ...], dist.ProcessGroup]
) -> dist.ProcessGroup:
    if ranks not in made:
        # Only the members meet: each shard group of an HSDP mesh makes its own.
        made[ranks] = torch_private.group_of_members(ranks, "fsdp_reduce_scatter")
    return made[ranks]


def _check_replaceable(group: FSDPParamGroup, own: tuple[type, ...], setter: str) -> None:
    options = group.options
    for what, comm in (
        ("all gather", options.all_gather),
        ("reduce scatter", options.reduce_scatter),
    ):
        if comm is not None and not isinstance(comm, own):
            raise StateError(
                f"cannot call {setter}() when {what} comm is custom: {type(comm).__name__}"
            )


def _check_buffers(comm: ReduceScatter | None, buffers: int, fqn: str) -> None:
    if buffers > 1 and isinstance(comm, SymmetricReduceScatter):
        raise ArgumentError(
            "set_reduce_scatter_max_input_buffers(>1) is not supported with the symmetric-memory "
            f"reduce-scatter of unit {fqn!r}: its pool has one buffer. Keep max_input_buffers=1."
        )
