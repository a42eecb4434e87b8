"""Profiles a model: parameters on the meta device, activations without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_core import torch_private
from fsdp_core.errors import PlanError
from fsdp_core.plan import fakes
from fsdp_core.plan.apply import DTYPES, written_in_forward
from fsdp_core.plan.candidates import candidate_units, used_within
from fsdp_core.plan.model import (
    BufferFacts,
    Conditions,
    Growth,
    Highest,
    ModelProfile,
    ParameterFacts,
    PassTimes,
    Segment,
    Trace,
    UnitFacts,
    matches,
)
from fsdp_core.plan.pass_timing import Effort, timing_passes
from fsdp_core.plan.step_trace import RawSegment, RawStep, StepOptions, follow_step
from fsdp_core.plan.study import ModelUnderStudy
from fsdp_core.plan.tensor_parallel import split
from fsdp_core.plan.unit_counts import UnitCounts, count
from fsdp_core.plan.workspace import Workspaces

if TYPE_CHECKING:
    from fsdp_core.plan.model.profile import Boundary, UnitKind

# Of PyTorch's caching allocator; the host's is taken to waste nothing.
_GRANULARITY = {"cuda": 512}

SIZES = (1, 2, 4)
"""Micro-batches that are followed: two make a line, a third shows whether it is one."""

# Where SIZES show too little of what grows with the square, and a part by which lines may be wrong
# there.
_FAR = (64, 128, 256)
_STRAIGHT, _STRAIGHT_BYTES = 0.02, 1 << 16
# What is lower than this part of the highest is taken to stay so.
_NEAR_THE_TOP = 0.5


def profile_model(
    study: ModelUnderStudy,
    conditions: Sequence[Conditions] = (Conditions(),),
    *,
    stops: Sequence[str] = (),
    sizes: Sequence[int] | None = None,
    timed_within: int | None = None,
) -> ModelProfile:
    """Profiles a model without running it. Single operators are run, see `Workspaces`.

    With `Conditions.tp` above 1 there must be no default process group: one whose ranks do
    nothing is made for the time being.

    Args:
        study: The model.
        conditions: Under which steps are followed; at least one.
        stops: Modules that a plan may name as units, besides those that suit; patterns as of a
            plan's units.
        sizes: Micro-batches; None: `SIZES`, twice as many samples if the model takes no single
            one, the next one besides if operators need more for each sample as they become more,
            and large ones if memory does not grow in lines.
        timed_within: Bytes that passes with values may take, which are timed beside the rest; None:
            none are.

    Raises:
        PlanError: The device is not there, the model has no module that a stop or split means, or
            it cannot be followed.
        Exception: Whatever the model raises.
    """
    _check_device(study.device_type)
    model = _on_meta(study)
    near, kinds = _first_sizes(study, candidate_units(model), sizes)
    names = [name for name, _ in model.named_modules()]
    if unknown := [stop for stop in stops if not any(matches(stop, name) for name in names)]:
        raise PlanError(f"The model has no modules {unknown} at which to follow it.")
    named = {name for name in names if any(matches(stop, name) for stop in stops)}
    stopping = [name for name in names if name in kinds or name in named or name == ""]
    workspaces = Workspaces.on(study.device_type)
    followed: list[dict[int, RawStep]] = [{} for _ in conditions]
    # What is wrong with the model is raised here, before it is run in another way.
    followed[0][near[0]] = _follow(study, conditions[0], stopping, near[0], workspaces)
    ends = (min(near), max(near))
    counts = {size: _count(study, stopping, size) for size in ends}
    flops = _growth({size: each.flops[""] for size, each in counts.items()})
    effort = Effort(
        sum(each.nbytes for each in model.parameters()),
        _growth(
            {size: sum(each.saved.get(name, 0) for name in kinds) for size, each in counts.items()}
        ),
        flops,
    )
    with _timing(study, effort, timed_within, conditions[0]) as timed:
        for each, steps in zip(conditions, followed, strict=True):
            missing = [size for size in near if size not in steps]
            steps.update({n: _follow(study, each, stopping, n, workspaces) for n in missing})
        may_go_on = sizes is None and workspaces.was_cheap and not workspaces.has_assumed
        if may_go_on and any(_is_bent(steps) for steps in followed):
            further = [
                _further(study, each, stopping, 2 * max(near), workspaces) for each in conditions
            ]
            for steps, step in zip(followed, further, strict=True):
                if step is not None and _way(step) == _way(steps[max(near)]):
                    steps[2 * max(near)] = step
        # Large micro-batches are followed without running operators.
        is_open = sizes is None and not workspaces.has_resized
        if is_open and not _is_straight(study, conditions[0], stopping, followed[0]):
            for each, steps in zip(conditions, followed, strict=True):
                steps.update({size: _follow(study, each, stopping, size, None) for size in _FAR})
        times = timed()
    return ModelProfile(
        device_type=study.device_type,
        modules=tuple(names),
        stops=tuple(stopping),
        parameters=_parameters(model),
        buffers=tuple(BufferFacts(name, each.nbytes) for name, each in model.named_buffers()),
        units=tuple(_unit(name, kind, followed[0], counts) for name, kind in kinds.items()),
        flops=flops,
        traces=tuple(_trace(each, steps) for each, steps in zip(conditions, followed, strict=True)),
        granularity=_GRANULARITY.get(study.device_type, 1),
        smallest=min(near),
        built_whole=study.built_whole,
        timed=times,
    )


def _timing(
    study: ModelUnderStudy, effort: Effort, memory: int | None, conditions: Conditions
) -> AbstractContextManager[Callable[[], PassTimes | None]]:
    if memory is None:
        return nullcontext(lambda: None)
    return timing_passes(study, effort, memory, conditions.param_dtype)


# -- Running it without memory


def _first_sizes(
    study: ModelUnderStudy, kinds: Mapping[str, UnitKind], sizes: Sequence[int] | None
) -> tuple[Sequence[int], dict[str, UnitKind]]:
    """Sizes to follow, and modules that suit as units."""
    if sizes is not None:
        return sizes, _suitable(study, kinds, min(sizes))
    try:
        return SIZES, _suitable(study, kinds, min(SIZES))
    except ValueError:
        # Statistics over a batch need two samples. What is wrong with all sizes is raised here.
        doubled = [2 * size for size in SIZES]
        return doubled, _suitable(study, kinds, min(doubled))


def _is_straight(
    study: ModelUnderStudy,
    conditions: Conditions,
    stops: Sequence[str],
    steps: Mapping[int, RawStep],
) -> bool:
    """Whether lines through what was followed hold for a large micro-batch."""
    size = max(_FAR)
    try:
        far = _follow(study, conditions, stops, size, None)
    except Exception:  # noqa: BLE001 - a model may refuse such a batch
        return True
    trace = _trace(conditions, steps)
    if len(far.segments) != len(trace.segments):
        return True
    return all(
        abs(max(raw.levels, default=0) - max(known.peak.at(size), 0))
        <= max(_STRAIGHT * max(raw.levels, default=0), _STRAIGHT_BYTES)
        for raw, known in zip(far.segments, trace.segments, strict=True)
    )


def _is_bent(steps: Mapping[int, RawStep]) -> bool:
    """Whether an operator needs more for each sample as they become more.

    Some kernels take as much for few samples as their least, and from some number on more for each.
    """
    _check_alike(steps)
    sizes = few, more, most = sorted(steps)
    for each in zip(*(steps[size].segments for size in sizes), strict=True):
        columns = [segment.within for segment in each]
        top = max(columns[-1], default=0)
        if len({len(column) for column in columns}) > 1:
            continue
        for low, middle, high in zip(*columns, strict=True):
            rise = (high - middle) / (most - more) - (middle - low) / (more - few)
            if high > _NEAR_THE_TOP * top and rise * most > _STRAIGHT * top:
                return True
    return False


def _further(
    study: ModelUnderStudy,
    conditions: Conditions,
    stops: Sequence[str],
    size: int,
    workspaces: Workspaces,
) -> RawStep | None:
    """With more samples; None if the model refuses them, or operators are too large to be run."""
    try:
        step = _follow(study, conditions, stops, size, workspaces)
    except Exception:  # noqa: BLE001 - a model may refuse such a batch
        return None
    # What is assumed instead is on no line with what was measured.
    return None if workspaces.has_assumed else step


def _suitable(
    study: ModelUnderStudy, kinds: Mapping[str, UnitKind], size: int
) -> dict[str, UnitKind]:
    with _running(study, Conditions()) as model:
        found = used_within(model, partial(study.loss, model, size), kinds)
    return {name: kind for name, kind in kinds.items() if name in found}


def _follow(
    study: ModelUnderStudy,
    conditions: Conditions,
    stops: Sequence[str],
    size: int,
    workspaces: Workspaces | None,
) -> RawStep:
    within: list[str] = []
    with _running(study, conditions) as model:
        if conditions.recompute:
            for name in stops:
                if name:
                    module = model.get_submodule(name)
                    forward = _noted(module.forward, name, within)
                    module.forward = partial(checkpoint, forward, use_reentrant=False)
        options = StepOptions(
            None if conditions.param_dtype is None else DTYPES[conditions.param_dtype],
            None if conditions.output_dtype is None else DTYPES[conditions.output_dtype],
            conditions.tp,
            _GRANULARITY.get(study.device_type, 1),
            workspaces,
            within,
        )
        loss = partial(study.loss, model, size)
        if conditions.tp > 1:
            # The first time, DTensor tries each operator on tensors of its own.
            follow_step(model, stops, loss, options)
        return follow_step(model, stops, loss, options)


def _noted(forward: Callable[..., Any], name: str, within: list[str]) -> Callable[..., Any]:
    """Has `within` name the module while its forward runs."""

    def noting(*args: object, **kwargs: object) -> object:
        within.append(name)
        try:
            return forward(*args, **kwargs)
        finally:
            within.pop()

    return noting


def _count(study: ModelUnderStudy, stops: Sequence[str], size: int) -> UnitCounts:
    with _running(study, Conditions()) as model:
        return count(model, partial(study.loss, model, size), stops=stops)


@contextmanager
def _running(study: ModelUnderStudy, conditions: Conditions) -> Iterator[nn.Module]:
    """The model under `conditions`, its tensors without memory, on the job's device."""
    with ExitStack() as stack:
        model = _on_meta(study)
        if conditions.tp > 1:
            stack.enter_context(fakes.fake_ranks(conditions.tp))
            mesh = init_device_mesh(study.device_type, (conditions.tp,), mesh_dim_names=("tp",))
            split(model, study.tensor_parallel, mesh)
        stack.enter_context(fakes.without_memory())
        stack.enter_context(torch.device(study.device_type))
        dtype = conditions.param_dtype
        _move(model, study.device_type, None if dtype is None else DTYPES[dtype])
        yield model


