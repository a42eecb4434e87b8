"""What all units of one root share during an iteration."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch

from fsdp_core import torch_private
from fsdp_core.comm import CommContext, Event, InFlightReduction, Stream
from fsdp_core.errors import StateError
from fsdp_core.runtime.ending import Ends, ending_of
from fsdp_core.runtime.observer import UnitTracer
from fsdp_core.schedule import BackwardOrder, ForwardOrder, InFlightWindow

if TYPE_CHECKING:
    from fsdp_core.options import UnitOptions
    from fsdp_core.runtime.observer import ObserverRelay


class Unit(Ends, Protocol):
    """What the context asks of a unit."""

    @property
    def options(self) -> UnitOptions:
        """Its configuration."""

    @property
    def tracer(self) -> UnitTracer:
        """Names its phases."""

    @property
    def gathering_ranks(self) -> frozenset[int]:
        """Ranks that take part in its gathers; none without parameters."""

    def prefetch_in_forward(self) -> None:
        """Starts the gather that the unit's next forward needs."""

    def prefetch_in_backward(self) -> None:
        """Starts the gather that the unit's next backward needs."""

    def drop_gathers(self) -> None:
        """Ends gathers in flight that nobody used."""

    def complete_partial_forward(self, output: object) -> object:
        """Ends a forward in which only some of the unit's modules ran."""

    def abandon_forward(self) -> None:
        """Reshards the parameters and ends a forward that did not end."""

    def complete_backward(self, *, is_whole: bool) -> None:
        """Runs the post-backward that autograd did not, if so."""

    def complete_backward_within_forward(self) -> None:
        """Reduces what a backward within the unit's own forward added; the forward goes on."""

    def reduce_overdue(self) -> None:
        """Reduces what earlier backwards left, after one that did not come through the unit."""

    def go_idle(self) -> None:
        """Ends the iteration."""

    def reset(self) -> None:
        """Forgets an iteration that raised."""


