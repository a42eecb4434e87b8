"""Shards a model as a plan says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fsdp_core.errors import PlanError
from fsdp_core.plan.model import (
    MeshPlan,
    Precision,
    ShardDim,
    ShardingPlan,
    UnitPlan,
    matches,
    shared_memory_of_unit,
)
from fsdp_core.plan.model.resolve import ResolvedUnit, resolve_units
from fsdp_core.plan.tensor_parallel import split
from fsdp_core.policy import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Owned,
    SharedMemoryPolicy,
)
from fsdp_core.runtime import FSDPModule, fully_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=nn.Module)

DTYPES: dict[Precision, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


IsOwned = Callable[[str, nn.Parameter], bool]
"""Whether one rank of the shard axis is to hold a parameter, given its name, whole: see `Owned`."""


def apply_plan(
    model: M, plan: ShardingPlan, mesh: DeviceMesh, is_owned: IsOwned | None = None
) -> M:
    """Splits matrices over the `tp` axis, then applies `fully_shard` to the units of `plan`.

    Units are sharded innermost first, the root last.

    Args:
        model: Not yet sharded; on any device, meta included.
        plan: See `fsdp_core.plan.model`.
        mesh: Its axes are named as in `MeshPlan`, in that order; those of one rank may be
            missing, apart from `dp_shard`. A mesh of one axis needs no name.
        is_owned: Which parameters are not cut; none by default. A unit's `shard_dims` go first.

    Returns:
        `model` itself.

    Raises:
        PlanError: A pattern matches nothing, two units claim one module, an option does not suit
            its module, or the mesh is not the plan's.
    """
    _check_mesh(plan.mesh, mesh)
    modules = dict(model.named_modules())
    units = resolve_units(plan, list(modules))
    if plan.mesh.tp > 1:
        split(model, plan.tensor_parallel, mesh["tp"])
    for unit in units:
        for name in unit.names:
            _wrap_forward(modules[name], unit.plan)
    data_mesh = _data_mesh(plan.mesh, mesh)
    named = model.named_parameters() if is_owned is not None else ()
    owned = {each for name, each in named if is_owned is not None and is_owned(name, each)}
    writing = _units_that_write(units, model)
    for unit in units:
        shared = shared_memory_of_unit(
            plan, unit.plan, mesh.device_type, is_written=unit in writing
        )
        policy = SharedMemoryPolicy(share_storage=shared == "storage")
        _shard(unit, modules, plan, data_mesh, owned, None if shared == "none" else policy)
    _set_prefetch(units, modules)
    return model


def _shard(
    unit: ResolvedUnit,
    modules: Mapping[str, nn.Module],
    plan: ShardingPlan,
    mesh: DeviceMesh,
    owned: Collection[nn.Parameter],
    shared_memory: SharedMemoryPolicy | None,
) -> None:
    targets = [modules[name] for name in unit.names]
    output_dtype = plan.output_dtype if unit.is_root else None
    fully_shard(
        targets[0] if len(targets) == 1 else targets,
        mesh=mesh,
        reshard_after_forward=unit.plan.reshard_after_forward,
        shard_placement_fn=(
            _placement(unit, modules, owned) if unit.plan.shard_dims or owned else None
        ),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=_dtype(unit.plan.param_dtype or plan.param_dtype),
            reduce_dtype=_dtype(unit.plan.reduce_dtype or plan.reduce_dtype),
            output_dtype=_dtype(output_dtype),
        ),
        offload_policy=CPUOffloadPolicy() if unit.plan.offload else OffloadPolicy(),
        shared_memory=shared_memory,
    )


def written_in_forward(model: nn.Module) -> set[torch.Tensor]:
    """Parameters that modules of PyTorch's write when they run: of embeddings with `max_norm`."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    }


