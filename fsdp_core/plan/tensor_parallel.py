"""Splits the matrices of a model over the `tp` axis, as a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_core.errors import PlanError
from fsdp_core.plan.model.resolve import matching

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fsdp_core.plan.model import TensorParallelPlan, TensorParallelStyle


def split(model: nn.Module, plans: Sequence[TensorParallelPlan], mesh: DeviceMesh) -> None:
    """Makes the weights of the named modules DTensors on `mesh`, in place.

    Args:
        model: On any device, meta included.
        plans: What is split, and how.
        mesh: The `tp` axis.

    Raises:
        PlanError: Nothing is split, a module is named twice, is no linear or embedding layer, or
            its weight does not divide by the ranks of the axis.
    """
    modules = dict(model.named_modules())
    styles: dict[str, TensorParallelStyle] = {}
    for plan in plans:
        for name in (name for pattern in plan.modules for name in matching(pattern, list(modules))):
            if name in styles:
                raise PlanError(f"Module {name!r} is named twice in tensor_parallel.")
            _check(name, modules[name], plan.style, mesh.size())
            styles[name] = plan.style
    if not styles:
        raise PlanError(
            f"The mesh has {mesh.size()} tp ranks, but the plan's tensor_parallel names no module "
            "to split over them. Name some, or set tp to 1."
        )
    parallelize_module(model, mesh, {name: _style(style) for name, style in styles.items()})


def _check(name: str, module: nn.Module, style: TensorParallelStyle, ranks: int) -> None:
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise PlanError(
            f"tensor_parallel: {name!r} is a {type(module).__name__}; only nn.Linear and "
            "nn.Embedding, and what derives from them, can be split."
        )
    # A linear weight is stored as [outputs, inputs], an embedding's as [inputs, outputs].
    is_first = (style == "rowwise") == isinstance(module, nn.Embedding)
    size = module.weight.shape[0 if is_first else 1]
    if size % ranks:
        raise PlanError(
            f"tensor_parallel: {style} splits a dim of {size} of {name!r}, which does not divide "
            f"by {ranks} tp ranks."
        )


def _style(style: TensorParallelStyle) -> ParallelStyle:
    match style:
        case "colwise":
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel()
        case "colwise_gather":
            return ColwiseParallel(output_layouts=Replicate())
