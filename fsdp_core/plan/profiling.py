"""Profiles a model: parameters on the meta device, activations without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_core import torch_private
from fsdp_core.errors import PlanError
from fsdp_core.plan.apply import DTYPES
from fsdp_core.plan.candidates import candidate_units, used_within
from fsdp_core.plan.model import (
    BufferFacts,
    Conditions,
    Growth,
    Highest,
    ModelProfile,
    ParameterFacts,
    Segment,
    TensorParallelPlan,
    Trace,
    UnitFacts,
    matches,
)
from fsdp_core.plan.step_trace import RawStep, StepOptions, follow_step
from fsdp_core.plan.tensor_parallel import split
from fsdp_core.plan.unit_counts import UnitCounts, count

if TYPE_CHECKING:
    from fsdp_core.plan.model.profile import UnitKind

# Of PyTorch's caching allocator; the host's is taken to waste nothing.
_GRANULARITY = {"cuda": 512}

SIZES = (1, 2, 4)
"""Micro-batches that are followed: two make a line, a third shows whether it is one."""


@dataclass(frozen=True)
class ModelUnderStudy:
    """How to build a model and to run it.

    Attributes:
        make: Builds it.
        loss: Runs it on a micro-batch of so many samples, which it makes on the default device,
            and returns a scalar.
        device_type: Where the job will run.
        tensor_parallel: What is split over the `tp` axis, where there is one.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    device_type: str = "cpu"
    tensor_parallel: tuple[TensorParallelPlan, ...] = ()


def profile_model(
    study: ModelUnderStudy,
    conditions: Sequence[Conditions] = (Conditions(),),
    *,
    stops: Sequence[str] = (),
    sizes: Sequence[int] = SIZES,
) -> ModelProfile:
    """Profiles a model without running it.

    With `Conditions.tp` above 1 there must be no default process group: one whose ranks do
    nothing is made for the time being.

    Args:
        study: The model.
        conditions: Under which steps are followed; at least one.
        stops: Modules that a plan may name as units, besides those that suit; patterns as of a
            plan's units.
        sizes: Micro-batches.

    Raises:
        PlanError: The device is not there, or the model has no module that a stop or split means.
        Exception: Whatever the model raises.
    """
    _check_device(study.device_type)
    model = _on_meta(study)
    kinds = _suitable(study, candidate_units(model), min(sizes))
    names = [name for name, _ in model.named_modules()]
    if unknown := [stop for stop in stops if not any(matches(stop, name) for name in names)]:
        raise PlanError(f"The model has no modules {unknown} at which to follow it.")
    named = {name for name in names if any(matches(stop, name) for stop in stops)}
    stopping = [name for name in names if name in kinds or name in named or name == ""]
    followed = [
        {size: _follow(study, each, stopping, size) for size in sizes} for each in conditions
    ]
    ends = (min(sizes), max(sizes))
    counts = {size: _count(study, stopping, size) for size in ends}
    return ModelProfile(
        device_type=study.device_type,
        modules=tuple(names),
        stops=tuple(stopping),
        parameters=_parameters(model),
        buffers=tuple(BufferFacts(name, each.nbytes) for name, each in model.named_buffers()),
        units=tuple(_unit(name, kind, followed[0], counts) for name, kind in kinds.items()),
        flops=_growth({size: each.flops[""] for size, each in counts.items()}),
        traces=tuple(_trace(each, steps) for each, steps in zip(conditions, followed, strict=True)),
        granularity=_GRANULARITY.get(study.device_type, 1),
    )


# -- Running it without memory


def _suitable(
    study: ModelUnderStudy, kinds: Mapping[str, UnitKind], size: int
) -> dict[str, UnitKind]:
    with _running(study, Conditions()) as model:
        found = used_within(model, partial(study.loss, model, size), kinds)
    return {name: kind for name, kind in kinds.items() if name in found}


def _follow(
    study: ModelUnderStudy, conditions: Conditions, stops: Sequence[str], size: int
) -> RawStep:
    with _running(study, conditions) as model:
        if conditions.recompute:
            for name in stops:
                if name:
                    module = model.get_submodule(name)
                    module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        options = StepOptions(
            None if conditions.param_dtype is None else DTYPES[conditions.param_dtype],
            None if conditions.output_dtype is None else DTYPES[conditions.output_dtype],
            conditions.tp,
            _GRANULARITY.get(study.device_type, 1),
        )
        loss = partial(study.loss, model, size)
        if conditions.tp > 1:
            # The first time, DTensor tries each operator on tensors of its own.
            follow_step(model, stops, loss, options)
        return follow_step(model, stops, loss, options)


