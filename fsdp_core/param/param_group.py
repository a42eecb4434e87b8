"""The parameters of a unit that communicate together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fsdp_core.comm import HostwiseCollectives, Stream, collectives_on, host_axes_of
from fsdp_core.errors import MetaParameterError, OffloadError
from fsdp_core.options import GroupOptions
from fsdp_core.param.gather import Gathered, LocalGather, PendingGather
from fsdp_core.param.grads import GradBatch, PartialReduce, batches_of
from fsdp_core.param.group_plan import GroupPlan
from fsdp_core.param.owned import OwnedParam, OwnedSection, sections_of
from fsdp_core.param.reduce import LocalReduce, PendingReduce, ReduceRoute
from fsdp_core.param.shared_gather import SharedGather, SharedSlices
from fsdp_core.param.shared_reduce import SharedReducer
from fsdp_core.param.unsharded import UnshardedParam
from fsdp_core.states import ShardedState

if TYPE_CHECKING:
    import torch.distributed as dist

    from fsdp_core.comm import (
        AllGather,
        Collectives,
        CommContext,
        DataParallelMeshInfo,
        Event,
        FSDPMeshInfo,
        HostAxes,
    )
    from fsdp_core.param.fsdp_param import FSDPParam
    from fsdp_core.policy import SharedMemoryPolicy


class FSDPParamGroup:
    """Owns the `ShardedState` of its parameters and the gather that is in flight for them.

    One gather makes all of them whole, and one reduction averages all their gradients.

    Attributes:
        params: In the order in which they are packed; not empty.
        info: Mesh and roles of its axes.
        options: What the setters write.
        is_borrowed: Whether other units compute with some of its parameters too.
        borrowed_in_backward: Whether such a unit's backward has ended since gradients were taken.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        info: DataParallelMeshInfo,
        post_forward: FSDPMeshInfo | None = None,
        shared_memory: SharedMemoryPolicy | None = None,
    ) -> None:
        """Groups `params`, all sharded over `info`.

        Args:
            params: At least one.
            info: Mesh and roles of its axes.
            post_forward: The smaller mesh that forward reshards to, if any.
            shared_memory: Whether ranks of one host exchange tensors through shared memory.
        """
        self.params = tuple(params)
        owned = [param for param in params if isinstance(param, OwnedParam)]
        self._has_owned = bool(owned)
        # What gathers and reductions see, in packing order.
        self._travellers: tuple[FSDPParam | OwnedSection, ...] = (
            *(param for param in params if not isinstance(param, OwnedParam)),
            *sections_of(owned, info),
        )
        self.info = info
        self.options = GroupOptions()
        self.is_borrowed = False
        self.borrowed_in_backward = False
        self._holders: set[Hashable] = set()
        self._post_forward = post_forward
        self._sharded_state = ShardedState.SHARDED
        self._gather: PendingGather | LocalGather | SharedGather | None = None
        self._shared_slices: SharedSlices | None = None
        self._shared_reducer: SharedReducer | None = None
        self._hostwise: HostwiseCollectives | None = None
        if shared_memory is not None and (axes := self._find_host_axes(shared_memory)) is not None:
            group = info.shard.group
            if axes.across is not None and group is not None:
                self._hostwise = HostwiseCollectives(info.shard.name, group, axes)
            else:
                self._shared_reducer = SharedReducer(axes.within)
                if not owned and all(param.is_plain for param in params):
                    self._shared_slices = SharedSlices(
                        params, axes.within, shared_memory, self._end_use
                    )
        self._plan: GroupPlan | None = None
        self._partial = PartialReduce()
        self._route: ReduceRoute | None = None
        self._known_axis: tuple[
            DataParallelMeshInfo | None, AllGather | None, Collectives | None
        ] = (None, None, None)
        self._keeps_grads = False
        self._awaits_reduce = False
        self._resharded: Event | None = None

    @property
    def sharded_state(self) -> ShardedState:
        """Which parameters are registered on the modules."""
        return self._sharded_state

    @property
    def is_unsharded(self) -> bool:
        """Whether the whole parameters are registered and filled."""
        return self._sharded_state is ShardedState.UNSHARDED

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the slices; None if parameters are only replicated."""
        return self.info.shard.group

    @property
    def replicates(self) -> bool:
        """Whether a second mesh axis averages gradients over replicas (HSDP)."""
        return self.info.replicate.group is not None

    @property
    def is_reduction_overdue(self) -> bool:
        """Whether gradients of earlier backwards wait for one that reduces.

        Whole ones that were kept, or sums that wait for an all-reduce that is on again. The same
        on all ranks.
        """
        sums_wait = self.options.all_reduce_grads and not self._partial.is_empty
        return self._awaits_reduce or sums_wait

    @property
    def is_gathering(self) -> bool:
        """Whether a gather is in flight."""
        return self._gather is not None

    def issue_unshard(self, comm: CommContext, *, after_compute: bool) -> None:
        """Starts a gather, unless the parameters are whole or on their way.

        Args:
            comm: Streams and counts.
            after_compute: Whether the slices may still be in use by work on the compute stream;
                at a root's forward and in backward they are known not to be.
        """
        if self.is_unsharded or self.is_gathering:
            return
        if not self._is_post_forward and any(param.is_converted for param in self.params):
            self.refresh()
        if after_compute:
            comm.streams.wait_stream(Stream.PACK, Stream.COMPUTE)
            comm.streams.wait_stream(Stream.GATHER, Stream.COMPUTE)
        if self._resharded is not None:
            # The slices for the smaller mesh were cut on the compute stream.
            comm.streams.wait_event(Stream.PACK, self._resharded)
            self._resharded = None
        if (shared := self._slices_to_share) is not None:
            self._gather = SharedGather.issue(shared, comm, self.info.shard.name, label=self._label)
            return
        mesh, senders = self._gathered_over
        axis = self._axis_of(mesh)
        plan = None if self._is_post_forward else self._current_plan
        issue = partial(
            PendingGather.issue, senders, axis, self.info.device, comm, label=self._label
        )
        if plan is not None and plan.is_all_here and axis.group is None:
            self._gather = LocalGather(plan, comm, axis.name, partial(issue, plan=None))
        else:
            self._gather = issue(plan=plan)

    def _axis_of(self, mesh: DataParallelMeshInfo) -> Collectives:
        strategy = self.options.all_gather
        known_mesh, known_strategy, axis = self._known_axis
        if axis is None or mesh is not known_mesh or strategy is not known_strategy:
            axis = collectives_on(mesh.shard, all_gather=strategy)
            if self._hostwise is not None and strategy is None:
                axis = self._hostwise
            self._known_axis = mesh, strategy, axis
        return axis

    @property
    def _gathered_over(self) -> tuple[DataParallelMeshInfo, Sequence[Gathered]]:
        if self._post_forward is None or not self._is_post_forward:
            return self.info, self._travellers
        slices = [param.post_forward for param in self.params if param.post_forward is not None]
        return self._post_forward, slices

    def finish_unshard(self) -> None:
        """Lands the gather in flight, if any, and registers the whole parameters."""
        if self._gather is None:
            return
        gather, self._gather = self._gather, None
        # Until it has landed some parameters may be whole: one that raises frees them all.
        self._sharded_state = ShardedState.UNSHARDED
        try:
            gather.land()
            self._register_whole()
        except BaseException:
            self.reshard()
            raise

    def drop_gather(self) -> None:
        """Ends a gather that nobody used; its values would be stale after an update."""
        if self._gather is not None:
            gather, self._gather = self._gather, None
            gather.drop()

    def reshard(self) -> None:
        """Registers the slices and frees the whole parameters."""
        if self._sharded_state is not ShardedState.SHARDED:
            if self._is_post_forward:
                self.drop_gather()  # of the slices that are given up here
            if (plan := self._current_plan) is not None:
                plan.register_slices()
            else:
                for param in self.params:
                    param.to_sharded()
            self._sharded_state = ShardedState.SHARDED
            self._resharded = None
            if self._shared_slices is not None:
                self._shared_slices.release()

    def _register_whole(self) -> None:
        if (plan := self._current_plan) is not None:
            plan.register_whole()
            return
        for param in self.params:
            param.to_unsharded()
        if not self._has_owned:
            self._plan = GroupPlan.of(self.params, self.info.shard.rank)

    @property
    def _current_plan(self) -> GroupPlan | None:
        if self._plan is not None and not self._plan.is_current:
            self._plan = None
        return self._plan

    def _end_use(self) -> None:
        # Others would read, or have announced, slices that are about to be written.
        self.drop_gather()
        if any(isinstance(w := p.unsharded(), UnshardedParam) and w.is_shared for p in self.params):
            self.reshard()

    def hold(self, unit: Hashable) -> None:
        """Has the parameters stay whole until `unit` lets go."""
        self._holders.add(unit)

    def let_go(self, unit: Hashable) -> None:
        """`unit` needs them no longer."""
        self._holders.discard(unit)

    @property
    def is_held(self) -> bool:
        """Whether some unit is computing with the parameters."""
        return bool(self._holders)

    def is_held_besides(self, unit: Hashable) -> bool:
        """Whether another than `unit` is."""
        return bool(self._holders - {unit})

    def reshard_after_forward(self, comm: CommContext) -> None:
        """Frees the whole parameters; keeps slices for a smaller mesh if there is one."""
        if self._post_forward is None or not self.options.reshards_to_smaller_mesh:
            self.reshard()
        elif self.is_unsharded:
            for param in self.params:
                param.to_sharded_post_forward()
            self._sharded_state = ShardedState.SHARDED_POST_FORWARD
            self._resharded = comm.streams.record_event(Stream.COMPUTE)

    def reset(self) -> None:
        """Ends what is in flight and drops gradients that were not reduced; registers slices."""
        self.drop_gather()
        for param in self.params:
            param.drop_grads()
        self._partial.clear()
        self._keeps_grads = self._awaits_reduce = False
        self._holders.clear()
        self.reshard()

    def refresh(self) -> None:
        """Takes over what the user did to the slices; see `FSDPParam.refresh`."""
        self.reshard()
        for param in self.params:
            param.refresh()
        if (shared := self._slices_to_share) is not None:
            shared.place()

    def await_released(self) -> None:
        """Waits until no rank computes with parameters that are one copy for all ranks of the host."""
        if self._shared_slices is not None:
            self._shared_slices.await_released()

    def settle(self) -> None:
        """Takes over what the user did since sharding, and checks that training can start.

        Parameters that are whole or on their way were settled when they were gathered.

        Raises:
            MetaParameterError: Parameters have no values yet.
            OffloadError: Slices are not on the host, where the offload policy wants them.
        """
        if self._sharded_state is ShardedState.SHARDED and not self.is_gathering:
            self.refresh()
        self._check_values()

    def keep_grads(self, *, was_reached: bool) -> None:
        """Keeps the gradients whole, for a later backward that reduces them.

        Args:
            was_reached: See `take_grads`.
        """
        self._awaits_reduce |= was_reached
        self._keeps_grads = True
        self.borrowed_in_backward = False
        for param in self.params:
            param.awaits_reduce = param.may_have_grad
            param.keep_grad()

    def take_grads(self, *, was_reached: bool) -> list[GradBatch]:
        """Removes the whole gradients.

        Args:
            was_reached: Whether this backward ran through the unit. Then all ranks reduce all
                its trainable parameters, whichever of them each has used. So they do if an
                earlier backward that was not reduced ran through it, or if sums of earlier
                backwards wait for the all-reduce that is due now.

        Returns:
            One batch for each dtype that gradients travel in.
        """
        takes_part = was_reached or self.is_reduction_overdue
        self._awaits_reduce = self.borrowed_in_backward = False
        agrees = self.options.agree_on_unused and takes_part and self._ranks > 1
        is_agreed = agrees and not self.options.reduce_unused
        batches = self._take_all(is_agreed=is_agreed)
        if batches is None:
            covers_unused = agrees or self.options.reduce_unused
            batches = batches_of(self._travellers, covers_unused=covers_unused, is_agreed=is_agreed)
        is_complete = self.options.all_reduce_grads or not self.replicates
        for param in self.params:
            param.awaits_reduce = not is_complete and param.may_have_grad
        return batches

    def _take_all(self, *, is_agreed: bool) -> list[GradBatch] | None:
        keeps, self._keeps_grads = self._keeps_grads, False
        if keeps or (plan := self._current_plan) is None:
            return None
        batch = plan.take_grads(is_agreed=is_agreed)
        return None if batch is None else [batch]

    def issue_reduce(self, batch: GradBatch, comm: CommContext) -> PendingReduce | LocalReduce:
        """Starts the reduction of a batch from `take_grads`."""
        batch.label = self._label_of(batch)
        route = self._route
        if route is None or route.options != self.options:
            route = self._route = self._new_route()
        if LocalReduce.suits(batch, route):
            return LocalReduce(batch, route, comm)
        return PendingReduce.issue(batch, route, comm)

    def _label_of(self, batch: GradBatch) -> str:
        # Ranks that froze different parameters of one size would add up gradients of different ones.
        is_whole = len(batch.present) == len(self.params)
        return self._label if is_whole else ", ".join(repr(param.fqn) for param in batch.params)

    def _new_route(self) -> ReduceRoute:
        custom, group = self.options.reduce_scatter, self.options.reduce_group
        is_ours = custom is None and group is None
        return ReduceRoute(
            options=replace(self.options),  # setters do not change what is in flight
            shards=self._hostwise
            if is_ours and self._hostwise is not None
            else collectives_on(self.info.shard, reduce_scatter=custom, reduce_group=group),
            replicas=collectives_on(self.info.replicate),
            device=self.info.device,
            partial=self._partial,
            shared=self._shared_reducer if is_ours else None,
        )

    @property
    def _slices_to_share(self) -> SharedSlices | None:
        if self._shared_slices is None or self.options.all_gather is not None:
            return None
        # A slice may have been given the methods of an extension, or another class, since.
        return self._shared_slices if all(p.is_plain for p in self.params) else None

    def _find_host_axes(self, policy: SharedMemoryPolicy) -> HostAxes | None:
        if self.info.device.type != "cpu" or self._post_forward is not None:
            return None
        return host_axes_of(self.info.shard.group, policy.part_of_host)

    @property
    def _label(self) -> str:
        others = len(self.params) - 1
        return repr(self.params[0].fqn) + (f" and {others} more" if others else "")

    @property
    def _ranks(self) -> int:
        return self.info.shard.size * self.info.replicate.size

    @property
    def _is_post_forward(self) -> bool:
        return self._sharded_state is ShardedState.SHARDED_POST_FORWARD

    def _check_values(self) -> None:
        if on_meta := [param.fqn for param in self.params if param.is_meta]:
            raise MetaParameterError(
                "FSDP parameters should be materialized from meta device before training, "
                f"but the following were still on meta device: {on_meta}\n"
                "Call module.to_empty(device=...) and initialize the values, or "
                "load_state_dict(..., assign=True)."
            )
        if misplaced := [param.fqn for param in self.params if param.is_misplaced]:
            raise OffloadError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading, but "
                f"the following are on {self.info.device}: {misplaced}\n"
                'Load a CPU state dict, or call module.to_empty(device="cpu").'
            )
