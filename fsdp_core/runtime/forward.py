"""A unit's forward: which calls make it up, and how its inputs and outputs are cast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from fsdp_core import torch_private
from fsdp_core.runtime.copies import Copies
from fsdp_core.runtime.tensor_tree import map_tensors

if TYPE_CHECKING:
    import torch

    from fsdp_core.policy import MixedPrecisionPolicy
    from fsdp_core.runtime.observer import UnitTracer


class ForwardCalls:
    """Tells which call of a unit's modules begins its forward, and which ends it.

    Modules of one unit run in any order, and each may call the other or one of its own registered
    methods: only the outermost call counts.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._yet_to_run: set[nn.Module] = set()
        self._depth = 0
        self._methods = 0

    @property
    def is_partial(self) -> bool:
        """Whether some modules ran and others have yet to."""
        return bool(self._yet_to_run)

    @property
    def are_running(self) -> bool:
        """Whether a call has begun that neither returned nor raised."""
        return self._depth > 0

    def enter(self) -> None:
        """A call begins."""
        self._yet_to_run = self._yet_to_run or set(self._modules)
        self._depth += 1

    def leave(self, module: nn.Module) -> bool:
        """A call of `module` returns; tells whether the unit's forward has ended with it."""
        if not self.leave_one():
            return False
        self._yet_to_run.discard(module)
        return not self._yet_to_run

    def leave_one(self) -> bool:
        """A call returns or raises; tells whether it was the outermost."""
        self._depth = max(0, self._depth - 1)  # what raised before `enter` leaves as well
        return self._depth == 0

    def forget(self) -> None:
        """The unit's forward is over, whatever has run."""
        self._yet_to_run.clear()
        self._depth = 0

    @contextmanager
    def running_method(self) -> Iterator[None]:
        """Within, a registered method runs."""
        self._methods += 1
        try:
            yield
        finally:
            self._methods -= 1

    def is_reentered_at(self, module: nn.Module) -> bool:
        """Whether `module`, whose forward has not ended, begins again.

        An exception runs the hook that ends it, but an interrupt from the keyboard does not. A
        module that calls itself is still running.
        """
        if self._methods or self._modules != (module,):
            return False
        return torch_private.calls_on_stack(module) <= 1


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

    def inputs(self, tree: T, copies: Copies) -> T:
        """Casts to the dtype of computation, if the policy says so."""
        if self._input_dtype is None:
            return tree
        with self._tracer.span("cast_forward_inputs"):
            return _cast(tree, self._input_dtype, copies)

    def output(self, tree: T) -> T:
        """Casts to the dtype of outputs, if the policy names one."""
        if self._output_dtype is None:
            return tree
        with self._tracer.span("cast_forward_outputs"):
            return _cast(tree, self._output_dtype)

    def to_device(self, tree: T, copies: Copies) -> T:
        """Moves to an accelerator; the host needs no move."""
        if self._device.type == "cpu":
            return tree
        with self._tracer.span("inputs_to_device"):
            # The host waits: it may refill a page-locked batch as soon as forward returns.
            return map_tensors(lambda t: t.to(self._device), tree, copies)


def _cast(tree: T, dtype: torch.dtype, copies: Copies | None = None) -> T:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree, copies)
