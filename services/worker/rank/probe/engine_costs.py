"""Measures what the engine itself takes: hooks, copies and collectives of tiny units.

The same units run with the engine and without, and the difference is what counts.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core import FSDPModule, SharedMemoryPolicy, clip_grad_norm_, fully_shard
from fsdp_core.plan.live_storage import LiveStorage
from fsdp_core.plan.model import Exchange
from fsdp_core.plan.model.traffic import Kind, SharedWay

_UNITS: Final = 4
_SOME, _MANY = 4, 17
_ITEM_BYTES: Final = 4
_UNIT_BYTES: Final = (16 << 10, 512 << 10, 4 << 20)
_WIDTH, _LAYERS = 16, 8
_NOTHING: Final = 1e-15
_LEAST_OF_GATHER: Final = 2.5
_SHARED: Final[Mapping[SharedWay, SharedMemoryPolicy]] = {
    "copy": SharedMemoryPolicy(),
    "storage": SharedMemoryPolicy(share_storage=True),
}

Timer = Callable[[Sequence[Callable[[], object]]], list[float]]


@dataclass(frozen=True)
class EngineCosts:
    """As of ``NodeFacts``, in seconds."""

    dispatch: float
    unit: float
    parameter: float
    sharded_parameter: float
    update: float
    norm: float
    exchanges: dict[Kind, Exchange]
    shared_exchanges: dict[SharedWay, dict[Kind, Exchange]]


class _Touch(torch.autograd.Function):
    """Passes its input on; gives each parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - PyTorch's
        ctx.save_for_backward(*parameters)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401 - PyTorch's
        return (grad, *(torch.zeros_like(each) for each in ctx.saved_tensors))


class _Unit(nn.Module):
    def __init__(self, numel: int, count: int, device: torch.device) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(numel, device=device) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        touched: torch.Tensor = cast("Callable[..., torch.Tensor]", _Touch.apply)(x, *self.all)
        return touched


def engine_costs(
    device: torch.device, group: dist.ProcessGroup | None, timer: Timer
) -> EngineCosts:
    """Measures them, together with all other processes.

    Args:
        device: Where this process computes.
        group: Through which ranks exchange their data; None: there is but one. Collectives are measured
            on the CPU, where they are the host's work.
        timer: Seconds that each of several things takes when all do it, taken in turns: only
            what saw the same disturbances can be subtracted.
    """
    alone = _alone(device)
    shard, replicate = (alone, alone) if group is None else _together(device, group)
    small = _UNIT_BYTES[0]
    few, many = (
        [_step(_model(device, small, count, mesh)) for mesh in (None, alone, replicate, shard)]
        for count in (1, _MANY)
    )
    updates = [_update(device, mesh) for mesh in (alone, shard)]
    chain, operators = _chain(device)
    chained, update, normed, *seconds = timer([chain, *updates, *few, *many])
    one, more = seconds[:4], seconds[4:]
    plain, *slopes = (
        (high - low) / ((_MANY - 1) * _UNITS) for low, high in zip(one, more, strict=True)
    )
    lone, copied, cut = (max(0.0, slope - plain) for slope in slopes)
    parameter = lone if group is None else copied
    unit = max(0.0, (one[1] - one[0]) / _UNITS - lone)
    sharded = max(cut, parameter)
    exchanges: dict[Kind, Exchange] = {}
    shared: dict[SharedWay, dict[Kind, Exchange]] = {}
    if group is not None and device.type == "cpu":  # a device hides what its link does not take
        held = (unit + _SOME * sharded, unit + _SOME * parameter)
        exchanges, shared = _exchanges(device, (shard, replicate), timer, held)
    return EngineCosts(
        dispatch=chained / operators,
        unit=unit,
        parameter=parameter,
        sharded_parameter=sharded,
        update=update / (_MANY * _UNITS),
        norm=max(0.0, normed - update),
        exchanges=exchanges,
        shared_exchanges=shared,
    )


def _alone(device: torch.device) -> DeviceMesh:
    """This rank by itself."""
    return DeviceMesh.from_group(_lone_group(), device.type)


def _lone_group() -> dist.ProcessGroup:
    groups = [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())]
    return cast("dist.ProcessGroup", groups[dist.get_rank()])


def _together(device: torch.device, group: dist.ProcessGroup) -> tuple[DeviceMesh, DeviceMesh]:
    """All ranks, which shard; the same, which replicate."""
    both = DeviceMesh.from_group(
        [group, _lone_group()],
        device.type,
        mesh=torch.arange(group.size()).unsqueeze(1),
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )
    return DeviceMesh.from_group(group, device.type), both


