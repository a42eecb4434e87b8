"""One sharded parameter.

The tensors of a parameter, in the order in which they arise:

original
    What hung on the module when `fully_shard` was called.
sharded
    A DTensor parameter over the mesh axis, `Shard(0)`. Its local tensor has `chunking.size(rank)`
    rows and lies at the start of a buffer of `chunking.width` rows; the rows behind it are
    padding that no user sees.
send data
    That buffer, flat: what a gather contributes.
unsharded
    The whole parameter in the dtype of computation; see `UnshardedParam`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.errors import ArgumentTypeError, UnsupportedError
from fsdp_core.layout import Chunking
from fsdp_core.param.unsharded_param import UnshardedParam

if TYPE_CHECKING:
    from fsdp_core.comm import MeshRoles
    from fsdp_core.param.slot import ParamSlot
    from fsdp_core.policy import MixedPrecisionPolicy


class FSDPParam:
    """Shards a parameter at construction and converts it between its forms.

    Attributes:
        fqn: Name from the root module once the root is known, before that from the unit.
        slot: Where the parameter hangs.
        origin: Identity of the original parameter; equal for two units that share it.
        sharded_param: The DTensor parameter that the optimizer holds.
        chunking: How dim 0 is split.
        accumulated_grad: Whole gradient in the reduce dtype, summed over backwards that did
            not reduce; None if there is none.
    """

    def __init__(
        self, param: nn.Parameter, slot: ParamSlot, roles: MeshRoles, policy: MixedPrecisionPolicy
    ) -> None:
        _check_supported(param, slot.fqn)
        self.fqn = slot.fqn
        self.slot = slot
        self.origin = _origin_of(param)
        self.chunking = Chunking(param.size(0), roles.shard.size)
        self.accumulated_grad: torch.Tensor | None = None
        self._shape = param.shape
        self._rank = roles.shard.rank
        self._device = roles.device
        self._policy = policy
        self._unsharded: UnshardedParam | None = None

        start, rows = self.chunking.start(self._rank), self.chunking.size(self._rank)
        padded = self._pad(param.detach().narrow(0, start, rows))
        self._send_data = padded.view(-1)
        self.sharded_param = nn.Parameter(
            torch_private.new_dtensor(
                padded.narrow(0, 0, rows), roles.mesh, roles.placements(0), shape=param.shape
            ),
            requires_grad=param.requires_grad,
        )
        slot.register(self.sharded_param)

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
    def send_data(self) -> torch.Tensor:
        """This rank's padded slice, 1D, in the original dtype."""
        return self._send_data

    @property
    def padded_row(self) -> int:
        """Elements of a padded slice; the same on every rank."""
        return self.chunking.width * self._shape[1:].numel()

    @property
    def is_meta(self) -> bool:
        """Whether the slice has no values yet."""
        return self.sharded_param.is_meta

    def unsharded(self) -> UnshardedParam:
        """The whole parameter, made at the first request in the dtype of computation."""
        if self._unsharded is None or self._unsharded.flat.dtype != self.compute_dtype:
            self._unsharded = UnshardedParam(
                self._shape, self.chunking, dtype=self.compute_dtype, device=self._device
            )
        return self._unsharded

    def register_sharded(self) -> None:
        """Hangs the slice on the modules and frees the whole parameter's memory."""
        self.slot.register(self.sharded_param)
        if self._unsharded is not None:
            self._unsharded.free()

    def register_unsharded(self) -> None:
        """Hangs the whole parameter, already filled, on the modules."""
        parameter = self.unsharded().parameter
        if parameter.requires_grad != self.sharded_param.requires_grad:
            # The method is forbidden within a transform of torch.func, even where that is off.
            parameter.requires_grad = self.sharded_param.requires_grad
        self.slot.register(parameter)

    def refresh(self) -> None:
        """Takes over what the user hung on the module, and pads it again.

        `Module.to`, `to_empty` and `load_state_dict(assign=True)` replace the parameter or its
        local tensor by one without padding.

        Raises:
            ArgumentTypeError: The new parameter is no DTensor.
        """
        registered = self.slot.registered()
        if not isinstance(registered, DTensor):
            raise ArgumentTypeError(
                f"Parameter {self.fqn!r} was replaced by a {type(registered).__name__}, but a "
                "sharded parameter must be a DTensor. Assign a DTensor with the placements of "
                "the old one, for example from distribute_tensor."
            )
        self.sharded_param = registered
        self.slot.register(registered)  # at all places: a tie must survive an assignment to one
        local = torch_private.local_tensor(self.sharded_param)
        if local.is_meta or self._is_padded_already(local):
            return
        rows = self.chunking.size(self._rank)
        if rows != self.chunking.width or not local.is_contiguous():
            with torch.no_grad():
                local = self._pad(local)
            torch_private.replace_local(self.sharded_param, local.narrow(0, 0, rows))
        self._send_data = local.view(-1)

    def take_grad(self) -> torch.Tensor | None:
        """Removes and returns the whole gradient of this backward and those not yet reduced."""
        self._add_to_accumulated()
        grad, self.accumulated_grad = self.accumulated_grad, None
        if grad is None and self._unsharded is not None:
            grad, self._unsharded.parameter.grad = self._unsharded.parameter.grad, None
        return grad

    def keep_grad(self) -> None:
        """Keeps this backward's gradient, in the reduce dtype, for one that reduces."""
        self._add_to_accumulated()
        wanted = self._policy.reduce_dtype
        if self._unsharded is None or wanted is None:
            return
        grad = self._unsharded.parameter.grad
        if grad is not None and grad.dtype != wanted:
            self._unsharded.parameter.grad = None
            self.accumulated_grad = grad.to(wanted)

    def add_sharded_grad(self, row: torch.Tensor) -> None:
        """Adds a reduced slice to the sharded parameter's gradient and runs the user's hooks.

        Args:
            row: 1D, `padded_row` elements in the original dtype; kept, not copied.
        """
        shape = (self.chunking.size(self._rank), *self._shape[1:])
        local = row[: torch.Size(shape).numel()].view(shape)
        if isinstance(self.sharded_param.grad, DTensor):
            total = torch_private.local_tensor(self.sharded_param.grad)
            total += local
        else:
            self.sharded_param.grad = torch_private.dtensor_like(local, self._dtensor)
        for hook in torch_private.post_accumulate_hooks(self.sharded_param):
            hook(self.sharded_param)

    @property
    def _dtensor(self) -> DTensor:
        if not isinstance(self.sharded_param, DTensor):
            raise ArgumentTypeError(f"Parameter {self.fqn!r} is no DTensor any more.")
        return self.sharded_param

    def _add_to_accumulated(self) -> None:
        if self.accumulated_grad is None or self._unsharded is None:
            return
        parameter = self._unsharded.parameter
        if parameter.grad is not None:
            self.accumulated_grad += parameter.grad
            parameter.grad = None

    def _is_padded_already(self, local: torch.Tensor) -> bool:
        # An empty tensor's storage may be at address 0, which says nothing.
        ours = self._send_data.untyped_storage().data_ptr()
        return ours > 0 and ours == local.untyped_storage().data_ptr()

    def _pad(self, local: torch.Tensor) -> torch.Tensor:
        padded = local.new_zeros((self.chunking.width, *self._shape[1:]))
        padded.narrow(0, 0, local.size(0)).copy_(local)
        return padded


def _origin_of(param: nn.Parameter) -> object:
    # On the parameter itself: it outlives the call wherever else it hangs, an id would not.
    origin: object = param.__dict__.setdefault("_fsdp_core_origin", object())
    return origin


def _check_supported(param: nn.Parameter, fqn: str) -> None:
    if isinstance(param, DTensor):
        raise UnsupportedError(
            f"Parameter {fqn!r} is a DTensor already; sharding on top of tensor parallelism is "
            "not supported yet. Apply fully_shard to plain parameters."
        )
    if not param.is_contiguous():
        raise UnsupportedError(
            f"FSDP does not support non-contiguous parameters yet: {fqn!r} has shape "
            f"{tuple(param.shape)} and strides {param.stride()}. Make it contiguous first."
        )
