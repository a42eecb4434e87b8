"""Which of a unit's modules and methods are running, and which have yet to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from fsdp_core import torch_private


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
