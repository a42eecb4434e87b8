"""One sharded parameter.

The tensors of a parameter, in the order in which they arise:

original
    What was registered on the module when `fully_shard` was called.
whole local
    What this rank holds of it before it is sharded over data-parallel ranks: the original, or
    the local tensor of an original that tensor parallelism or an SPMD mesh has split. All slicing
    is of the whole local in the order in which it lies in memory.
sharded
    A DTensor parameter. Its local tensor is this rank's slice, at the start of a buffer that is
    padded to the size of the largest slice; no user sees the padding.
send data
    That buffer, flat: what an all-gather contributes.
sharded post forward
    A slice of the whole for a smaller mesh, kept between forward and backward.
unsharded
    The whole local in the dtype of computation, in the form of the original; see
    `UnshardedParam`, and `ExtendedParam` for tensor subclasses.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.errors import StateError
from fsdp_core.layout import Slicing
from fsdp_core.param import slices
from fsdp_core.param.extension import ExtendedParam, ExtensionPlace, is_extended
from fsdp_core.param.grads import Contribution, UnreducedGrad
from fsdp_core.param.offload import HostMemory
from fsdp_core.param.post_forward import PostForwardSlice, cannot_keep_part
from fsdp_core.param.registration import (
    check_dense,
    check_grad,
    check_replacement,
    inherit,
    replaced_unseen,
)
from fsdp_core.param.sharding_spec import whole_local
from fsdp_core.param.slices import MemoryOrder
from fsdp_core.param.unsharded import Unsharded, UnshardedParam

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsdp_core.comm import CommContext, Stream
    from fsdp_core.param.registration import ParamSlot
    from fsdp_core.param.sharding_spec import ShardingChoice


class FSDPParam:
    """Shards a parameter at construction and converts it between its forms.

    Attributes:
        fqn: Name from the root module once the root is known, before that from the unit.
        slot: Where the parameter is registered.
        slicing: How the whole local is cut over the shard axis.
        sharded_param: The DTensor parameter that the optimizer holds.
        post_forward: Its slice for a smaller mesh, which forward may reshard to; None: there is none.
        awaits_reduce: Whether some backward since the last reduction may have left a gradient on
            some rank: then it takes part in the next one, frozen by then or not.
        changes: Counts how often one of its tensors, or a place where it is registered, became
            another: what was worked out for them is out of date then.
    """

    def __init__(self, choice: ShardingChoice) -> None:
        """Shards a parameter as was chosen for it."""
        self.fqn = choice.slot.fqn
        self.slot = choice.slot
        self._unreduced = UnreducedGrad()
        self.awaits_reduce = False
        self.changes = 0
        self._info = choice.info
        self._policy = choice.options.mp_policy
        self._memory = HostMemory.of(choice.options.offload, choice.info.device)
        self._unsharded: Unsharded | None = None
        self._whole_memory: torch.Tensor | None = None

        self._spec = choice.spec
        whole = whole_local(choice.original).detach()
        self._order = MemoryOrder.of(whole)
        self.slicing, padded = self._cut(self._order.physical(whole), choice.dim)
        smaller = choice.post_forward
        self.post_forward = None if smaller is None else PostForwardSlice(smaller, self.slicing)
        padded = self._memory.take(padded)
        self._send_data = padded.view(-1)
        self.sharded_param = nn.Parameter(
            self._spec.sharded(self._seen(padded)), requires_grad=choice.original.requires_grad
        )
        self._taken_over = self._local
        self._is_extended = is_extended(self._taken_over, self.fqn)
        self.slot.register(self.sharded_param)

    def _cut(self, whole: torch.Tensor, dim: int | None) -> tuple[Slicing, torch.Tensor]:
        """How `whole`, as it lies in memory, is cut on `dim` as users see it; and the padded slice."""
        cut_dim = None if dim is None else self._order.dims.index(dim)
        slicing = Slicing.of(whole.shape, cut_dim, self._info.shard.size)
        return slicing, slices.cut(whole, slicing, self._info.shard.rank)

    def _seen(self, padded: torch.Tensor) -> torch.Tensor:
        """A padded slice as users see it."""
        return self._order.seen(self._own_slice(padded))

    # -- What it is

    @property
    def orig_dtype(self) -> torch.dtype:
        """Of the sharded parameter, its gradient and its optimizer state."""
        return self.sharded_param.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the unsharded parameter."""
        wanted = self._policy.param_dtype
        if wanted is None or not self.orig_dtype.is_floating_point:
            return self.orig_dtype
        return wanted

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """In which gradients travel and are accumulated; None: in which autograd makes them."""
        wanted = self._policy.reduce_dtype
        return None if wanted == self._policy.param_dtype else wanted

    @property
    def kept_dtype(self) -> torch.dtype:
        """In which gradients wait for a reduction, and travel; the same on all ranks."""
        return self.reduce_dtype or self.compute_dtype

    @property
    def is_trainable(self) -> bool:
        """Whether it gets gradients."""
        return self.sharded_param.requires_grad

    @property
    def may_have_grad(self) -> bool:
        """Whether some rank may have a gradient that is not reduced."""
        return self.is_trainable or self.awaits_reduce

    @property
    def is_converted(self) -> bool:
        """Whether the slice became another tensor: by `Module.to` of a part of the unit, for example."""
        return self._local is not self._taken_over

    @property
    def is_meta(self) -> bool:
        """Whether the slice has no values yet."""
        return self.sharded_param.is_meta

    @property
    def is_misplaced(self) -> bool:
        """Whether the slice is not where the offload policy wants it."""
        return not self._memory.holds(self._local)

    def unsharded(self) -> Unsharded:
        """The whole parameter, made at the first request in the dtype of computation."""
        if self._is_extended:
            if (
                not isinstance(self._unsharded, ExtendedParam)
                or self._unsharded.dtype != self.compute_dtype
            ):
                self._give_up_whole()
                self._unsharded = ExtendedParam(self._extension_place(), self.compute_dtype)
            return self._unsharded
        known = self._unsharded
        if not isinstance(known, UnshardedParam) or known.flat.dtype != self.compute_dtype:
            self._give_up_whole()
            self._unsharded = UnshardedParam(
                self._flat_numel,
                self._whole_from_flat,
                dtype=self.compute_dtype,
                device=self._info.device,
                memory=self._whole_memory,
            )
        return cast("Unsharded", self._unsharded)

    def register_also_at(self, slot: ParamSlot) -> None:
        """Adds the places where another unit's modules have the same parameter."""
        self.slot = self.slot.joined(slot)
        self.changes += 1
        self.slot.register(self.sharded_param)

    # -- Between its forms

    def to_sharded(self) -> None:
        """Registers the slice and frees everything else."""
        self.slot.register(self.sharded_param)
        self._drop_smaller()
        if self._unsharded is not None:
            self._unsharded.free()

    def to_sharded_post_forward(self) -> None:
        """Registers this rank's slice for the smaller mesh and frees the whole.

        Raises:
            StateError: There is no smaller mesh, or the parameter is not whole.
        """
        smaller, whole = self.post_forward, self._unsharded
        if smaller is None or not isinstance(whole, UnshardedParam):
            raise StateError(f"Parameter {self.fqn!r} cannot be resharded to a smaller mesh.")
        part = smaller.keep(whole, self._order, self._dtensor)
        self.slot.register(nn.Parameter(part, requires_grad=self.is_trainable))
        whole.free()

    def to_unsharded(self) -> None:
        """Registers the whole parameter, already filled.

        Raises:
            StateError: The user has registered another since the slices were taken over.
        """
        parameter = self.unsharded().parameter
        if self.post_forward is None and not self.slot.holds(self.sharded_param, parameter):
            raise replaced_unseen(self.fqn)
        if parameter.requires_grad != self.is_trainable:
            # The method is forbidden within a transform of torch.func, even where that is off.
            parameter.requires_grad = self.is_trainable
        self._unreduced.watch(parameter)
        self.slot.register(parameter)
        self._drop_smaller()

    def refresh(self) -> None:
        """Takes over what the user registered on the module, and pads it again.

        `Module.to`, `to_empty` and `load_state_dict(assign=True)` replace the parameter or its
        local tensor by one without padding.

        Raises:
            ArgumentTypeError: The new parameter is no DTensor.
            ArgumentError: It has another shape, or lies otherwise, than the old one.
            UnsupportedError: It has all-gather extensions and is to be resharded to a smaller mesh.
        """
        self._take_over(self.slot.registered())
        self.slot.register(self.sharded_param)  # at all places: ties survive an assignment to one
        local = self._taken_over = self._local
        self._set_extended(is_extended(local, self.fqn))
        if self._is_extended and self.post_forward is not None:
            raise cannot_keep_part("extended", self.fqn)
        if local.is_meta or self._is_padded_already(local):
            return
        # The first forward, which may be for inference, must leave slices that training can update.
        with torch_private.outside_inference_mode(), torch.no_grad():
            physical = padded = self._order.physical(local)
            is_full = physical.shape == torch.Size(self.slicing.padded_shape)
            if not is_full or not physical.is_contiguous():
                padded = slices.pad(physical, self.slicing)
            padded = self._memory.keep(padded)
            if padded is not physical:
                self._replace_local(padded)
        self._set_send_data(padded.view(-1))

    # -- What a gather sends and fills

    def all_gather_inputs(self) -> list[tuple[torch.Tensor, torch.dtype]]:
        """What this rank sends, each 1D on the device, and the dtype it travels in."""
        if self._is_extended:
            extended = cast("ExtendedParam", self.unsharded())
            sent = extended.inputs(self._memory.to_device(self._local))
            return [(tensor, tensor.dtype) for tensor in sent]
        return [(self._memory.to_device(self._send_data), self.compute_dtype)]

    def all_gather_outputs(self, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
        """Memory for what arrives: for each input, (parts, elements).

        It is the whole parameter itself where rows end to end are the parameter.
        """
        whole = self.unsharded()
        if isinstance(whole, ExtendedParam):
            return whole.destinations(dtypes, self._info.device)
        return [cast("UnshardedParam", whole).destination(self.slicing)]

    def finish_gather(self, arrived: list[torch.Tensor]) -> None:
        """Makes the whole parameter from what `all_gather_outputs` returned, now filled."""
        whole = self.unsharded()
        if isinstance(whole, ExtendedParam):
            whole.complete(self._local, self._whole_from_extended)
        else:
            cast("UnshardedParam", whole).fill(arrived[0], self.slicing)

    # -- Slices in shared memory

    @property
    def is_plain(self) -> bool:
        """Whether it is gathered as it is: no tensor class of its own, no smaller mesh."""
        return not self._is_extended and self.post_forward is None

    @property
    def is_offloaded(self) -> bool:
        """Whether slices live on the host and are copied to the device for a gather."""
        return self._memory.offloads

    @property
    def has_axes(self) -> bool:
        """Whether it lies on axes of its own besides those of data parallelism."""
        return self._spec.is_dtensor

    @property
    def send_data(self) -> torch.Tensor:
        """What a gather sends before it is cast: the padded slice, 1D."""
        return self._send_data

    def move_slice(self, memory: torch.Tensor) -> None:
        """Moves the slice to `memory`, 1D, of the original dtype and `slicing.row` elements."""
        with torch_private.outside_inference_mode(), torch.no_grad():
            memory.copy_(self._send_data)
            self._replace_local(memory.view(self.slicing.padded_shape))
        self._set_send_data(memory)

    def share_whole(self, memory: torch.Tensor | None) -> None:
        """Has modules compute in `memory`, which all ranks of the host share; None: in its own."""
        self._whole_memory = memory
        self._give_up_whole()

    def pieces(self, rows: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of which copies the whole parameter is made.

        Args:
            rows: The padded slices of all ranks, 1D, by rank.

        Returns:
            Views of the whole parameter's memory, and of `rows`.
        """
        flat, slicing = cast("UnshardedParam", self.unsharded()).flat, self.slicing
        if slicing.leads:
            parts = flat[: slicing.row * slicing.parts].view(slicing.parts, slicing.row)
            return list(zip(parts.unbind(), rows, strict=True))
        whole = flat[: slicing.total].view(slicing.shape)
        if slicing.dim is None:
            own_row = rows[self._info.shard.rank]
            return [(whole, own_row.view(slicing.shape))]
        return [
            (
                whole.narrow(slicing.dim, *slicing.bounds(part)),
                slices.own(row.view(slicing.padded_shape), slicing, part),
            )
            for part, row in enumerate(rows)
        ]

    # -- Gradients

    def take_grad(self) -> torch.Tensor | None:
        """Removes and returns the whole local gradient of this backward and those not yet reduced.

        It lies in memory as the whole local does.

        Raises:
            TensorKindError: It is sparse.
        """
        grad = self._unreduced.take(self._computed)
        if grad is None:
            return None
        check_dense(self.fqn, grad)
        return self.in_memory_order(self._spec.local_grad(grad))

    def in_memory_order(self, seen: torch.Tensor) -> torch.Tensor:
        """A tensor of the whole local's form with its dims in the order in which they lie in memory."""
        return self._order.physical(seen)

    def zero_grad(self) -> torch.Tensor:
        """A whole local gradient of zeros, as `take_grad` returns one."""
        return torch.zeros(self.slicing.shape, dtype=self.kept_dtype, device=self._info.device)

    def watch_grads(self, on_arrival: Callable[[torch.Tensor], None]) -> None:
        """Has `on_arrival` called each time autograd has added to the whole gradient."""
        this = weakref.ref(self)

        def arrived(whole: torch.Tensor) -> None:
            if (param := this()) is not None:
                param.take_late_grad(whole)
            on_arrival(whole)

        self._unreduced.on_arrival = arrived

    def take_late_grad(self, whole: torch.Tensor) -> None:
        """Takes over the gradient of `whole` if that was given up, for a conversion, after a forward with it."""
        if whole is not self._computed:
            self._unreduced.convert(cast("nn.Parameter", whole), self.kept_dtype)
            self.changes += 1

    def take_contribution(self, *, covers_unused: bool) -> Contribution | None:
        """Takes the gradient for a reduction.

        Args:
            covers_unused: Whether a parameter without one, of which another rank may have one,
                takes part with zeros.
        """
        grad = self.take_grad()
        had_one = grad is not None
        if grad is None:
            if not covers_unused or not self.may_have_grad:
                return None
            grad = self.zero_grad()
        # Not of the gradient itself, which may be from before a conversion, on this rank alone. What an
        # extension makes may have another dtype than that of computation.
        own = grad.dtype if self._is_extended else self.compute_dtype
        return Contribution(self, grad, [had_one], self.reduce_dtype or own)

    def keep_grad(self) -> None:
        """Keeps this backward's gradient, in the reduce dtype, for one that reduces."""
        self._unreduced.keep(self._computed, self.reduce_dtype)

    def drop_grads(self) -> None:
        """Forgets gradients that were not reduced."""
        self.awaits_reduce = False
        self._unreduced.drop(self._computed)

    def add_sharded_grads(
        self, row: torch.Tensor, present: Sequence[bool], comm: CommContext, stream: Stream
    ) -> None:
        """Adds a reduced slice if `present`, of one flag, says that some rank had a gradient."""
        if all(present):
            self.add_own_grad(self._own_slice(row.view(self.slicing.padded_shape)), comm, stream)

    def add_own_grad(self, own: torch.Tensor, comm: CommContext, stream: Stream) -> None:
        """Adds a reduced slice to the sharded parameter's gradient and runs the user's hooks.

        Args:
            own: Without padding, its dims in the order in which they lie in memory; kept, not copied,
                where it has the original dtype.
            comm: Whose stream a copy to the host is placed on.
            stream: On which the caller is.

        Raises:
            TensorKindError: The user has set a gradient that is no DTensor, or that lies otherwise.
        """
        local = self._order.seen(own if own.dtype == self.orig_dtype else own.to(self.orig_dtype))
        self._accumulate(local, comm, stream)

    def _accumulate(self, local: torch.Tensor, comm: CommContext, stream: Stream) -> None:
        sharded = self.sharded_param
        hooks = torch_private.post_accumulate_hooks(sharded)
        total = sharded.grad
        if total is not None:
            check_grad(self.fqn, total, local)
        # With hooks, nobody on the host may look at it before the copy has arrived.
        local = self._memory.take_grad(local, comm, stream, may_overlap=total is None and not hooks)
        if total is None:
            sharded.grad = self._spec.sharded(local)
        else:
            summed = torch_private.local_tensor(cast("DTensor", total))
            summed += local
        for hook in hooks:
            hook(sharded)

    # -- Inside

    def _give_up_whole(self) -> None:
        """Another whole parameter is to follow, which has no part in what this one's gradient holds."""
        self._unreduced.convert(self._computed, self.kept_dtype)
        self._unsharded = None
        self.changes += 1

    def _replace_local(self, padded: torch.Tensor) -> None:
        self._taken_over = self._seen(padded)
        torch_private.replace_local(self._dtensor, self._taken_over)

    def _set_extended(self, value: bool) -> None:  # noqa: FBT001 - a setter
        if value != self._is_extended:
            self._is_extended = value
            self.changes += 1

    def _set_send_data(self, data: torch.Tensor) -> None:
        if data is not self._send_data:
            self._send_data = data
            self.changes += 1

    @property
    def _dtensor(self) -> DTensor:
        return cast("DTensor", self.sharded_param)

    @property
    def _local(self) -> torch.Tensor:
        return torch_private.local_tensor(self._dtensor)

    def _take_over(self, registered: nn.Parameter) -> None:
        spec = check_replacement(self.fqn, registered, self._spec.sharded_spec, self._held_shapes)
        if registered is not self.sharded_param:
            self.changes += 1
            self._spec = self._spec.rebased(spec)
            inherit(self.sharded_param, registered)
        self.sharded_param = registered

    @property
    def _computed(self) -> nn.Parameter | None:
        whole = self._unsharded
        if whole is None or (isinstance(whole, ExtendedParam) and not whole.exists):
            return None
        return whole.parameter

    @property
    def _flat_numel(self) -> int:
        ways = (
            [self.slicing]
            if self.post_forward is None
            else [self.slicing, self.post_forward.slicing]
        )
        return max(each.row * each.parts if each.leads else each.total for each in ways)

    def _own_slice(self, padded: torch.Tensor) -> torch.Tensor:
        return slices.own(padded, self.slicing, self._info.shard.rank)

    def _drop_smaller(self) -> None:
        if self.post_forward is not None:
            self.post_forward.drop()

    @property
    def _held_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Which shapes this rank's local tensor may have: without padding, and with it."""
        own = self.slicing.shape_of(self._info.shard.rank)
        return self._order.seen_shape(own), self._order.seen_shape(self.slicing.padded_shape)

    def _whole_from_flat(self, flat: torch.Tensor) -> torch.Tensor:
        physical = flat[: self.slicing.total].view(self.slicing.shape)
        return self._spec.unsharded(self._order.seen(physical))

    def _whole_from_extended(self, tensor: torch.Tensor) -> torch.Tensor:
        dim = self.slicing.dim or 0
        length = self.slicing.shape[dim]
        if tensor.size(dim) != length:
            tensor = tensor.narrow(dim, 0, length)
        return self._spec.unsharded(tensor)

    def _extension_place(self) -> ExtensionPlace:
        module, _ = self.slot.places[0]
        return ExtensionPlace(self.fqn, module, self._info.shard_mesh, self._policy, self.slicing)

    def _is_padded_already(self, local: torch.Tensor) -> bool:
        if type(self._send_data) is not torch.Tensor:
            return False
        # An empty tensor's storage may be at address 0, which says nothing.
        ours = self._send_data.untyped_storage().data_ptr()
        return ours > 0 and ours == local.untyped_storage().data_ptr()