class RootContext:
    """Order, prefetch and in-flight collectives of the units under one root.

    It is built whole: at construction of a unit for that unit alone (`is_solo`), which is
    enough to unshard it, and for the tree at the root's first forward.

    Attributes:
        units: In pre-order of the root's modules; the root first.
        relay: The root's observer.
        shared: Where it communicates, perhaps with other roots.
        is_solo: Whether no root has been determined yet.
        backward_order: Post-forwards of this iteration.
        forward_order: Units that all ranks of this pass's opener gathered, and those of passes before.
    """

    def __init__(
        self, units: Sequence[Unit], shared: CommContext, relay: ObserverRelay, *, is_solo: bool
    ) -> None:
        self.units = tuple(units)
        self.relay = relay
        self.is_solo = is_solo
        self.backward_order = BackwardOrder()
        self.forward_order = ForwardOrder()
        self.shared = shared
        self._forward_root: Unit | None = None
        self._ranks_of_pass = 0
        self._forward_thread: weakref.ref[threading.Thread] | None = None
        self._expects_backward = True
        self._end: weakref.ref[_EndOfBackward] | None = None
        self._ends_all = self._has_lost = False
        self._reached: set[Unit] = set()
        self._prefetched: list[Unit] = []
        self.move_to(shared)

    @property
    def root(self) -> Unit:
        """Whose forward runs first; a unit alone is its own."""
        return self.units[0]

    @property
    def comm(self) -> CommContext:
        """Where collectives are placed and counted; without a root, on the current stream."""
        return self.shared.inline if self.is_solo else self.shared

    @property
    def inline_comm(self) -> CommContext:
        """Counted alike, but placed on the current stream."""
        return self.shared.inline

    @property
    def reduces(self) -> InFlightWindow[InFlightReduction]:
        """Reductions in flight, those of roots that share the context included."""
        return self.shared.reduces

    def move_to(self, shared: CommContext) -> None:
        """Shares another root's streams, counts and window; between iterations."""
        self.shared = shared
        shared.counts.tell(self.relay)
        shared.add_root(self)

    @property
    def in_backward(self) -> bool:
        """Whether a backward goes on, of which a thread started within it may be a part.

        PyTorch knows the thread that runs the backward alone. Activations may be recomputed in
        others meanwhile, which are not the one that runs forwards.
        """
        if torch_private.in_backward():
            return True
        if not self._is_end_queued or self._forward_thread is None:
            return False
        # Not by its number, which the next thread may have.
        return self._forward_thread() is not threading.current_thread()

    def begin_forward(self, unit: Unit) -> bool:
        """Opens a pass unless one is open; returns whether `unit` opened it.

        The opener need not be the root: a submodule may run alone, for example in evaluation. If
        it was one of a group, whose other modules have yet to run, its pass is still open, and
        goes on as a part of the root's.
        """
        if (opener := self._forward_root) is not None and (
            opener.is_running or unit is not self.root
        ):
            return False
        self._forward_root = unit
        with unit.tracer.phase("root_pre_forward"):
            self._follow_optimizer()
        if not self.in_backward:
            self._forward_thread = weakref.ref(threading.current_thread())
            index = self.units.index(unit)
            self.forward_order.begin(index)
            self._ranks_of_pass = next(filter(None, self._numbers_of_ranks[index:]), 0)
            self._expects_backward = torch.is_grad_enabled()
        return True

    @functools.cached_property
    def _numbers_of_ranks(self) -> tuple[int, ...]:
        """For each unit a number, the same for those that the same ranks gather; 0 without parameters."""
        numbers: dict[frozenset[int], int] = {frozenset(): 0}
        return tuple(numbers.setdefault(unit.gathering_ranks, len(numbers)) for unit in self.units)

    def has_opened(self, unit: Unit) -> bool:
        """Whether a pass is open that `unit` opened."""
        return self._forward_root is unit

    def _follow_optimizer(self) -> None:
        # The optimizer's update of the slices must be done before they are packed.
        options, streams = self.root.options, self.comm.streams
        event, options.post_optim_event = options.post_optim_event, None
        for stream in (Stream.PACK, Stream.GATHER):
            if event is None:
                streams.wait_stream(stream, Stream.COMPUTE)
            else:
                streams.wait_event(stream, cast("Event", event))

    def prefetch_forward(self, index: int, chosen: Sequence[Unit], *, were_sliced: bool) -> None:
        """Starts gathers for the units that follow unit `index`: the `chosen`, else the predicted one.

        Recomputation in backward follows no forward order and prefetches nothing. Neither does a unit
        that its ranks may run without the others: see `ForwardOrder`.

        Args:
            index: The unit whose forward starts.
            chosen: What the user has it prefetch.
            were_sliced: Whether its parameters came from all ranks that have a slice.
        """
        if self.in_backward:
            return
        predicted = None
        if were_sliced and self._numbers_of_ranks[index] == self._ranks_of_pass:
            predicted = self.forward_order.enter(index)
        targets = chosen or ([] if predicted is None else [self.units[predicted]])
        for target in targets:
            with target.tracer.span("forward_prefetch"):
                target.prefetch_in_forward()
            self._prefetched.append(target)

    def prefetch_backward(self, index: int, chosen: Sequence[Unit]) -> None:
        """Starts gathers for the units whose backward follows that of unit `index`."""
        predicted = None if chosen else self.backward_order.take(index)
        targets = chosen or ([] if predicted is None else [self.units[predicted]])
        for target in targets:
            with target.tracer.span("backward_prefetch"):
                target.prefetch_in_backward()

    def note_forward(self, index: int) -> None:
        """Notes, for backward, that unit `index` finished a forward of the open pass.

        Not in evaluation, where no backward would ever forget it. It is the pass that counts:
        reentrant checkpointing runs units without gradients.
        """
        if self._expects_backward:
            self.backward_order.record(index)

    def end_forward(self, unit: Unit, output: object) -> object:
        """Closes the pass if `unit` opened it; returns forward's output, hooked if need be."""
        if self._forward_root is not unit:
            return output
        # Innermost first, as their forwards would have ended.
        for other in reversed(self.units):
            if other is not unit:
                output = other.complete_partial_forward(output)
        if not self.in_backward:
            self.forward_order.end()
        self._close_pass()
        return output

    def abort_forward(self, unit: Unit) -> None:
        """Closes the pass if `unit` opened it and its forward raised; all go back to slices.

        Within backward only the pass is closed: recomputation stops early by an exception.
        """
        if self._forward_root is not unit:
            return
        if not self.in_backward:
            for each in self.units:
                each.abandon_forward()
            self.shared.forget_uncopied()
        self._close_pass()

    def _close_pass(self) -> None:
        # An unused guess would be stale after the next update.
        for guess in self._prefetched:
            guess.drop_gathers()
        self._prefetched.clear()
        self._forward_root = None
        self.comm.let_go_gathered()
        self.await_copied()

    def await_copied(self) -> None:
        """Waits until no other rank copies this rank's slices: see `CommContext.await_copied`."""
        self.shared.await_copied()

    def begin_backward(self) -> None:
        """Has the iteration of all units ended when the running backward is.

        Raises:
            StateError: See `refuse_while_ending`, and `join_backward`.
        """
        self.refuse_while_ending()
        self._queue_end()
        self._ends_all = True

    def join_backward(self, unit: Unit) -> None:
        """Has at least `unit` ended when the running backward is.

        Not every backward comes through the output of a unit's forward: some modules of a group
        may run alone, and what a module returns may hide a tensor, or be kept elsewhere. Then
        the other units' iteration goes on.
        """
        if unit in self._reached and self._is_end_queued:
            return  # told by another of its gradients
        self._queue_end()
        self._reached.add(unit)

    def refuse_while_ending(self) -> None:
        """A backward begins, or gives a gradient.

        Raises:
            StateError: A hook runs it where an earlier one ends, which could not take its gradients in.
        """
        end = None if self._end is None else self._end()
        if end is not None and end.is_running:
            raise StateError(
                "A hook of a parameter, or of the all-reduce, went backward through the model whose last "
                "gradients arrive: those of this backward would be lost. Go backward after the one that "
                "runs, or in a hook of a tensor."
            )

    def _queue_end(self) -> None:
        if not torch_private.in_backward():
            return
        if self._end is not None and not self._is_end_queued:
            raise StateError(
                "An earlier backward raised, and this one did not come through the output of a "
                "unit's forward, so gradients of the two cannot be distinguished. Call "
                "reset_iter_state() on the root after a backward that raised."
            )
        if torch_private.in_compiled_autograd():
            raise StateError(
                "Compiled autograd runs this backward, which it takes apart before units can gather and "
                "reduce: gradients would be lost. Switch it off (torch._dynamo.config.compiled_autograd)."
            )
        if self._end is None:
            self.reduces.resize(max(unit.options.max_reduces for unit in self.units))
            end = _EndOfBackward(self._end_outside_transforms)
            self._end = weakref.ref(end)
            torch_private.queue_after_backward(end)

    @property
    def _is_end_queued(self) -> bool:
        """Whether the end of a backward is to come, or goes on; not if that backward raised."""
        end = None if self._end is None else self._end()
        return end is not None and not end.has_raised

    def admit_reduce(self, pending: InFlightReduction) -> None:
        """Takes a reduction into the window; see `make_room_for_reduce`."""
        self.shared.have_in_flight(self)
        self.reduces.admit(pending)

    def make_room_for_reduce(self) -> None:
        """Lands the oldest reductions, before the buffer of one more is allocated; of another root all.

        Either root's backward may raise alone, if it runs within the other's.
        """
        self.shared.recover_failed(self)
        self._land_others()
        try:
            self._land(self.reduces.room_for_one())
        except BaseException:
            # Perhaps of a backward within another through this root, which goes on.
            self.lose_gradients()
            raise

    def _land(self, reductions: Iterable[InFlightReduction]) -> None:
        for pending in reductions:
            pending.land(self.comm)
            # A parameter's hook may have run another root's backward, which raised, or which is a
            # part of one that goes on.
            self.shared.recover_failed(self)
            self._land_others()

    def _land_others(self) -> None:
        # A hook may run another root's backward again, as what an earlier one left arrives.
        while not self.shared.has_in_flight(self):
            other = self.shared.root_in_flight
            self.shared.have_in_flight(self)
            try:
                self._land_all()
            except BaseException:
                if other is not None:
                    other.lose_gradients()
                raise

    def lose_gradients(self) -> None:
        """Has the backward that goes on, if any, raise at its end: some of its gradients did not arrive.

        A hook of a parameter raised, in a backward within it. Whoever catches that is not told otherwise.
        """
        self._has_lost = True

    def _refuse_if_lost(self) -> None:
        if self._has_lost:
            raise StateError(
                "A hook of a parameter, or of the all-reduce, raised in a backward within this one, "
                "as gradients of this one arrived: they are lost."
            )

    def _land_all(self) -> None:
        self._land(self.reduces.drain())
        self.comm.land_averages()
        self.comm.decide()

    def end_backward(self) -> None:
        """Ends the backward of all units; a pipeline calls it for gradients that it held."""
        self._ends_all = True
        try:
            self._end_reached()
        except BaseException:
            # No callback of autograd's is dead now, by which the next forward would see that it failed.
            self._end = weakref.ref(_EndOfBackward(self._end_reached))
            raise

    def _end_outside_transforms(self) -> None:
        # torch.func.grad runs its backward, and with it this, within the transform.
        with torch_private.outside_transforms():
            self._end_reached()

    def _end_reached(self) -> None:
        """Ends the backward of the units that it reached, or of all."""
        self._refuse_if_lost()
        self.shared.recover_failed(self)
        ends_all = self._ends_all
        ending = ending_of(self.units, self._reached, self._forward_root, ends_all=ends_all)
        if ending.closes_pass:
            self._forward_root = None
        with self.root.tracer.phase("root_post_backward_callback"):
            for unit in ending.ended:
                unit.complete_backward(is_whole=ends_all)
            for unit in ending.going_on:
                unit.complete_backward_within_forward()
            for unit in ending.left_out:
                unit.reduce_overdue()
            # Not the last backward either leaves any: gradients that arrived after the user has
            # zeroed them, because the next forward raised, would stay.
            self._land_others()
            self._land_all()
            if self.root.options.is_last_backward:
                if ends_all:
                    for unit in self.units:
                        unit.drop_gathers()
                    self.backward_order.clear()
                self.comm.end_backward()
            for unit in ending.ended:
                unit.go_idle()
            self.await_copied()
        # A hook may have gone backward through another root meanwhile, where the last ones arrived.
        self._refuse_if_lost()
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._end = None
        self._ends_all = self._has_lost = False
        self._reached.clear()

    def recover_if_failed(self) -> None:
        """Forgets the previous backward if it raised; called where forward or backward begins.

        A backward that raises never calls back, or raises as it does. Outside backward, a callback that
        has not come will not come; within another backward, the callback's weak reference is dead.
        """
        if self._end is not None and not (self._is_end_queued and self.in_backward):
            self.recover()

    def recover(self) -> None:
        """Registers all slices and drops everything in flight, unreduced gradients included.

        Ranks that failed alike started the same collectives, so waiting for them ends.
        """
        if self.shared.has_in_flight(self):
            self.comm.drop_averages()
            for pending in self.reduces.drain():
                pending.drop(self.comm)
            self.comm.forget_undecided()
        for unit in self.units:
            unit.reset()
        # Gradients that did arrive stay, and the user may zero them.
        self.comm.let_go_gathered()
        self.comm.end_backward()
        self.shared.forget_uncopied()
        self.backward_order.clear()
        self._prefetched.clear()
        self._forward_root = None
        self._forget_backward()


class _EndOfBackward:
    """Autograd's callback at the end of a backward.

    Only the running backward refers to it: if that raises, this is freed, and a weak reference to it is
    dead.

    Attributes:
        is_running: Whether the backward is over and its end goes on.
        has_raised: Whether the end itself raised. Whoever keeps that exception keeps this, too.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self.is_running = False
        self.has_raised = False

    def __call__(self) -> None:
        self.is_running = True
        try:
            self._finish()
        except BaseException:
            self.has_raised = True
            raise
        finally:
            self.is_running = False
