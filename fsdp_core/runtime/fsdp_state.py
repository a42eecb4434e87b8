"""A unit: the modules of one `fully_shard` call, their hooks and their training state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import nn

from fsdp_core import torch_private
from fsdp_core.comm import CollectiveLedger, CommLink, HostLanes, lanes_for
from fsdp_core.errors import RootError
from fsdp_core.param import FSDPParam, FSDPParamGroup, name_from_root
from fsdp_core.policy import MixedPrecisionPolicy
from fsdp_core.runtime.autograd_boundary import call_after_backward, call_before_backward
from fsdp_core.runtime.casting import Casting
from fsdp_core.runtime.observer import ObserverRelay
from fsdp_core.runtime.root_context import RootContext
from fsdp_core.runtime.unit_options import UnitOptions
from fsdp_core.states import TrainingState

COMPOSABLE_NAME = "fully_shard"
_STATE_KEY = "fsdp_core.fully_shard"
_IN_BACKWARD = (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)

Args = tuple[object, ...]
Kwargs = dict[str, object]


class FSDPState:
    """Owns the `TrainingState` of a unit and decides what happens at each of its hooks.

    Attributes:
        modules: The unit's modules.
        groups: Its communicating parameter groups; empty if it has no parameters of its own.
        options: What the setters write.
        context: What it shares with the other units of its root.
        relay: Its observer, in effect if it is the root.
        prefetch_after_forward: Units to gather while this one's forward runs; empty: foresee.
        prefetch_after_backward: The same for backward.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[FSDPParamGroup],
        device: torch.device,
        policy: MixedPrecisionPolicy,
        options: UnitOptions,
    ) -> None:
        self.modules = tuple(modules)
        self.groups = tuple(groups)
        self.options = options
        self.relay = ObserverRelay()
        self.prefetch_after_forward: tuple[FSDPState, ...] = ()
        self.prefetch_after_backward: tuple[FSDPState, ...] = ()
        self._device = device
        self._casting = Casting(policy, device)
        self._training_state = TrainingState.IDLE
        self._index = 0
        self._fqn = ""
        self._yet_to_run: set[nn.Module] = set()
        # Before the root is known, everything a lone unit does is on the current stream.
        self.context = RootContext(
            [self], CommLink(HostLanes(), CollectiveLedger(self.relay)), self.relay, is_solo=True
        )

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
        return self._fqn

    @property
    def params(self) -> list[FSDPParam]:
        """All parameters of the unit."""
        return [param for group in self.groups for param in group.params]

    def install(self) -> None:
        """Makes itself the modules' state and registers the hooks on them."""
        for module in self.modules:
            torch_private.set_composable(module, _STATE_KEY, self, name=COMPOSABLE_NAME)
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward)
        owners: dict[nn.Module, list[FSDPParam]] = {}
        for param in self.params:
            for owner in param.slot.modules:
                owners.setdefault(owner, []).append(param)
        for owner, params in owners.items():
            owner.register_state_dict_pre_hook(self._before_state_dict)  # type: ignore[no-untyped-call]  # PyTorch's
            torch_private.register_load_pre_hook(owner, self._before_load)
            owner.register_load_state_dict_post_hook(partial(_refresh, params))  # type: ignore[no-untyped-call]  # PyTorch's

    def _before_state_dict(self, *_: object) -> None:
        self.reshard()

    def _before_load(self, *_: object) -> None:
        self.drop_gathers()  # its values are about to be replaced
        self.reshard()

    def ensure_root(self) -> None:
        """Builds the context of the tree, if no root is known yet: this unit becomes it.

        Raises:
            RootError: The unit has several modules, or a unit below ran forward alone before.
            SharedParameterError: Two units manage one parameter.
            MetaParameterError: Parameters have no values yet.
            OffloadError: Slices are not on the host, where the offload policy wants them.
        """
        if not self.context.is_solo:
            return
        if len(self.modules) > 1:
            raise RootError(f"FSDP requires a single root module but got {self.modules}")
        names = self._units_below()
        for unit, fqns in names.items():
            if not unit.context.is_solo:
                raise RootError(
                    f"FSDP state has already been lazily initialized for {', '.join(fqns)}\n"
                    "FSDP requires running forward through the root module first"
                )
        name_from_root(self.modules[0], [param for unit in names for param in unit.params])
        for unit in names:
            for group in unit.groups:
                group.settle()
        link = CommLink(lanes_for(self._device), CollectiveLedger(self.relay))
        context = RootContext(list(names), link, self.relay, is_solo=False)
        for index, (unit, fqns) in enumerate(names.items()):
            unit._join(context, index, ", ".join(fqns))  # noqa: SLF001 - of the same class

    def _units_below(self) -> dict[FSDPState, list[str]]:
        found: dict[FSDPState, list[str]] = {}
        for name, module in self.modules[0].named_modules():
            if (unit := state_of(module)) is not None:
                found.setdefault(unit, []).append(name)
        return found

    def _join(self, context: RootContext, index: int, fqn: str) -> None:
        self.context = context
        self._index = index
        self._fqn = fqn

    def unshard(self) -> None:
        """Starts the gather of the parameters; `finish_unshard` lands it."""
        idle = self._training_state is TrainingState.IDLE
        for group in self.groups:
            if self.context.is_solo:
                group.settle()
            group.issue_unshard(self.context.link, after_compute=idle)

    def finish_unshard(self) -> None:
        """Waits for the gather in flight, if any, and registers the whole parameters."""
        for group in self.groups:
            group.finish_unshard(self.context.link)

    def reshard(self) -> None:
        """Registers the slices and frees the whole parameters."""
        for group in self.groups:
            group.reshard()

    def refresh(self) -> None:
        """Takes over what the user did to the slices."""
        for group in self.groups:
            group.refresh()

    def drop_gathers(self) -> None:
        """Ends gathers in flight that nobody used."""
        for group in self.groups:
            group.drop_gather(self.context.link)

    def prefetch_in_forward(self) -> None:
        """Starts the gather that the next forward needs."""
        for group in self.groups:
            group.issue_unshard(self.context.link, after_compute=False)

    def prefetch_in_backward(self) -> None:
        """Starts the gather that the next backward needs, if it needs one."""
        if self.options.unshard_in_backward:
            self.prefetch_in_forward()

    def pre_forward(self, _: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Makes the parameters whole, casts the inputs, and foresees the end of backward."""
        if self._training_state in _IN_BACKWARD and torch_private.in_backward():
            # Activation recomputation: backward has unsharded, unless the unit ran several
            # forwards and an earlier post-backward resharded it. Outside backward these states
            # remain from a partial forward (a head run per chunk), and this is one more.
            self.prefetch_in_forward()
            self.finish_unshard()
            return self._casting.inputs((args, kwargs))
        self._yet_to_run = self._yet_to_run or set(self.modules)
        is_first = self._training_state is not TrainingState.FORWARD
        if is_first:
            self.ensure_root()
            self._enter(TrainingState.FORWARD)
            if self.context.begin_forward(self):
                args, kwargs = self._casting.to_device((args, kwargs))
        args, kwargs = self._casting.inputs((args, kwargs))
        self.prefetch_in_forward()
        self.finish_unshard()
        if is_first:
            args, kwargs = call_after_backward((args, kwargs), self._post_backward)
            self.context.prefetch_forward(self._index, self.prefetch_after_forward)
        return args, kwargs

    def post_forward(self, module: nn.Module, _: Args, output: object) -> object:
        """Slices the parameters again, unless they are kept, and foresees backward."""
        if self._training_state not in _IN_BACKWARD:
            self._yet_to_run.discard(module)
            if not self._yet_to_run:
                output = self._complete_forward(output)
        return self._casting.output(output)

    def complete_partial_forward(self, output: object) -> object:
        """Ends a forward in which only some of the unit's modules ran."""
        if not self._yet_to_run:
            return output
        self._yet_to_run.clear()
        return self._casting.output(self._complete_forward(output))

    def _complete_forward(self, output: object) -> object:
        # Recomputation of an enclosing function: backward follows at once and needs them.
        if not torch_private.in_backward():
            if self._reshards_after_forward:
                for group in self.groups:
                    group.reshard_after_forward(self.context.link)
            self.context.backward_order.record(self._index)
        output = call_before_backward(output, self._pre_backward, self.modules)
        self._enter(TrainingState.IDLE)
        return self.context.end_forward(self, output)

    @property
    def _reshards_after_forward(self) -> bool:
        chosen = self.options.reshard_after_forward
        # Backward begins with the root, right after its forward ends.
        return self.context.units[0] is not self if chosen is None else chosen

    def _pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        if self._training_state is not TrainingState.PRE_BACKWARD:
            self._enter(TrainingState.PRE_BACKWARD)
            self.context.queue_end_of_backward()
            self.prefetch_in_backward()
            self.finish_unshard()
            self.context.prefetch_backward(self._index, self.prefetch_after_backward)
        return grad

    def _post_backward(self, *, was_reached: bool = True) -> None:
        """Phases: take the gradients, free the parameters, make room, reduce."""
        self._enter(TrainingState.POST_BACKWARD)
        for group in reversed(self.groups):
            if not self.options.reduce_grads:
                self._reshard_after_backward(group)
                group.keep_grads()
                continue
            batches = group.take_grads(was_reached=was_reached)
            self._reshard_after_backward(group)
            for batch in batches:
                self.context.make_room_for_reduce()
                self.context.admit_reduce(group.issue_reduce(batch, self.context.link))

    def _reshard_after_backward(self, group: FSDPParamGroup) -> None:
        if self.options.reshard_after_backward:
            group.reshard()

    def complete_backward(self) -> None:
        """Runs post-backward if no input needed a gradient, so autograd had no reason to."""
        if self._training_state is not TrainingState.POST_BACKWARD:
            self._post_backward(was_reached=self._training_state is TrainingState.PRE_BACKWARD)

    def go_idle(self) -> None:
        """Ends the iteration."""
        self._yet_to_run.clear()
        self._enter(TrainingState.IDLE)

    def _enter(self, state: TrainingState) -> None:
        self._training_state = state
        self.context.relay.on_state(state, self._index, self._fqn)


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of the unit that `module` was given to `fully_shard` for, if any."""
    return cast("FSDPState | None", torch_private.composable_state(module, _STATE_KEY))


def states_in(module: nn.Module) -> Iterator[FSDPState]:
    """The states in the tree of `module`, each once, in pre-order."""
    yield from dict.fromkeys(s for m in module.modules() if (s := state_of(m)) is not None)


def _refresh(params: Sequence[FSDPParam], *_: object) -> None:
    for param in params:
        param.refresh()
