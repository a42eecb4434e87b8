"""Follows one step of a model and cuts its memory into segments at the boundaries of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_core import torch_private
from fsdp_core.errors import PlanError
from fsdp_core.plan import fakes
from fsdp_core.plan.live_storage import LiveStorage
from fsdp_core.runtime.autograd_boundary import call_after_backward
from fsdp_core.runtime.tensor_tree import grad_tensors, map_tensors

if TYPE_CHECKING:
    from fsdp_core.plan.model.profile import Boundary
    from fsdp_core.plan.workspace import Workspaces


@dataclass
class RawSegment:
    """A segment as it was measured; see `fsdp_core.plan.model.Segment`.

    Attributes:
        begins: Its boundary.
        module: Whose.
        levels: Bytes over those at its start, whenever more became alive.
        within: The same with what operators take within themselves, while such are at work.
        change: Activation bytes at its end minus those at its start.
        grads: Parameters whose gradients became known.
    """

    begins: Boundary
    module: str
    levels: list[int] = field(default_factory=list)
    within: list[int] = field(default_factory=list)
    change: int = 0
    grads: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RawStep:
    """A step as it was measured.

    Attributes:
        segments: In order.
        outputs: Bytes that each stop's forward returned.
        sent: Bytes that the collectives within it send.
        operators: How many ran.
    """

    segments: list[RawSegment]
    outputs: dict[str, int]
    sent: int
    operators: int

    def levels_between(self, begins: Boundary, module: str) -> list[int]:
        """Bytes over those at which forward or backward of `module` began, until it ended."""
        found: list[int] = []
        level, within = 0, False
        for segment in self.segments:
            if segment.module == module and segment.begins == begins:
                level, within = 0, True
            if segment.module == module and segment.begins == f"{begins}_end":
                within = False
            if within:
                found += [level + each for each in segment.levels]
            level += segment.change
        return found


@dataclass(frozen=True)
class StepOptions:
    """How a step is followed.

    Attributes:
        param_dtype: To which inputs of stops are cast.
        output_dtype: To which the root's outputs are cast.
        tp: Ranks over which matrices are split.
        granularity: Of memory.
        workspaces: Of operators.
        within: Is not empty while a stop's own recomputation runs.
    """

    param_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    tp: int
    granularity: int
    workspaces: Workspaces | None = None
    within: Sequence[str] = ()


def follow_step(
    model: nn.Module,
    stops: Sequence[str],
    make_loss: Callable[[], torch.Tensor],
    options: StepOptions,
) -> RawStep:
    """Runs forward and backward once.

    Args:
        model: Its parameters do not count.
        stops: Modules at whose boundaries segments are cut.
        make_loss: Makes a batch, runs the model on it, and returns the loss.
        options: Dtypes and ranks.

    Raises:
        PlanError: The step has no boundaries in backward.
    """
    recorder = _Recorder(options)
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.live.ignore(fakes.plain(tensor))
    handles = [
        parameter.register_post_accumulate_grad_hook(recorder.note_grad(place))  # type: ignore[no-untyped-call]  # PyTorch's
        for place, parameter in enumerate(model.parameters())
        if parameter.requires_grad
    ]
    for name in stops:
        handles += recorder.watch(model.get_submodule(name), name)
    try:
        with recorder.live:
            recorder.cut("start", "")
            loss = make_loss()
            recorder.cut("loss_backward", "")
            loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's
            recorder.close()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    live = recorder.live
    return RawStep(recorder.segments, recorder.outputs, recorder.sent, live.operators)


class _Recorder:
    """Told of boundaries, asks how much memory is alive."""

    def __init__(self, options: StepOptions) -> None:
        note = self._note_operator if options.tp > 1 else None
        look_into = None if options.workspaces is None else options.workspaces.look
        self.live = LiveStorage(options.granularity, note, of_fakes=True, look_into=look_into)
        self.segments: list[RawSegment] = []
        self.outputs: dict[str, int] = {}
        self.sent = 0
        self._options = options
        self._in_backward: set[str] = set()
        self._again: str | None = None
        self._without_grad: set[str] = set()
        self._grads: dict[int, int] = {}
        self._all_grads = 0
        self._began = (0, 0)

    def cut(self, begins: Boundary, module: str) -> None:
        """Ends a segment and begins another."""
        self.close()
        self._began = (self.live.live, self._activations)
        self.segments.append(RawSegment(begins, module))

    def close(self) -> None:
        """Ends a segment."""
        if self.segments:
            began, activations = self._began
            self.segments[-1].levels = [level - began for level in self.live.take_levels()]
            self.segments[-1].within = [level - began for level in self.live.take_levels_within()]
            self.segments[-1].change = self._activations - activations

    def note_grad(self, place: int) -> Callable[[torch.Tensor], None]:
        """A hook for the parameter of this place."""

        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                grad = fakes.plain(parameter.grad)
                counted = self.live.counted(grad)
                self._all_grads += counted - self._grads.get(place, 0)
                self._grads[place] = counted
                self.segments[-1].grads.append(place)

        return hook

    def watch(self, module: nn.Module, name: str) -> list[torch.utils.hooks.RemovableHandle]:
        """Cuts at the boundaries of `module`, where the engine's hooks would be."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - as they come
            args, kwargs = self._cast((args, kwargs), self._options.param_dtype)
            if torch_private.in_backward():
                self._begin_again(name)
                return args, kwargs
            self.cut("forward", name)
            if not torch.is_grad_enabled():
                self._without_grad.add(name)
            return call_after_backward((args, kwargs), lambda: self._leave_backward(name))

        def after(_: nn.Module, args: object, output: Any) -> Any:  # noqa: ANN401 - as it comes
            del args
            if not torch_private.in_backward():
                self.cut("forward_end", name)
                for tensor in grad_tensors(output):
                    tensor.register_hook(lambda grad: self._enter_backward(name, grad))  # type: ignore[no-untyped-call]  # PyTorch's
                self.outputs[name] = sum(
                    self.live.counted(fakes.plain(tensor)) for tensor in grad_tensors(output)
                )
            return self._cast(output, self._options.output_dtype if name == "" else None)

        def ended(*_: object) -> None:
            # Recomputation ends by an exception once all is there that backward needs.
            if self._again == name:
                self._again = None
                self.cut("again_end", name)

        return [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after),
            module.register_forward_hook(ended, always_call=True),
        ]

    @property
    def _activations(self) -> int:
        return self.live.live - self._all_grads

    def _begin_again(self, name: str) -> None:
        """Of what the model recomputes by itself, the outermost stops gather."""
        if name in self._without_grad:
            raise PlanError(_REENTRANT)
        if name and self._again is None and not self._options.within:
            self._again = name
            self.cut("again", name)

    def _enter_backward(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        if name not in self._in_backward:
            self._in_backward.add(name)
            self.cut("backward", name)
        return grad

    def _leave_backward(self, name: str) -> None:
        self._in_backward.discard(name)
        self.cut("backward_end", name)

    @staticmethod
    def _cast(tree: Any, dtype: torch.dtype | None) -> Any:  # noqa: ANN401 - nested values
        if dtype is None:
            return tree
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)

    def _note_operator(self, name: str, result: torch.Tensor) -> None:
        ranks = self._options.tp
        part = _SENT.get(name)
        if part is not None:
            self.sent += int(result.nbytes * part(ranks))


_REENTRANT = (
    "The model recomputes activations with use_reentrant=True. Such a step has no boundaries of "
    "modules in backward: set use_reentrant=False to have it followed."
)

# What a ring over n ranks sends, as a part of what the collective returns.
_SENT: Mapping[str, Callable[[int], float]] = {
    "_c10d_functional.all_reduce.default": lambda n: 2 * (n - 1) / n,
    "_c10d_functional.all_gather_into_tensor.default": lambda n: (n - 1) / n,
    "_c10d_functional.reduce_scatter_tensor.default": lambda n: n - 1,
}