def _units_that_write(units: Sequence[ResolvedUnit], model: nn.Module) -> set[ResolvedUnit]:
    written = written_in_forward(model)
    holders = {name: unit for unit in units for name in unit.names}
    found = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in written:
            module = name.rpartition(".")[0]
            while module not in holders:
                module = module.rpartition(".")[0]
            found.add(holders[module])
    return found


def _placement(
    unit: ResolvedUnit, modules: Mapping[str, nn.Module], owned: Collection[nn.Parameter]
) -> Callable[[nn.Parameter], Shard | Owned | None]:
    """Which dim each named parameter is sharded along; the others along dim 0, or not at all."""
    dims: dict[nn.Parameter, int] = {}
    for chosen in unit.plan.shard_dims:
        found = list(_named(chosen, [modules[name] for name in unit.names]))
        if not found:
            raise PlanError(
                f"shard_dims: {chosen.parameter!r} is not a parameter of the unit "
                f"{list(unit.names)}."
            )
        for name, parameter in found:
            if not -parameter.ndim <= chosen.dim < parameter.ndim:
                raise PlanError(
                    f"shard_dims: {name!r} has {parameter.ndim} dims, so there is no dim "
                    f"{chosen.dim}."
                )
            dims[parameter] = chosen.dim

    def place(parameter: nn.Parameter) -> Shard | Owned | None:
        if parameter in dims:
            return Shard(dims[parameter])
        return Owned() if parameter in owned else None

    return place


def _named(chosen: ShardDim, modules: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, parameter)
        for module in modules
        for name, parameter in module.named_parameters()
        if matches(chosen.parameter, name)
    ]


def _wrap_forward(module: nn.Module, unit: UnitPlan) -> None:
    """Recomputation and compilation go around the plain forward, inside of the unit's hooks."""
    forward = module.forward
    if unit.compile:
        forward = torch.compile(forward)
    if unit.recompute:
        forward = partial(checkpoint, forward, use_reentrant=False)
    if unit.compile or unit.recompute:
        module.forward = forward


def _set_prefetch(units: Sequence[ResolvedUnit], modules: Mapping[str, nn.Module]) -> None:
    """Units run in the order of the model's modules, as far as anybody can tell before."""
    order = {name: place for place, name in enumerate(modules)}
    line = sorted(
        (unit for unit in units if not unit.is_root), key=lambda unit: order[unit.names[0]]
    )
    heads = [cast("FSDPModule", modules[unit.names[0]]) for unit in line]
    for place, (unit, head) in enumerate(zip(line, heads, strict=True)):
        depth = unit.plan.prefetch
        if depth is not None:
            head.set_modules_to_forward_prefetch(heads[place + 1 : place + 1 + depth])
            head.set_modules_to_backward_prefetch(heads[max(place - depth, 0) : place][::-1])


def _data_mesh(sizes: MeshPlan, mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    return mesh["dp_replicate", "dp_shard"] if sizes.dp_replicate > 1 else mesh["dp_shard"]


def _check_mesh(sizes: MeshPlan, mesh: DeviceMesh) -> None:
    wanted = {
        axis: size
        for axis, size in (
            ("dp_replicate", sizes.dp_replicate),
            ("dp_shard", sizes.dp_shard),
            ("tp", sizes.tp),
        )
        if size > 1 or axis == "dp_shard"
    }
    names = mesh.mesh_dim_names or tuple(wanted)[: mesh.ndim]
    given = dict(zip(names, mesh.mesh.shape, strict=False))
    present = {axis: size for axis, size in given.items() if size > 1 or axis in wanted}
    if mesh.ndim == 1 and len(wanted) == 1:  # one axis is dp_shard, whatever it is called
        present = {"dp_shard": mesh.size()}
    if list(present.items()) != list(wanted.items()):
        raise PlanError(f"The plan is for a mesh of {wanted}, and this one has {given}: {mesh}.")


def _dtype(word: Precision | None) -> torch.dtype | None:
    return None if word is None else DTYPES[word]