def _model(
    device: torch.device,
    nbytes: int,
    count: int = 1,
    mesh: DeviceMesh | None = None,
    shared: SharedMemoryPolicy | None = None,
) -> nn.Module:
    numel = max(1, nbytes // _ITEM_BYTES // count)
    model = nn.Sequential(*(_Unit(numel, count, device) for _ in range(_UNITS)))
    if mesh is not None:
        for unit in model:
            # With nothing to gather, to free what is whole would only cost copies.
            fully_shard(unit, mesh=mesh, reshard_after_forward=mesh.ndim == 1, shared_memory=shared)
        fully_shard(model, mesh=mesh)
    return model


def _step(model: nn.Module, *, reduces: bool = True) -> Callable[[], object]:
    """A pass that reduces, or one of those that only add to the gradients."""
    x = torch.zeros(1, device=next(model.parameters()).device, requires_grad=True)

    def once() -> None:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(reduces)
        model(x).backward()
        if reduces:
            model.zero_grad()

    return once


def _exchanges(
    device: torch.device,
    meshes: tuple[DeviceMesh, DeviceMesh],
    timer: Timer,
    held: tuple[float, float],
) -> tuple[dict[Kind, Exchange], dict[SharedWay, dict[Kind, Exchange]]]:
    """Of units of several sizes: by process groups, and through shared memory.

    Args:
        device: Where this process computes.
        meshes: On which to shard, and to replicate.
        timer: See `engine_costs`.
        held: What the engine takes of a unit besides, by mesh.
    """
    shard, replicate = meshes
    ways = (None, *_SHARED)
    gathers: dict[SharedWay | None, list[tuple[float, float]]] = {way: [] for way in ways}
    reductions: dict[SharedWay | None, list[tuple[float, float]]] = {way: [] for way in ways}
    averages: list[tuple[float, float]] = []
    part = (shard.size() - 1) / shard.size()
    for nbytes in _UNIT_BYTES:
        models = [
            _model(device, nbytes, _SOME),
            *(_model(device, nbytes, _SOME, shard, way and _SHARED[way]) for way in ways),
        ]
        passes = [_step(model, reduces=reduces) for model in models for reduces in (True, False)]
        averaged = _step(_model(device, nbytes, _SOME, replicate))
        *seconds, together = timer([*passes, averaged])
        (once, more), *sharded = zip(seconds[::2], seconds[1::2], strict=True)
        for way, (last, others) in zip(ways, sharded, strict=True):
            # Of each unit one gather before forward, one before backward, and a reduction, which
            # cannot be much faster than a gather: a small difference of large figures may say so.
            all_three = (last - once) / _UNITS - held[0]
            gather = min(((others - more) / _UNITS - held[0]) / 2, all_three / _LEAST_OF_GATHER)
            gathers[way].append((nbytes * part, gather))
            reductions[way].append((nbytes * part, all_three - 2 * gather))
        # A reduce-scatter and a gather are an all-reduce, so it takes no longer.
        most = reductions[None][-1][1] + gathers[None][-1][1]
        average = min((together - once) / _UNITS - held[1], most)
        averages.append((2 * nbytes * part, average))
    shared: dict[SharedWay, dict[Kind, Exchange]] = {
        way: {"all_gather": _line(gathers[way]), "reduce_scatter": _line(reductions[way])}
        for way in _SHARED
    }
    # Of one copy for all ranks only that is copied which is in another form.
    waits = [max(seconds, 0.0) for _, seconds in gathers["storage"]]
    shared["storage"]["all_gather"] = Exchange(
        statistics.median(waits), shared["copy"]["all_gather"].bandwidth
    )
    exchanges: dict[Kind, Exchange] = {
        "all_gather": _line(gathers[None]),
        "reduce_scatter": _line(reductions[None]),
        "all_reduce": _line(averages),
    }
    return exchanges, shared


def _line(points: list[tuple[float, float]]) -> Exchange:
    """Closest to all by ratio; neither figure below nothing."""
    known = [(sent, seconds) for sent, seconds in points if seconds > 0] or [(1.0, _NOTHING)]
    # Weighted least squares of a + b x, with 1 / y as weight.
    rows = [(1 / seconds, sent / seconds) for sent, seconds in known]
    one, cross, square = (sum(p**i * q**j for p, q in rows) for i, j in ((2, 0), (1, 1), (0, 2)))
    left, right = sum(p for p, _ in rows), sum(q for _, q in rows)
    determinant = one * square - cross * cross
    slope = (one * right - cross * left) / determinant if determinant > 0 else 0.0
    latency = (left - cross * slope) / one
    if latency < 0:
        latency, slope = _NOTHING, right / square
    if slope <= 0:
        latency, slope = left / one, _NOTHING
    return Exchange(latency, 1 / slope)


def _chain(device: torch.device) -> tuple[Callable[[], object], int]:
    """Small operators one after the other, and how many."""
    layers = [
        layer
        for _ in range(_LAYERS)
        for layer in (nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU())
    ]
    model = nn.Sequential(*layers).to(device)
    x = torch.zeros(1, _WIDTH, device=device)

    def once() -> None:
        model(x).sum().backward()

    once()
    with LiveStorage() as live:
        once()
    return once, live.operators


def _update(device: torch.device, mesh: DeviceMesh) -> Callable[[], object]:
    """Clips and updates many parameters, as a rank does at the end of a step."""
    model = _model(device, _MANY * _UNIT_BYTES[0], _MANY, mesh)
    model(torch.zeros(1, device=device, requires_grad=True)).backward()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def once() -> None:
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return once
