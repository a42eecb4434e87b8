"""One sharded parameter.

The tensors of a parameter, in the order in which they arise:

original
    What hung on the module when `fully_shard` was called.
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

from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_core import torch_private
from fsdp_core.errors import ArgumentTypeError, StateError, UnsupportedError
from fsdp_core.layout import Slicing
from fsdp_core.param import slices
from fsdp_core.param.grad_batch import Contribution
from fsdp_core.param.offload import HostMemory
from fsdp_core.param.placing import place
from fsdp_core.param.tensor_extension import ExtendedParam, ExtensionPlace, is_extended
from fsdp_core.param.unsharded_param import Unsharded, UnshardedParam

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsdp_core.comm import CommLink, DataParallelMeshInfo, Lane
    from fsdp_core.param.param_options import ParamOptions
    from fsdp_core.param.slot import ParamSlot


class FSDPParam:
    """Shards a parameter at construction and converts it between its forms.

    Attributes:
        fqn: Name from the root module once the root is known, before that from the unit.
        slot: Where the parameter hangs.
        slicing: How the whole local is cut over the shard axis.
        sharded_param: The DTensor parameter that the optimizer holds.
        accumulated_grad: Whole gradient in the reduce dtype, summed over backwards that did
            not reduce; None if there is none.
    """

    def __init__(
        self,
        param: nn.Parameter,
        slot: ParamSlot,
        info: DataParallelMeshInfo,
        dim: int | None,
        options: ParamOptions,
    ) -> None:
        """Shards `param`.

        Args:
            param: On `info.device` or meta.
            slot: Where it hangs.
            info: Mesh and roles of its axes.
            dim: Tensor dim to shard on; None: every rank holds the whole.
            options: Dtypes, where slices live, and the smaller mesh, if any.
        """
        self.fqn = slot.fqn
        self.slot = slot
        self.accumulated_grad: torch.Tensor | None = None
        self._info = info
        self._policy = options.policy
        self._memory = HostMemory.of(options.offload, info.device)
        self._unsharded: Unsharded | None = None
        self._post_forward_info = options.post_forward
        self._post_forward_data: torch.Tensor | None = None

        self._placing = place(param, slot.fqn, info, dim)
        whole = self._placing.local.detach()
        self._order = slices.dense_order(whole) or tuple(range(whole.ndim))
        self._is_reordered = self._order != tuple(range(whole.ndim))
        physical = self._as_physical(whole)
        cut_dim = None if dim is None else self._order.index(dim)
        self.slicing = Slicing.of(physical.shape, cut_dim, info.shard.size)
        padded = self._memory.take(slices.cut(physical, self.slicing, info.shard.rank))
        self._send_data = padded.view(-1)
        self.sharded_param = nn.Parameter(
            self._placing.sharded(self._as_original(self._own_slice(padded))),
            requires_grad=param.requires_grad,
        )
        self._is_extended = is_extended(self._local, self.fqn)
        slot.register(self.sharded_param)

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
    def is_trainable(self) -> bool:
        """Whether it gets gradients."""
        return self.sharded_param.requires_grad

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
            if not isinstance(self._unsharded, ExtendedParam):
                self._unsharded = ExtendedParam(self._extension_place())
            return self._unsharded
        known = self._unsharded
        if not isinstance(known, UnshardedParam) or known.flat.dtype != self.compute_dtype:
            self._unsharded = UnshardedParam(
                self._flat_numel,
                self._whole_from_flat,
                dtype=self.compute_dtype,
                device=self._info.device,
            )
        return cast("Unsharded", self._unsharded)

    def hang_also_at(self, slot: ParamSlot) -> None:
        """Adds the places where another unit's modules have the same parameter."""
        self.slot = self.slot.joined(slot)
        self.slot.register(self.sharded_param)

    # -- Between its forms

    def to_sharded(self) -> None:
        """Hangs the slice on the modules and frees everything else."""
        self.slot.register(self.sharded_param)
        self._post_forward_data = None
        if self._unsharded is not None:
            self._unsharded.free()

    def to_sharded_post_forward(self) -> None:
        """Hangs this rank's slice for the smaller mesh on the modules and frees the whole.

        Raises:
            StateError: There is no smaller mesh, or the parameter is not whole.
        """
        info, whole = self._post_forward_info, self._unsharded
        if info is None or not isinstance(whole, UnshardedParam):
            raise StateError(f"Parameter {self.fqn!r} cannot be resharded to a smaller mesh.")
        slicing = self._post_forward_slicing
        physical = whole.flat[: slicing.total].view(slicing.shape)
        padded = slices.cut(physical, slicing, info.shard.rank)
        self._post_forward_data = padded.view(-1)
        local = self._as_original(slices.own(padded, slicing, info.shard.rank))
        placement = Replicate() if slicing.dim is None else Shard(self._order[slicing.dim])
        self.slot.register(
            nn.Parameter(
                torch_private.new_dtensor(
                    local,
                    info.mesh,
                    (Replicate(), placement),
                    shape=self.sharded_param.shape,
                    stride=self.sharded_param.stride(),
                ),
                requires_grad=self.is_trainable,
            )
        )
        whole.free()

    def to_unsharded(self) -> None:
        """Hangs the whole parameter, already filled, on the modules."""
        parameter = self.unsharded().parameter
        if parameter.requires_grad != self.is_trainable:
            # The method is forbidden within a transform of torch.func, even where that is off.
            parameter.requires_grad = self.is_trainable
        self.slot.register(parameter)
        self._post_forward_data = None

    def refresh(self) -> None:
        """Takes over what the user hung on the module, and pads it again.

        `Module.to`, `to_empty` and `load_state_dict(assign=True)` replace the parameter or its
        local tensor by one without padding.

        Raises:
            ArgumentTypeError: The new parameter is no DTensor.
            UnsupportedError: It has all-gather extensions and is to be resharded to a smaller mesh.
        """
        registered = self.slot.registered()
        if not isinstance(registered, DTensor):
            raise ArgumentTypeError(
                f"Parameter {self.fqn!r} was replaced by a {type(registered).__name__}, but a "
                "sharded parameter must be a DTensor. Assign a DTensor with the placements of "
                "the old one, for example from distribute_tensor."
            )
        if registered is not self.sharded_param:
            self._placing = self._placing.rebased(registered)
        self.sharded_param = registered
        self.slot.register(registered)  # at all places: a tie must survive an assignment to one
        local = self._local
        self._is_extended = is_extended(local, self.fqn)
        if self._is_extended and self._post_forward_info is not None:
            raise cannot_keep_part("extended", self.fqn)
        if local.is_meta or self._is_padded_already(local):
            return
        # The first forward, which may be for inference, must leave slices that training can update.
        with torch_private.outside_inference_mode(), torch.no_grad():
            physical = padded = self._as_physical(local)
            is_full = physical.shape == torch.Size(self.slicing.padded_shape)
            if not is_full or not physical.is_contiguous():
                padded = slices.pad(physical, self.slicing)
            padded = self._memory.keep(padded)
            if padded is not physical:
                torch_private.replace_local(registered, self._as_original(self._own_slice(padded)))
        self._send_data = padded.view(-1)

    # -- What a gather sends and fills

    def all_gather_inputs(self) -> list[tuple[torch.Tensor, torch.dtype]]:
        """What this rank sends, each 1D on the device, and the dtype it travels in."""
        if self._post_forward_data is not None:
            return [(self._post_forward_data, self.compute_dtype)]
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
        plain = cast("UnshardedParam", whole)
        plain.allocate()
        slicing = self._travelling
        if slicing.leads:
            return [plain.flat[: slicing.row * slicing.parts].view(slicing.parts, slicing.row)]
        return [plain.flat.new_empty((slicing.parts, slicing.row))]

    def finish_gather(self, arrived: list[torch.Tensor]) -> None:
        """Makes the whole parameter from what `all_gather_outputs` returned, now filled."""
        whole = self.unsharded()
        if isinstance(whole, ExtendedParam):
            whole.complete(self._local, self.compute_dtype, self._whole_from_extended)
            return
        plain, slicing = cast("UnshardedParam", whole), self._travelling
        if not slicing.leads:
            physical = plain.flat[: slicing.total].view(slicing.shape)
            with torch_private.preserve_version([plain.flat]):
                slices.join(arrived[0], slicing, physical)

    # -- Gradients

    def take_grad(self) -> torch.Tensor | None:
        """Removes and returns the whole local gradient of this backward and those not yet reduced.

        It lies in memory as the whole local does.
        """
        self._add_to_accumulated()
        grad, self.accumulated_grad = self.accumulated_grad, None
        parameter = self._computed
        if grad is None and parameter is not None:
            grad, parameter.grad = parameter.grad, None
        if grad is None:
            return None
        return self._as_physical(self._placing.local_grad(grad))

    def zero_grad(self) -> torch.Tensor:
        """A whole local gradient of zeros, as `take_grad` returns one."""
        dtype = self.reduce_dtype or self.compute_dtype
        return torch.zeros(self.slicing.shape, dtype=dtype, device=self._info.device)

    def take_contribution(self, *, covers_unused: bool) -> Contribution | None:
        """Takes the gradient for a reduction.

        Args:
            covers_unused: Whether a trainable parameter without one takes part with zeros.
        """
        grad = self.take_grad()
        had_one = grad is not None
        if grad is None:
            if not covers_unused or not self.is_trainable:
                return None
            grad = self.zero_grad()
        return Contribution(self, grad, [had_one], self.reduce_dtype or grad.dtype)

    def keep_grad(self) -> None:
        """Keeps this backward's gradient, in the reduce dtype, for one that reduces."""
        self._add_to_accumulated()
        wanted, parameter = self.reduce_dtype, self._computed
        if parameter is None or wanted is None:
            return
        grad = parameter.grad
        if grad is not None and grad.dtype != wanted:
            parameter.grad = None
            self.accumulated_grad = grad.to(wanted)

    def drop_grads(self) -> None:
        """Forgets gradients that were not reduced."""
        self.accumulated_grad = None
        if (parameter := self._computed) is not None:
            parameter.grad = None

    def add_sharded_grads(
        self, row: torch.Tensor, present: Sequence[bool], link: CommLink, lane: Lane
    ) -> None:
        """Adds a reduced slice if `present`, of one flag, says that some rank had a gradient."""
        if all(present):
            self.add_sharded_grad(row, link, lane)

    def add_sharded_grad(self, row: torch.Tensor, link: CommLink, lane: Lane) -> None:
        """Adds a reduced slice to the sharded parameter's gradient and runs the user's hooks.

        Args:
            row: 1D, `slicing.row` elements in the original dtype; kept, not copied.
            link: Whose lane a copy to the host is placed on.
            lane: On which the caller is.
        """
        padded = row.view(self.slicing.padded_shape)
        self._add_local_grad(self._as_original(self._own_slice(padded)), link, lane)

    def _add_local_grad(self, local: torch.Tensor, link: CommLink, lane: Lane) -> None:
        hooks = torch_private.post_accumulate_hooks(self.sharded_param)
        total = self.sharded_param.grad
        local = self._memory.take_grad(
            local,
            link,
            lane,
            # Nobody on the host may look at it before the copy has arrived.
            may_overlap=total is None and not hooks,
        )
        if isinstance(total, DTensor):
            summed = torch_private.local_tensor(total)
            summed += local
        else:
            self.sharded_param.grad = self._placing.sharded(local)
        for hook in hooks:
            hook(self.sharded_param)

    # -- Inside

    @property
    def _local(self) -> torch.Tensor:
        if not isinstance(self.sharded_param, DTensor):
            raise ArgumentTypeError(f"Parameter {self.fqn!r} is no DTensor any more.")
        return torch_private.local_tensor(self.sharded_param)

    @property
    def _computed(self) -> nn.Parameter | None:
        whole = self._unsharded
        if whole is None or (isinstance(whole, ExtendedParam) and not whole.exists):
            return None
        return whole.parameter

    @property
    def _post_forward_slicing(self) -> Slicing:
        if self._post_forward_info is None:
            return self.slicing
        dim = None if self.slicing.dim is None else 0
        return Slicing.of(self.slicing.shape, dim, self._post_forward_info.shard.size)

    @property
    def _travelling(self) -> Slicing:
        if self._post_forward_data is not None:
            return self._post_forward_slicing
        return self.slicing

    @property
    def _flat_numel(self) -> int:
        both = (self.slicing, self._post_forward_slicing)
        return max(each.row * each.parts if each.leads else each.total for each in both)

    def _own_slice(self, padded: torch.Tensor) -> torch.Tensor:
        return slices.own(padded, self.slicing, self._info.shard.rank)

    def _as_physical(self, original: torch.Tensor) -> torch.Tensor:
        # A tensor subclass need not know how to be permuted into what it is.
        return original.permute(self._order) if self._is_reordered else original

    def _as_original(self, physical: torch.Tensor) -> torch.Tensor:
        return physical.permute(slices.inverse(self._order)) if self._is_reordered else physical

    def _whole_from_flat(self, flat: torch.Tensor) -> torch.Tensor:
        physical = flat[: self.slicing.total].view(self.slicing.shape)
        return self._placing.unsharded(self._as_original(physical))

    def _whole_from_extended(self, tensor: torch.Tensor) -> torch.Tensor:
        dim = self.slicing.dim or 0
        length = self.slicing.shape[dim]
        if tensor.size(dim) != length:
            tensor = tensor.narrow(dim, 0, length)
        return self._placing.unsharded(tensor)

    def _extension_place(self) -> ExtensionPlace:
        module, _ = self.slot.places[0]
        return ExtensionPlace(self.fqn, module, self._info.shard_mesh, self._policy, self.slicing)

    def _add_to_accumulated(self) -> None:
        parameter = self._computed
        if self.accumulated_grad is None or parameter is None:
            return
        if parameter.grad is not None:
            self.accumulated_grad += parameter.grad
            parameter.grad = None

    def _is_padded_already(self, local: torch.Tensor) -> bool:
        if type(self._send_data) is not torch.Tensor:
            return False
        # An empty tensor's storage may be at address 0, which says nothing.
        ours = self._send_data.untyped_storage().data_ptr()
        return ours > 0 and ours == local.untyped_storage().data_ptr()


def cannot_keep_part(kind: str, fqn: str) -> UnsupportedError:
    """The refusal to keep slices of a parameter of this `kind` for a smaller mesh."""
    return UnsupportedError(
        f"Resharding to smaller mesh is not supported for {kind} parameters yet, and {fqn!r} is "
        "one. Pass reshard_after_forward=True."
    )
