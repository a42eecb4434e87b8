"""A unit: the modules of one `fully_shard` call, their hooks and their training state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from fsdp_core import torch_private
from fsdp_core.comm import CommContext, streams_for
from fsdp_core.runtime.autograd_boundary import (
    call_after_backward,
    call_before_backward,
    call_with_grads,
    weakly,
)
from fsdp_core.runtime.copies import Copies
from fsdp_core.runtime.forward import Casting, ForwardCalls
from fsdp_core.runtime.observer import ObserverRelay
from fsdp_core.runtime.root_context import RootContext
from fsdp_core.runtime.sharded_unit import ShardedUnit
from fsdp_core.runtime.tensor_tree import containers_in, grad_tensors, has_no_tensor
from fsdp_core.runtime.tree import Member, form_tree
from fsdp_core.states import TrainingState

if TYPE_CHECKING:
    from fsdp_core.options import UnitOptions
    from fsdp_core.param import UnitGroups
    from fsdp_core.policy import MixedPrecisionPolicy

COMPOSABLE_NAME = "fully_shard"
_STATE_KEY = "fsdp_core.fully_shard"

Args = tuple[object, ...]
Kwargs = dict[str, object]


class FSDPState(ShardedUnit):
    """Owns the `TrainingState` of a unit and decides what happens at each of its hooks.

    Attributes:
        relay: Its observer, in effect if it is the root.
        prefetch_after_forward: Units to gather while this one's forward runs; empty: predicted.
        prefetch_after_backward: The same for backward.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: UnitGroups,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        options: UnitOptions,
    ) -> None:
        relay = ObserverRelay()
        comm = CommContext(partial(streams_for, device))
        context = RootContext([self], comm, relay, is_solo=True)
        super().__init__(modules, groups, options, context)
        self.relay = relay
        self.prefetch_after_forward: tuple[FSDPState, ...] = ()
        self.prefetch_after_backward: tuple[FSDPState, ...] = ()
        self._casting = Casting(policy, device, self.tracer)
        self._calls = ForwardCalls(self.modules)
        self._has_returned = False
        self._has_new_grads = False
        self._may_miss_update = False
        self._awaits_backward = False
        self._hidden_outputs = 0
        self._is_differentiated_twice = False
        self._copies: list[Copies] = []
        self._params.watch_grads(weakly(self._note_grad))

    @property
    def is_in_forward(self) -> bool:
        """Whether its forward has begun and not ended, be it that some modules have yet to run."""
        return self._training_state is TrainingState.FORWARD

    @property
    def is_running(self) -> bool:
        """Whether a call of its modules has begun that neither returned nor raised."""
        return self._calls.are_running

    def install(self) -> None:
        """Makes itself the modules' state and registers the hooks on them."""
        for module in self.modules:
            torch_private.set_composable(module, _STATE_KEY, self, name=COMPOSABLE_NAME)
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward)
            module.register_forward_hook(self.leave_forward, always_call=True)
        self._params.watch_state_dicts(before_load=self._before_load)

    def _before_load(self, *_: object) -> None:
        self.drop_gathers()  # its values are about to be replaced
        self.reshard()
        self._params.await_released()

    # -- The root

    def ensure_root(self) -> None:
        """Forms the tree below, if no root is known yet: this unit becomes it; see `form_tree`."""
        if not self.context.is_solo:
            return
        members: dict[Member, list[str]] = {}
        for name, module in self.modules[0].named_modules():
            if (unit := state_of(module)) is not None:
                members.setdefault(unit, []).append(name)
        form_tree(self.modules, members, self.context.shared, self.relay)

    # -- Forward

    @torch_private.opaque_to_dynamo
    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Unshards the parameters, casts the inputs, and registers the post-backward hook."""
        with torch_private.outside_selective_checkpoint():
            return self._begin_forward(module, args, kwargs)

    def _begin_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        self._has_returned = False
        self._recover_if_failed(module)
        self._copies.append(copies := Copies())
        if self._is_recomputing:
            # Backward has unsharded, unless the unit ran several forwards and an earlier
            # post-backward resharded it.
            self.prefetch_in_forward()
            self.finish_unshard()
            return self._casting.inputs((args, kwargs), copies)
        is_first = self._training_state is not TrainingState.FORWARD
        if is_first:
            self.ensure_root()
        self._calls.enter()
        if is_first:
            self._enter(TrainingState.FORWARD)
            if self._may_miss_update:
                self._may_miss_update = False
                self._params.reshard_unused()
            self._params.hold()
            self._is_differentiated_twice = torch_private.gradients_nest()
            if self.context.begin_forward(self):
                args, kwargs = self._casting.to_device((args, kwargs), copies)
        args, kwargs = self._casting.inputs((args, kwargs), copies)
        with self.tracer.phase("pre_forward"):
            were_sliced = self._params.are_sliced
            self.prefetch_in_forward()
            self.finish_unshard()
            if is_first:
                # Without parameters there is nothing to do then, and autograd adds up an input's
                # gradients in the order in which the model used it.
                if self._params.are_any:
                    args, kwargs = call_after_backward((args, kwargs), self._post_backward, copies)
                self.context.prefetch_forward(
                    self._index, self.prefetch_after_forward, were_sliced=were_sliced
                )
            # What comes next is on its way, and overlaps the copies out.
            self.context.comm.let_go_gathered()
        copies.watch(containers_in((args, *kwargs.values())))
        return args, kwargs

    @torch_private.opaque_to_dynamo
    def post_forward(self, module: nn.Module, _: Args, output: object) -> object:
        """Reshards the parameters, unless they are kept, and registers the pre-backward hook."""
        with torch_private.outside_selective_checkpoint():
            copies = self._copies.pop() if self._copies else Copies()
            written = copies.written()
            if not self._is_recomputing:
                if written:
                    # Backward may begin with a loss that was left there.
                    call_with_grads(written, self._pre_partial_backward)
                if self._calls.leave(module) or self._runs_alone_without_backward:
                    self._calls.forget()
                    output = self._complete_forward(output)
                else:
                    # This part may go backward before the rest, after it, or alone.
                    call_with_grads(output, self._pre_partial_backward)
            output = self._casting.output(output)
            # Hooks are on the copies by now: those of the originals would outlast the forward.
            copies.write_back(containers_in(written))
        self._has_returned = True
        return output

    @torch_private.opaque_to_dynamo
    def leave_forward(self, *_: object) -> None:
        """Runs after `post_forward`, or in its place when forward raised."""
        if self._has_returned:
            self._has_returned = False
            return
        if self._copies:
            self._copies.pop()
        if self._training_state is TrainingState.FORWARD:
            if not self._calls.leave_one():
                return  # an outer call of the unit may go on
            self._calls.forget()
            self._params.let_go()
            if not self.context.in_backward:
                self._params.reshard_unused()
            self._enter(TrainingState.IDLE)
        self.context.abort_forward(self)

    def complete_partial_forward(self, output: object) -> object:
        """Ends a forward in which only some of the unit's modules ran."""
        if not self._calls.is_partial or self._calls.are_running:
            return output
        self._calls.forget()
        return self._casting.output(self._complete_forward(output))

    def abandon_forward(self) -> None:
        """Reshards the parameters and ends a forward that did not end."""
        self.drop_gathers()
        self.reshard()
        self._calls.forget()
        self._params.let_go()
        if self._training_state is TrainingState.FORWARD:
            self._enter(TrainingState.IDLE)

    def _complete_forward(self, output: object) -> object:
        self._params.let_go()
        with self.tracer.phase("post_forward"):
            # Recomputation of an enclosing function: backward follows at once and needs them.
            if not self.context.in_backward:
                if has_no_tensor(output) and torch.is_grad_enabled():
                    # Nobody will tell when the backward of what it hides begins.
                    self._may_miss_update = True
                    self._hidden_outputs += 1
                elif self._reshards_after_forward:
                    self._params.reshard_after_forward(self.context.comm)
                # One without parameters gathers nothing in backward. Ranks may differ in how often they call
                # such a container, and predict the same nevertheless.
                if self._params.are_any:
                    self.context.note_forward(self._index)
            if torch.is_grad_enabled():
                self._awaits_backward = bool(grad_tensors(output))
            output = call_before_backward(output, self._pre_backward, self.modules)
        self._enter(TrainingState.IDLE)
        return self.context.end_forward(self, output)

    @property
    def _runs_alone_without_backward(self) -> bool:
        # The rest of a group need not follow, and what stayed whole would miss the next update.
        runs_alone = self.context.has_opened(self) and not self._calls.are_running
        return runs_alone and not torch.is_grad_enabled()

    @property
    def _is_recomputing(self) -> bool:
        # Between the gradient of its outputs and those of its inputs. Recomputation at any other
        # time, as by reentrant checkpointing, is a forward with a backward of its own. Outside
        # backward the state remains from a partial forward (a head run per chunk).
        return self._training_state is TrainingState.PRE_BACKWARD and self.context.in_backward

    @property
    def _reshards_after_forward(self) -> bool:
        chosen = self.options.reshard_after_forward
        # Backward begins with the root, right after its forward ends.
        return self.context.root is not self if chosen is None else chosen

    # -- Backward

    @torch_private.opaque_to_dynamo
    def _pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        self.context.recover_if_failed()
        self.context.begin_backward()
        if self._training_state is not TrainingState.PRE_BACKWARD:
            with self.tracer.phase("pre_backward"):
                self._enter(TrainingState.PRE_BACKWARD)
                self._params.hold()
                self.prefetch_in_backward()
                self.finish_unshard()
                self.context.prefetch_backward(self._index, self.prefetch_after_backward)
        return grad

    @torch_private.opaque_to_dynamo
    def _pre_partial_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """An earlier backward, of another part or of this one, may have freed the parameters."""
        self.context.recover_if_failed()
        self._note_grad()
        self._params.hold()  # units within it that share some end before it does
        self.prefetch_in_backward()
        self.finish_unshard()
        return grad

    def _note_grad(self) -> None:
        """Gradients came or will come, whether or not autograd has been through the outputs."""
        self.context.refuse_while_ending()
        self._has_new_grads = True
        self.context.join_backward(self)

    @torch_private.opaque_to_dynamo
    def _post_backward(self, *, was_reached: bool = True) -> None:
        """Phases: take the gradients, free the parameters, make room, reduce."""
        self.context.join_backward(self)
        self._has_new_grads = self._awaits_backward = False
        self._hidden_outputs = 0
        self._enter(TrainingState.POST_BACKWARD)
        self._params.let_go()
        if was_reached:
            self._params.end_use_in_backward()
        with self.tracer.phase("post_backward"):
            # A gradient of a gradient reads what that one saved, and `torch.func` does not look at
            # versions: freed memory would end the process. The next forward gathers again.
            self._may_miss_update = self._is_differentiated_twice
            frees = self.options.reshard_after_backward and not self._may_miss_update
            if frees:
                self._params.reshard_borrowed()
            self._params.reduce(self.options, self.context, was_reached=was_reached, frees=frees)

    def complete_backward(self, *, is_whole: bool) -> None:
        """Runs post-backward if no input needed a gradient, so autograd had no reason to.

        Gradients may have been added to after they were reduced, by other units for example.

        Args:
            is_whole: Whether the backward came through the output of some unit's forward.
        """
        if self._training_state is TrainingState.POST_BACKWARD:
            if self._has_new_grads or self._params.are_owed:
                # All ranks take part with all parameters: each may have used others this time, too.
                self._post_backward()
        elif self._may_go_on and not is_whole and self._training_state is TrainingState.IDLE:
            self._hidden_outputs = max(0, self._hidden_outputs - 1)
            self._reduce_and_stay_whole()
        else:
            was_entered = self._training_state is TrainingState.PRE_BACKWARD
            was_reached = was_entered or self._has_new_grads or self._params.are_owed
            self._post_backward(was_reached=was_reached)

    @property
    def _may_go_on(self) -> bool:
        # One of its modules, no unit, ran without it: a head per chunk. The rest may follow, and
        # so may the backward of its own forward. Or another forward hides an output.
        return self._awaits_backward or self._hidden_outputs > 1

    def complete_backward_within_forward(self) -> None:
        """Reduces what a backward within the unit's own forward added; the forward goes on."""
        self._may_miss_update = True
        if self._has_new_grads or self._params.is_reduction_overdue:
            self._reduce_and_stay_whole()

    def reduce_overdue(self) -> None:
        """Reduces what earlier backwards left, after one that did not come through the unit.

        Not if its own is still to come, which reduces both at once.
        """
        is_due = self.options.reduce_grads and not self._awaits_backward
        if is_due and self._params.is_reduction_overdue:
            with self.tracer.phase("post_backward"):
                self._params.reduce(self.options, self.context, was_reached=False, frees=False)

    def _reduce_and_stay_whole(self) -> None:
        """No other backward need follow, so that the next forward has to gather again."""
        self._may_miss_update = True
        self._has_new_grads = False
        self._params.hold()
        with self.tracer.phase("post_backward"):
            self._params.reduce(self.options, self.context, was_reached=True, frees=False)
        if not self.is_in_forward:
            self._params.let_go()

    def go_idle(self) -> None:
        """Ends the iteration."""
        self._has_new_grads = False
        self._calls.forget()
        self._params.forget_use()
        self._enter(TrainingState.IDLE)

    # -- Methods besides forward

    @contextmanager
    def running_method(self) -> Iterator[None]:
        """Within, a registered method runs, which forward may call and which may call forward."""
        try:
            with self._calls.running_method():
                yield
        finally:
            self.leave_forward()

    # -- After an exception

    def reset(self) -> None:
        """Forgets an iteration that raised; gradients that were not reduced are lost."""
        self._params.reset()
        self._awaits_backward = self._may_miss_update = False
        self._hidden_outputs = 0
        self._copies.clear()
        self.go_idle()

    def _recover_if_failed(self, module: nn.Module) -> None:
        self.context.recover_if_failed()
        if (
            self._training_state is TrainingState.FORWARD
            and self._calls.is_reentered_at(module)
            and self.context.has_opened(self)
            and not self.context.in_backward
        ):
            self.context.recover()

    def _enter(self, state: TrainingState) -> None:
        self._training_state = state
        self.context.relay.target.on_state(state, self._index, self.fqn)


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of the unit that `module` was given to `fully_shard` for, if any."""
    return cast("FSDPState | None", torch_private.composable_state(module, _STATE_KEY))


def states_in(module: nn.Module) -> Iterator[FSDPState]:
    """The states in the tree of `module`, each once, in pre-order."""
    yield from dict.fromkeys(s for m in module.modules() if (s := state_of(m)) is not None)
