"""Tensor subclasses that decide themselves what is gathered for them.

A sharded parameter whose local tensor defines both methods takes part in the protocol::

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy])
        -> (inputs, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)
        -> (tensor, inner_tensors)      # at the first call
        -> None                         # later: `out` is the tensor of the first call, refilled

Source: the reference's protocol of the same names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn

from fsdp_core import torch_private
from fsdp_core.errors import StateError
from fsdp_core.layout import Slicing
from fsdp_core.param import slices
from fsdp_core.param.unsharded import allocate, free

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fsdp_core.policy import MixedPrecisionPolicy

_SHORT, _LONG = 1, 5


@dataclass(frozen=True)
class ExtensionPlace:
    """Where the extended parameter is registered and how it is cut: what the protocol passes on.

    Attributes:
        fqn: For errors.
        module: On which it is registered.
        mesh: 1D, over which it is sharded.
        policy: Dtypes.
        slicing: Of the whole local parameter.
    """

    fqn: str
    module: nn.Module
    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    slicing: Slicing


def is_extended(local: torch.Tensor, fqn: str) -> bool:
    """Whether a sharded parameter's local tensor takes part in the protocol.

    Raises:
        StateError: It defines only one of the two methods.
    """
    before = hasattr(local, "fsdp_pre_all_gather")
    if before != hasattr(local, "fsdp_post_all_gather"):
        raise StateError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using "
            f"all-gather extensions, but {type(local).__name__} of parameter {fqn!r} defines "
            "only one of them."
        )
    return before


class _Extension(Protocol):
    fsdp_pre_all_gather: Callable[..., tuple[Sequence[torch.Tensor], object]]
    fsdp_post_all_gather: Callable[..., object]


class ExtendedParam:
    """The whole parameter of a tensor subclass, and what travels to make it.

    It is built by the first gather: only then does the subclass say what the whole looks like.

    Attributes:
        dtype: Of computation.
    """

    def __init__(self, place: ExtensionPlace, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._place = place
        self._metadata: object = None
        self._slicings: list[Slicing] = []
        self._outputs: list[torch.Tensor] = []
        self._inner: tuple[torch.Tensor, ...] = ()
        self._parameter: nn.Parameter | None = None
        self._is_refused = False

    @property
    def parameter(self) -> nn.Parameter:
        """The whole parameter.

        Raises:
            StateError: Nothing was gathered yet.
        """
        if self._parameter is None:
            raise StateError(f"Parameter {self._place.fqn!r} was never gathered.")
        return self._parameter

    @property
    def exists(self) -> bool:
        """Whether a gather has made the parameter."""
        return self._parameter is not None

    @property
    def held_bytes(self) -> int:
        """Of what arrived, and of what was made of it, each storage once."""
        storages = [tensor.untyped_storage() for tensor in (*self._outputs, *self._inner)]
        return sum({storage.data_ptr(): storage.size() for storage in storages}.values())

    def inputs(self, local: torch.Tensor) -> list[torch.Tensor]:
        """What `local` sends, each 1D, and remembers its shapes and metadata.

        Raises:
            StateError: The method has another signature than the protocol's, or slices differ in
                size and it has the short one, or returned an input without padding.
        """
        place = self._place
        method = cast("_Extension", local).fsdp_pre_all_gather
        given = len(inspect.signature(method).parameters)
        if given not in (_SHORT, _LONG):
            raise StateError(
                f"Invalid fsdp_pre_all_gather of parameter {place.fqn!r}: "
                f"{inspect.signature(method)}. Expects (self, mesh), or (self, mesh, outer_size, "
                "outer_stride, module, mp_policy)."
            )
        if given == _SHORT:
            self._check_even()
            inputs, self._metadata = method(place.mesh)
        else:
            whole = torch.Size(place.slicing.shape)
            strides = torch.empty(whole, device="meta").stride()
            inputs, self._metadata = method(place.mesh, whole, strides, place.module, place.policy)
            self._check_padding(local, inputs)
        self._slicings = [self._slicing_of(tensor) for tensor in inputs]
        return [tensor.reshape(-1) for tensor in inputs]

    def destinations(
        self, dtypes: Sequence[torch.dtype], device: torch.device
    ) -> list[torch.Tensor]:
        """Memory for what arrives: for each input, (parts, elements) of its dtype."""
        if not self._outputs:
            # A first gather for inference must leave memory that training can write.
            with torch_private.outside_inference_mode():
                self._outputs = [
                    torch.empty(slicing.row * slicing.parts, dtype=dtype, device=device)
                    for slicing, dtype in zip(self._slicings, dtypes, strict=True)
                ]
        for output in self._outputs:
            allocate(output)
        return [
            output.view(slicing.parts, slicing.row)
            for output, slicing in zip(self._outputs, self._slicings, strict=True)
        ]

    def complete(
        self,
        local: torch.Tensor,
        shape: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Hands what arrived to the subclass, which makes or refills the whole parameter.

        Args:
            local: This rank's slice.
            shape: Gives a whole local tensor the form that modules compute with.
        """
        outputs = tuple(
            self._joined(output, slicing)
            for output, slicing in zip(self._outputs, self._slicings, strict=True)
        )
        metadata, self._metadata = self._metadata, None
        method = cast("_Extension", local).fsdp_post_all_gather
        if self._parameter is None:
            made = cast(
                "tuple[torch.Tensor, tuple[torch.Tensor, ...]]",
                method(outputs, metadata, self.dtype),
            )
            self._inner = tuple(made[1])
            with torch_private.outside_inference_mode():
                self._parameter = nn.Parameter(shape(made[0]), requires_grad=False)
            return
        for tensor in self._inner:
            allocate(tensor)
        self._refuse_saved(refuse=False)
        with torch_private.preserve_version((self._parameter, *self._inner)):
            method(outputs, metadata, self.dtype, out=self._parameter)

    def free(self) -> None:
        """Gives the memory of what arrived, and of what was made of it, back."""
        if self._parameter is not None:
            self._refuse_saved(refuse=True)
        for tensor in (*self._outputs, *self._inner):
            free(tensor)

    def _refuse_saved(self, *, refuse: bool) -> None:
        """Has autograd refuse what it saved of the whole, or take it again.

        It may have saved the parameter, which need not have memory of its own, or what that is
        made of. Whether there is memory says nothing: a subclass may free what arrived itself.
        """
        if refuse is self._is_refused:
            return
        self._is_refused = refuse
        for tensor in (cast("nn.Parameter", self._parameter), *self._outputs, *self._inner):
            torch_private.shift_version(tensor, 1 if refuse else -1)

    def _slicing_of(self, tensor: torch.Tensor) -> Slicing:
        dim = self._place.slicing.dim or 0
        dim = dim if dim < tensor.ndim else 0
        shape = list(tensor.shape) or [1]
        shape[dim] *= self._place.slicing.parts
        return Slicing.of(shape, dim, self._place.slicing.parts)

    def _joined(self, output: torch.Tensor, slicing: Slicing) -> torch.Tensor:
        if slicing.leads:
            return output.view(slicing.shape)
        whole = output.new_empty(slicing.shape)
        slices.join(output.view(slicing.parts, slicing.row), slicing, whole)
        return whole

    def _check_even(self) -> None:
        # On all ranks alike: inputs of different sizes end the process group.
        cut = self._place.slicing
        if cut.row * cut.parts != cut.total:
            raise StateError(
                f"Parameter {self._place.fqn!r} of shape {cut.shape} is unevenly sharded over "
                f"{cut.parts} ranks, but its fsdp_pre_all_gather takes (self, mesh) alone, and cannot "
                "pad. Take (self, mesh, outer_size, outer_stride, module, mp_policy), and return inputs "
                f"of the padded sharded size {torch.Size(cut.padded_shape)}."
            )

    def _check_padding(self, local: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        wanted = torch.Size(self._place.slicing.padded_shape)
        # Beside the padded values there may be others, such as their scales.
        if local.size() != wanted and all(tensor.size() != wanted for tensor in inputs):
            raise StateError(
                f"Parameter {self._place.fqn!r} of shape {self._place.slicing.shape} is unevenly "
                f"sharded over {self._place.slicing.parts} ranks, so fsdp_pre_all_gather must "
                f"return all-gather inputs with the padded sharded size {wanted} but got "
                f"{[tensor.size() for tensor in inputs]}. Other ranks may hang: pad on all."
            )
