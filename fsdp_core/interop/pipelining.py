"""`torch.distributed.pipelining` over modules that this engine sharded.

PyTorch's stages and schedules know sharded modules by asking `isinstance` of PyTorch's own class,
at four steps: before a microbatch's backward, after the last one, around a stage's turn, and after the
trial pass that finds shapes. The `PipelineStage` here and `bridge_schedule` take these steps for our
modules, through the stage's methods and the schedule's registry of actions, so PyTorch's class is not
needed here.
`torch.distributed.pipelining` imports it by itself; that is why no other module of the engine
imports this one, and why PyTorch's private names of pipelining are met here and not in `torch_private`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import torch
from torch.distributed.pipelining import PipelineStage as TorchPipelineStage
from torch.distributed.pipelining.schedules import (
    RESHARD,
    UNSHARD,
    _PipelineScheduleRuntime,
)

from fsdp_core.errors import UnsupportedError
from fsdp_core.runtime import FSDPModule

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.pipelining._utils import _StageBackwardMeta
    from torch.distributed.pipelining.schedules import _Action, _PipelineContext

    from fsdp_core.runtime.fsdp_state import FSDPState

# States of stages that went backward in a step and have not reduced. Kept here, not by the stage: a new
# stage of the same module must see the step that raised; not read from the setters: a user may set them, too.
_unreduced: WeakSet[FSDPState] = WeakSet()


class PipelineStage(TorchPipelineStage):
    """A stage whose module may be sharded by `fsdp_core.fully_shard`; else as PyTorch's.

    Gradients of the microbatches accumulate whole and are reduced once, after the last one, as
    PyTorch's stage has it for PyTorch's sharding. Everything else, the constructor included, is
    documented at `torch.distributed.pipelining.PipelineStage`.
    """

    def clear_runtime_states(self) -> None:
        """Begins a step; of one that raised before its reduction no gradients are left."""
        super().clear_runtime_states()
        if isinstance(self.submod, FSDPModule):
            state = self.submod._get_fsdp_state()  # noqa: SLF001 - the name by which others find it
            if state in _unreduced:
                state.context.recover()
                _set_last(self.submod, is_last=True)

    def backward_maybe_with_nosync(
        self,
        backward_type: object,
        bwd_kwargs: dict[str, object],
        last_backward: bool = False,  # noqa: FBT001, FBT002 - PyTorch's signature
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, object]] | None]:
        """Runs one microbatch's backward; gradients stay on this rank.

        Raises:
            UnsupportedError: The backward is split, and parts of the stage's module are sharded, but not it.
        """
        if isinstance(self.submod, FSDPModule):
            _set_last(self.submod, is_last=False)
        if backward_type != "full":
            sharded = list(_sharded_modules(self.submod))
            if sharded and not isinstance(self.submod, FSDPModule):
                raise UnsupportedError(
                    "A schedule that splits backwards needs stages whose module is sharded itself: parts of "
                    "it would reduce before they have all gradients. Call fully_shard on the module, too."
                )
            # Asked for its parameters, the stage must name those that forward computed with: gradients
            # of others are lost without an error.
            for module in sharded:
                module.unshard()
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduces what all microbatches accumulated, then divides by `grad_scale_factor`."""
        if isinstance(self.submod, FSDPModule):
            _set_last(self.submod, is_last=True)
            # The last backward ended while gradients were not to be reduced yet: end it again.
            self.submod._get_fsdp_state().context.end_backward()  # noqa: SLF001 - the name by which others find it
        # An evaluation ends here, too, and has nothing to scale.
        super().perform_reduce_grad(grad_scale_factor if self.has_backward else 1)

    def _backward_metadata_inference(
        self,
        *args: Any,  # noqa: ANN401 - PyTorch's differ from release to release
        **kwargs: Any,  # noqa: ANN401 - see above
    ) -> _StageBackwardMeta | None:
        # The trial pass, before the first step and where training goes on after an evaluation. It asks for
        # gradients of inputs alone: what earlier backwards left is not to be reduced with it.
        with ExitStack() as stack:
            for module in _sharded_modules(self.submod):
                stack.enter_context(module.no_sync())
            return super()._backward_metadata_inference(*args, **kwargs)

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        # The trial pass has unsharded parameters.
        for module in _sharded_modules(self.submod):
            module.reshard()


def bridge_schedule(schedule: object) -> None:
    """Has a schedule gather and free each stage's parameters at the times it planned.

    Without it a schedule of several stages per rank trains to the same numbers, but each unit
    gathers when its forward begins, and stays whole from its first backward to the reduction.
    Schedules of one stage per rank plan no such times; they are left as they are. All stages of
    one schedule must be sharded by this engine or by none.

    Args:
        schedule: An instance of a class of `torch.distributed.pipelining`, before its first step.
    """
    if isinstance(schedule, _PipelineScheduleRuntime):
        schedule.register_custom_function(UNSHARD, _unshard)
        schedule.register_custom_function(RESHARD, _reshard)


def _unshard(action: _Action, ctx: _PipelineContext) -> None:
    # No handle is kept: forward waits by itself.
    for module in _modules_of(action, ctx):
        module.unshard(async_op=True)


def _reshard(action: _Action, ctx: _PipelineContext) -> None:
    for module in _modules_of(action, ctx):
        module.reshard()


def _modules_of(action: _Action, ctx: _PipelineContext) -> Iterator[FSDPModule]:
    # The declared type is a base class that has no stages of its own.
    schedule = cast("_PipelineScheduleRuntime", ctx.schedule_ref)
    for stage in schedule._stages:  # noqa: SLF001 - no public way from an action to its stage
        if stage.stage_index == action.stage_index:
            yield from _sharded_modules(stage.submod)


def _sharded_modules(module: nn.Module) -> Iterator[FSDPModule]:
    return (each for each in module.modules() if isinstance(each, FSDPModule))


def _set_last(root: FSDPModule, *, is_last: bool) -> None:
    root.set_is_last_backward(is_last)
    root.set_reshard_after_backward(is_last)
    root.set_requires_gradient_sync(is_last)
    state = root._get_fsdp_state()  # noqa: SLF001 - the name by which others find it
    if is_last:
        _unreduced.discard(state)
    else:
        _unreduced.add(state)
