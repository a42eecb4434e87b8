"""A unit apart from its hooks: its place below a root, and how its parameters are unsharded and resharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_core.runtime.observer import UnitTracer
from fsdp_core.runtime.unit_params import UnitParams
from fsdp_core.states import TrainingState

if TYPE_CHECKING:
    from torch import nn

    from fsdp_core.comm import CommContext
    from fsdp_core.options import UnitOptions
    from fsdp_core.param import FSDPParam, FSDPParamGroup, UnitGroups
    from fsdp_core.runtime.root_context import RootContext


class ShardedUnit:
    """The modules of one `fully_shard` call and their parameters.

    Attributes:
        modules: The unit's modules.
        options: What the setters write.
        context: What it shares with the other units of its root.
        tracer: Names its phases in profiles and logs.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: UnitGroups,
        options: UnitOptions,
        context: RootContext,
    ) -> None:
        """Takes charge of the parameters.

        Args:
            modules: At least one.
            groups: The unit's own, and those it borrows.
            options: What the setters write.
            context: For the unit alone.
        """
        self.modules = tuple(modules)
        self.options = options
        self.tracer = UnitTracer()
        self.context = context
        self._params = UnitParams(groups.own, groups.borrowed, self.tracer)
        self._training_state = TrainingState.IDLE
        self._index = 0

    @property
    def training_state(self) -> TrainingState:
        """Where the unit is in the step."""
        return self._training_state

    @property
    def index(self) -> int:
        """Place in the root's pre-order; 0 for a root."""
        return self._index

    @property
    def fqn(self) -> str:
        """Names of the modules from the root, joined by ", "; "" for a root."""
        return self.tracer.fqn

    @property
    def groups(self) -> tuple[FSDPParamGroup, ...]:
        """Its communicating parameter groups; empty if it has no parameters of its own."""
        return self._params.groups

    @property
    def params(self) -> list[FSDPParam]:
        """All parameters of the unit."""
        return self._params.all

    @property
    def gathering_ranks(self) -> frozenset[int]:
        """Ranks that take part in its gathers; none without parameters."""
        return self._params.gathering_ranks

    # -- The root

    def settle(self) -> None:
        """Takes over what the user did since sharding, and checks that training can start."""
        self._params.settle()

    def join(self, context: RootContext, index: int, fqn: str) -> None:
        """Becomes unit number `index` of a tree."""
        self.context = context
        self._index = index
        self.tracer.fqn = fqn

    # -- Sharded and unsharded

    def unshard(self) -> None:
        """Starts the gather of the parameters; `finish_unshard` lands it."""
        self.context.recover_if_failed()
        if self.context.is_solo:
            self.settle()
        idle = self._training_state is TrainingState.IDLE
        self._params.issue_unshard(self.context.comm, after_compute=idle)

    def finish_unshard(self) -> None:
        """Waits for the gather in flight, if any, and registers the whole parameters."""
        self._params.finish_unshard()
        if self._training_state is TrainingState.IDLE:
            # No pass will end that sees to it.
            self.context.comm.let_go_gathered()
            self.context.await_copied()

    def reshard(self) -> None:
        """Registers the slices and frees the whole parameters."""
        self._params.reshard()

    def refresh(self) -> None:
        """Takes over what the user did to the slices."""
        self._params.refresh()

    def drop_gathers(self) -> None:
        """Ends gathers in flight that nobody used."""
        self._params.drop_gathers()

    def prefetch_in_forward(self) -> None:
        """Starts the gather that the next forward needs."""
        self._params.issue_unshard(self._gather_comm, after_compute=False)

    def prefetch_in_backward(self) -> None:
        """Starts the gather that the next backward needs, if it needs one."""
        if self.options.unshard_in_backward:
            self.prefetch_in_forward()

    @property
    def _gather_comm(self) -> CommContext:
        context = self.context
        return context.inline_comm if self.options.unshard_inline else context.comm