def _on_meta(study: ModelUnderStudy) -> nn.Module:
    with torch.device("meta"), fakes.without_drawing_twice():
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
        local = _empty_like(fakes.plain(tensor), device_type, dtype)
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
    embeddings, written = set(), written_in_forward(model)
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
            is_written=parameter in written,
        )
        for parameter, (first, *others) in names.items()
    )


def _trace(conditions: Conditions, steps: Mapping[int, RawStep]) -> Trace:
    _check_alike(steps)
    columns = list(zip(*(step.segments for step in steps.values()), strict=True))
    segments = tuple(
        Segment(
            column[0].begins,
            column[0].module,
            Highest.through(dict(zip(steps, (each.levels for each in column), strict=True))),
            _growth(dict(zip(steps, (each.change for each in column), strict=True))),
            tuple(column[0].grads),
            _within(steps, column),
        )
        for column in columns
    )
    sent = _growth({size: step.sent for size, step in steps.items()})
    operators = _growth({size: step.operators for size, step in steps.items()})
    return Trace(conditions, segments, sent, operators)


def _check_alike(steps: Mapping[int, RawStep]) -> None:
    """That a step goes the same way whenever it is followed."""
    ways = [_way(step) for step in steps.values()]
    for (size, way), other in zip(list(zip(steps, ways, strict=True))[1:], ways, strict=False):
        if way != other:
            near = zip_longest(way, other, fillvalue=("end", ""))
            (_, module), (_, expected) = next(pair for pair in near if pair[0] != pair[1])
            raise PlanError(
                f"The model does not run the same modules in every step: with {size} samples it "
                f"came to {module or 'the root'!r}, where it had come to "
                f"{expected or 'the root'!r}. Its forward is random, or depends on the batch."
            )


def _way(step: RawStep) -> list[tuple[Boundary, str]]:
    return [(each.begins, each.module) for each in step.segments]


def _within(sizes: Iterable[int], column: Sequence[RawSegment]) -> Highest | None:
    looked = {size: each for size, each in zip(sizes, column, strict=True) if each.within}
    if all(max(each.within) <= max(each.levels, default=0) for each in looked.values()):
        return None
    return Highest.through({size: each.within for size, each in looked.items()})


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
