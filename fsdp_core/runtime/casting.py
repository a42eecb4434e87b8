"""Casting what goes into and comes out of a unit's forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from fsdp_core.runtime.tensor_tree import map_tensors

if TYPE_CHECKING:
    import torch

    from fsdp_core.policy import MixedPrecisionPolicy

T = TypeVar("T")


class Casting:
    """Applies a policy's dtypes and a device to nested values; only floating tensors are cast."""

    def __init__(self, policy: MixedPrecisionPolicy, device: torch.device) -> None:
        self._input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self._output_dtype = policy.output_dtype
        self._device = device

    def inputs(self, tree: T) -> T:
        """Casts to the dtype of computation, if the policy says so."""
        return _cast(tree, self._input_dtype)

    def output(self, tree: T) -> T:
        """Casts to the dtype of outputs, if the policy names one."""
        return _cast(tree, self._output_dtype)

    def to_device(self, tree: T) -> T:
        """Moves to an accelerator; the host needs no move."""
        if self._device.type == "cpu":
            return tree
        return map_tensors(lambda t: t.to(self._device, non_blocking=True), tree)


def _cast(tree: T, dtype: torch.dtype | None) -> T:
    if dtype is None:
        return tree
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
