"""The class that a sharded module gets, its own with these methods added, and functions for such modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, NoReturn, Self, cast

from torch import nn

from fsdp_core.errors import ArgumentError, NoDeepcopyError, RootError
from fsdp_core.runtime.fsdp_state import FSDPState, state_of
from fsdp_core.runtime.setters import Setters

if TYPE_CHECKING:
    from fsdp_core.runtime.observer import Observer

_classes: dict[type[nn.Module], type[nn.Module]] = {}


class _Construction:
    """Whether building an FSDP class also runs the original's ``__init__``."""

    runs_init = True


class UnshardHandle:
    """Returned by ``unshard(async_op=True)``; a second wait does nothing.

    The module's forward waits by itself; call `wait` to use the parameters before that.

    Args:
        finish: Waits for the unshard; None: it has finished.
    """

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Returns when the current stream may use the whole parameters, now registered."""
        if self._finish is not None:
            self._finish()


class FSDPModule(Setters):
    """Mixed into the class of every module that was given to `fully_shard`.

    The setters write configuration objects, of the unit and of its groups, which are read at the
    next phase.
    """

    _original_class: ClassVar[type[nn.Module]]

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Constructs the original class, so that slicing a sharded `Sequential` works."""
        original = cast("type[Self]", cls._original_class)
        made = original.__new__(original)
        if _Construction.runs_init:
            cast("Callable[..., None]", made.__init__)(*args, **kwargs)  # type: ignore[misc]  # the original's signature is unknown here
        return made

    # -- Sharded and unsharded

    def reshard(self) -> None:
        """Registers the slices and frees the whole parameters of this unit; not recursive.

        A gather in flight is waited for and dropped, so that the next one reads the slices again.
        """
        state = self._get_fsdp_state()
        state.drop_gathers()
        state.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters of this unit; not recursive.

        Args:
            async_op: Return at once with a handle. Forward waits by itself.
        """
        state = self._get_fsdp_state()
        state.unshard()
        if async_op:
            return UnshardHandle(state.finish_unshard)
        state.finish_unshard()
        return None

    def reset_iter_state(self) -> None:
        """Forgets, on the root, an iteration that raised in forward or backward.

        All parameters are resharded, collectives in flight are waited for and their results
        dropped, and so are gradients that were accumulated without a reduction: start the
        accumulation over. The next forward does the same automatically; call this to free the
        memory at once, or to discard an accumulation.

        Raises:
            RootError: The module is not the root.
        """
        state = self._get_fsdp_state()
        if state.context.root is not state:
            raise RootError("reset_iter_state must be called on the root FSDP module")
        state.context.recover()

    # -- Prefetch

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the units to gather while this one's forward runs, in order.

        Raises:
            ArgumentError: Some module is not sharded.
        """
        self._get_fsdp_state().prefetch_after_forward = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the units to gather while this one's backward runs, in order.

        Raises:
            ArgumentError: Some module is not sharded.
        """
        self._get_fsdp_state().prefetch_after_backward = _states_of(modules)

    # -- Inside

    def _apply(self, fn: Callable[..., object], recurse: bool = True) -> Self:
        """`to`, `cuda`, `half`, `to_empty`: apply to the slices, then pad them again."""
        state = self._get_fsdp_state()
        state.drop_gathers()
        state.reshard()
        apply = cast("Callable[..., Self]", super()._apply)  # type: ignore[misc]  # nn.Module's, next in the order
        result = apply(fn, recurse)
        state.refresh()
        return result


def fsdp_class_of(original: type[nn.Module]) -> type[nn.Module]:
    """The class `FSDP<Original>`, made once per original class."""
    if original not in _classes:
        namespace = {"__deepcopy__": _no_copy, "_original_class": original}
        _classes[original] = cast(
            "type[nn.Module]",
            type(f"FSDP{original.__name__}", (FSDPModule, original), namespace),
        )
    return _classes[original]


def get_cls_to_fsdp_cls() -> dict[type[nn.Module], type[nn.Module]]:
    """Original class to its sharded class, for all made so far."""
    return _classes


@contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Within, constructing a sharded class does not run the original's ``__init__``."""
    before, _Construction.runs_init = _Construction.runs_init, False
    try:
        yield
    finally:
        _Construction.runs_init = before


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes ``module.<method_name>`` unshard and reshard as `forward` does.

    Args:
        module: A sharded module; any other is left as it is, so that one script serves both.
        method_name: Name of a method that takes and returns tensors as forward does.

    Raises:
        ArgumentError: There is no such method.
    """
    state = state_of(module)
    if state is None or not isinstance(module, FSDPModule):
        return
    method: Callable[..., object] | None = getattr(module, method_name, None)
    if method is None:
        raise ArgumentError(f"{type(module)} does not have a method {method_name}")

    @functools.wraps(method)
    def with_hooks(*args: object, **kwargs: object) -> object:
        target = cast("nn.Module", module)
        with state.running_method():
            args, kwargs = state.pre_forward(target, args, kwargs)
            return state.post_forward(target, args, method(*args, **kwargs))

    setattr(module, method_name, with_hooks)


def observe(model: nn.Module, observer: Observer) -> None:
    """Reports every state and collective of the units below `model` to `observer` from now on.

    Args:
        model: The root: the module whose forward the training loop calls.
        observer: Replaces the one before.

    Raises:
        ArgumentError: `model` was not given to `fully_shard`, or is not the root.
    """
    state = state_of(model)
    if state is None or state.context.root is not state:
        raise ArgumentError(
            f"Only a root module can be observed, and {type(model).__name__} is "
            f"{'not sharded' if state is None else f'the unit {state.fqn!r} of another'}. "
            "Pass the model that fully_shard was applied to last."
        )
    state.relay.target = observer


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Gives several roots one set of streams, one count of collectives, one in-flight window.

    Streams and the memory pools behind them are then not multiplied by the number of roots. Each
    root keeps its own prefetch order. Call it between iterations, on all ranks.

    Args:
        modules: Root modules on one device; none or one means nothing to do.

    Raises:
        ArgumentError: Some module is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ArgumentError(f"Expects list of FSDPModules but got {module}")
    states = _states_of(modules)
    for state in states[1:]:
        state.context.move_to(states[0].context.shared)


def _no_copy(*_: object) -> NoReturn:
    raise NoDeepcopyError(
        "FSDP does not support deepcopy. Please use state dict for serialization."
    )


def _states_of(modules: Iterable[object]) -> tuple[FSDPState, ...]:
    states = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ArgumentError(f"Expects FSDPModule but got {type(module)}: {module}")
        states.append(module._get_fsdp_state())  # noqa: SLF001 - a function of this class
    return tuple(states)