def _count(study: ModelUnderStudy, stops: Sequence[str], size: int) -> UnitCounts:
    with _running(study, Conditions()) as model:
        return count(model, partial(study.loss, model, size), stops=stops)


@contextmanager
def _running(study: ModelUnderStudy, conditions: Conditions) -> Iterator[nn.Module]:
    """The model under `conditions`, its tensors without memory, on the job's device."""
    with ExitStack() as stack:
        model = _on_meta(study)
        if conditions.tp > 1:
            stack.enter_context(torch_private.fake_ranks(conditions.tp))
            mesh = init_device_mesh(study.device_type, (conditions.tp,), mesh_dim_names=("tp",))
            split(model, study.tensor_parallel, mesh)
        stack.enter_context(torch_private.without_memory())
        stack.enter_context(torch.device(study.device_type))
        dtype = conditions.param_dtype
        _move(model, study.device_type, None if dtype is None else DTYPES[dtype])
        yield model


def _on_meta(study: ModelUnderStudy) -> nn.Module:
    with torch.device("meta"), torch_private.without_drawing_twice():
        return study.make()


def _move(model: nn.Module, device_type: str, dtype: torch.dtype | None) -> None:
    """Replaces parameters and buffers by ones on the device; what is tied stays so."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in torch_private.own_parameters(module):
            if parameter not in moved:
                wanted = dtype if parameter.is_floating_point() else None
                empty = _empty_like(parameter, device_type, wanted)
                moved[parameter] = nn.Parameter(empty, parameter.requires_grad)
            torch_private.set_parameter(module, name, moved[parameter])  # type: ignore[arg-type]  # parameters become parameters
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer not in moved:
                moved[buffer] = _empty_like(buffer, device_type, None)
            setattr(module, name, moved[buffer])


def _empty_like(tensor: torch.Tensor, device_type: str, dtype: torch.dtype | None) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        local = _empty_like(torch_private.plain(tensor), device_type, dtype)
        return torch_private.dtensor_of(local, torch_private.spec_of(tensor))
    if type(tensor) in {torch.Tensor, nn.Parameter} and tensor.is_contiguous():
        # As empty_like would, which first makes a tensor without memory of the one it is given.
        shape, strides = tensor.shape, tensor.stride()
        return torch.empty_strided(shape, strides, dtype=dtype or tensor.dtype, device=device_type)
    return torch.empty_like(tensor.detach(), device=device_type, dtype=dtype)


def _check_device(device_type: str) -> None:
    if device_type != "cpu" and not torch.accelerator.is_available():
        # PyTorch would end the process.
        raise PlanError(
            f"A model for {device_type!r} can be profiled only where there is such a device."
        )


# -- From measurements to facts


def _parameters(model: nn.Module) -> tuple[ParameterFacts, ...]:
    names: dict[nn.Parameter, list[str]] = {}
    embeddings = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in torch_private.own_parameters(module):
            known = names.setdefault(parameter, [])
            known.append(f"{prefix}.{name}" if prefix else name)
            if isinstance(module, nn.Embedding):
                embeddings.add(parameter)
    return tuple(
        ParameterFacts(
            name=first,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            itemsize=parameter.itemsize,
            is_floating=parameter.is_floating_point(),
            requires_grad=parameter.requires_grad,
            is_embedding=parameter in embeddings,
            also=tuple(others),
        )
        for parameter, (first, *others) in names.items()
    )


def _trace(conditions: Conditions, steps: Mapping[int, RawStep]) -> Trace:
    columns = list(zip(*(step.segments for step in steps.values()), strict=True))
    segments = tuple(
        Segment(
            column[0].begins,
            column[0].module,
            Highest.through(dict(zip(steps, (each.levels for each in column), strict=True))),
            _growth(dict(zip(steps, (each.change for each in column), strict=True))),
            tuple(column[0].grads),
        )
        for column in columns
    )
    sent = _growth({size: step.sent for size, step in steps.items()})
    operators = _growth({size: step.operators for size, step in steps.items()})
    return Trace(conditions, segments, sent, operators)


def _unit(
    name: str,
    kind: UnitKind,
    steps: Mapping[int, RawStep],
    counts: Mapping[int, UnitCounts],
) -> UnitFacts:
    return UnitFacts(
        module=name,
        kind=kind,
        saved=_growth({size: each.saved.get(name, 0) for size, each in counts.items()}),
        forward_peak=Highest.through(
            {size: step.levels_between("forward", name) for size, step in steps.items()}
        ),
        backward_peak=Highest.through(
            {size: step.levels_between("backward", name) for size, step in steps.items()}
        ),
        outputs=_growth({size: step.outputs.get(name, 0) for size, step in steps.items()}),
        flops=_growth({size: each.flops.get(name, 0) for size, each in counts.items()}),
    )


_growth = Growth.through
