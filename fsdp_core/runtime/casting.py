"""Casting what goes into and comes out of a unit's forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from fsdp_core.runtime.tensor_tree import map_tensors

if TYPE_CHECKING:
    import torch

    from fsdp_core.policy import MixedPrecisionPolicy
    from fsdp_core.runtime.tracing import UnitTracer

T = TypeVar("T")


class Casting:
    """Applies a policy's dtypes and a device to nested values; only floating tensors are cast."""

    def __init__(
        self, policy: MixedPrecisionPolicy, device: torch.device, tracer: UnitTracer
    ) -> None:
        self._input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self._output_dtype = policy.output_dtype
        self._device = device
        self._tracer = tracer

    def inputs(self, tree: T) -> T:
        """Casts to the dtype of computation, if the policy says so."""
        if self._input_dtype is None:
            return tree
        with self._tracer.span("cast_forward_inputs"):
            return _cast(tree, self._input_dtype)

    def output(self, tree: T) -> T:
        """Casts to the dtype of outputs, if the policy names one."""
        if self._output_dtype is None:
            return tree
        with self._tracer.span("cast_forward_outputs"):
            return _cast(tree, self._output_dtype)

    def to_device(self, tree: T) -> T:
        """Moves to an accelerator; the host needs no move."""
        if self._device.type == "cpu":
            return tree
        with self._tracer.span("inputs_to_device"):
            # The host waits: it may refill a page-locked batch as soon as forward returns.
            return map_tensors(lambda t: t.to(self._device), tree)


def _cast(tree: T, dtype: torch.dtype) -> T:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
