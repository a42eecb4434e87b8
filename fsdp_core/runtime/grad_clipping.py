"""Clipping gradients by their total norm, however each of them is sharded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.comm import in_step, wait_in_step
from fsdp_core.errors import ArgumentError, NonFiniteNormError, UnsupportedError
from fsdp_core.param import owned_over

Axis = tuple[dist.ProcessGroup, str]
"""Ranks that hold parts of one tensor, and the type of device they communicate from."""

Locals = dict[tuple[Axis, ...], list[torch.Tensor]]
"""This rank's parts of gradients, by the axes that these are sharded over."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    r"""Scales gradients in place so that their total norm is at most `max_norm`.

    The total is the p-norm of all gradients seen as one vector, :math:`(\sum |g_i|^p)^{1/p}`, and
    gradients are multiplied by :math:`\min(1, max\_norm / (total + 10^{-6}))`, as
    `torch.nn.utils.clip_grad_norm_` does. No gradient is made whole: each rank contributes one
    number per way of sharding, and each mesh axis that shards something costs one all-reduce of
    these few numbers. A replicated axis is not reduced over, so its copies count once.

    Every rank of the parameters' meshes must call it with the same parameters in the same order;
    which of them have a gradient may differ. Gradients of plain tensors must be equal on all
    ranks. They may live on another device than the mesh communicates on, as under CPU offload.
    Norms are accumulated in fp32 at least, and combined in fp64.

    Args:
        parameters: DTensors on any meshes, plain tensors, or both; repeated ones count once.
        max_norm: Upper bound of the total norm after the call; `math.inf` only measures.
        norm_type: p; `math.inf` is the largest absolute value, `-math.inf` the smallest.
        error_if_nonfinite: Raise instead of scaling by a total that is NaN or infinite. It makes
            the host wait for the device.
        foreach: False scales one gradient at a time; otherwise in as few kernels as possible.

    Returns:
        The total norm before clipping, of shape (), a plain tensor, equal on every rank, on the
        device of the first gradient.

    Raises:
        ArgumentError: `norm_type` is 0 or NaN.
        UnsupportedError: A gradient is `Partial` on an axis, so it is not yet a gradient.
        NonFiniteNormError: The total is not finite and `error_if_nonfinite` is set.
    """
    order = float(norm_type)
    if order == 0 or math.isnan(order):
        raise ArgumentError(
            f"norm_type must be a number other than 0, got {norm_type}: the number of nonzero "
            "elements is not a norm. Pass 2.0 or math.inf."
        )
    given = [parameters] if isinstance(parameters, torch.Tensor) else dict.fromkeys(parameters)
    shards: Locals = {}
    for index, param in enumerate(given):
        # Without a gradient the parameter still says which collectives other ranks expect.
        held = param if param.grad is None else param.grad
        parts = shards.setdefault(_sharding_axes(held, index) or _owned_axes(param), [])
        if param.grad is not None:
            parts.append(_local(param.grad))
    parts = list(itertools.chain(*shards.values()))

    total = _total_norm(shards, order).to(parts[0].device if parts else None, _result_dtype(given))
    if error_if_nonfinite and not total.isfinite():
        raise NonFiniteNormError(
            f"The total norm of order {order} for gradients from `parameters` is non-finite "
            f"({total.item()}), so it cannot be clipped. Skip this step, or pass "
            "error_if_nonfinite=False to scale by it anyway."
        )
    if max_norm < math.inf:
        _scale(parts, torch.clamp(max_norm / (total + 1e-6), max=1.0), one_by_one=foreach is False)
    return total


def _sharding_axes(tensor: torch.Tensor, index: int) -> tuple[Axis, ...]:
    """The mesh axes over which the elements of `tensor` are spread."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    axes = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise UnsupportedError(
                f"The gradient of parameter {index}, of shape {tuple(tensor.shape)}, is "
                f"{placement} on axis {axis} of {mesh}: its summands are still on several ranks. "
                "Redistribute it to Shard or Replicate before clipping."
            )
        if not placement.is_replicate():
            axes.append((mesh.get_group(axis), mesh.device_type))
    return tuple(axes)


def _owned_axes(param: torch.Tensor) -> tuple[Axis, ...]:
    """The axis of which one rank owns the parameter whole: its own mesh does not have it."""
    group = owned_over(param)
    if group is None or not isinstance(param, DTensor):
        return ()
    return ((group, param.device_mesh.device_type),)


def _local(grad: torch.Tensor) -> torch.Tensor:
    # Without gradient mode this is the slice itself, so scaling it scales the gradient.
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _result_dtype(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """Decided by the parameters, since some rank may have no gradient at all."""
    wide = any(param.dtype in (torch.float64, torch.complex128) for param in parameters)
    return torch.float64 if wide else torch.float32


class _Norm(Protocol):
    """How a norm is put together from parts."""

    def of(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What these tensors contribute; fp64, shape ()."""

    def merge(self, contributions: Sequence[torch.Tensor]) -> torch.Tensor:
        """One contribution from several; shape ()."""

    def all_reduce(self, contributions: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Merges each element, shape (n,), over the ranks of `group`."""

    def finish(self, contribution: torch.Tensor) -> torch.Tensor:
        """The norm itself."""


class _PowerSum:
    """Contributes the sum of p-th powers; in fp64, where squares of fp32 norms fit."""

    def __init__(self, order: float) -> None:
        self._order = order

    def of(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        norms = _norms(parts, self._order)
        return self.merge([norm**self._order for norm in norms])

    def merge(self, contributions: Sequence[torch.Tensor]) -> torch.Tensor:
        if not contributions:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(list(contributions)).sum()

    def all_reduce(self, contributions: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        _all_reduce(contributions, dist.ReduceOp.SUM, group)
        return contributions

    def finish(self, contribution: torch.Tensor) -> torch.Tensor:
        return contribution ** (1 / self._order)


class _Extreme:
    """Contributes the largest absolute value, or the negative of the smallest."""

    def __init__(self, order: float) -> None:
        self._order = order
        self._sign = math.copysign(1.0, order)

    def of(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.merge([self._sign * norm for norm in _norms(parts, self._order)])

    def merge(self, contributions: Sequence[torch.Tensor]) -> torch.Tensor:
        if not contributions:
            return torch.tensor(0.0 if self._sign > 0 else -math.inf, dtype=torch.float64)
        return torch.stack(list(contributions)).max()

    def all_reduce(self, contributions: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        # Whether a backend's MAX lets NaN through depends on the order of ranks.
        nan = contributions.isnan()
        both = torch.stack([contributions.masked_fill(nan, -math.inf), nan.to(torch.float64)])
        _all_reduce(both, dist.ReduceOp.MAX, group)
        return both[0].masked_fill(both[1] > 0, math.nan)

    def finish(self, contribution: torch.Tensor) -> torch.Tensor:
        return self._sign * contribution


def _all_reduce(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> None:
    """In step with the units' collectives: another rank may be in one of these."""
    with in_step(group, tensor.device, "all-reduce of the gradients' norms"):
        work = dist.all_reduce(tensor, op, group, async_op=True)
    if work is not None:
        wait_in_step(work, group, tensor.device)


def _norms(parts: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The norm of each tensor that has elements, accumulated in fp32 at least."""
    norms: list[torch.Tensor] = []
    for (_, dtype), tensors in _by_device_and_dtype(parts).items():
        accumulate = torch.promote_types(dtype, torch.float32)
        norms += torch_private.foreach_norm(tensors, order, accumulate)
    return [norm.to(parts[0].device, torch.float64) for norm in norms]


def _total_norm(shards: Locals, order: float) -> torch.Tensor:
    """Phases: this rank's contributions, one all-reduce an axis, all ways of sharding merged."""
    norm: _Norm = _Extreme(order) if math.isinf(order) else _PowerSum(order)
    contributions = {axes: norm.of(parts) for axes, parts in shards.items()}
    for axis in dict.fromkeys(itertools.chain(*contributions)):
        group, device_type = axis
        spread = [axes for axes in contributions if axis in axes]
        reduced = norm.all_reduce(
            torch.stack([contributions[axes].to(device_type) for axes in spread]), group
        )
        contributions.update(zip(spread, reduced.unbind(), strict=True))
    found = list(contributions.values())
    return norm.finish(norm.merge([each.to(found[0].device) for each in found]))


def _scale(parts: Sequence[torch.Tensor], factor: torch.Tensor, *, one_by_one: bool) -> None:
    for (device, _), tensors in _by_device_and_dtype(parts).items():
        if one_by_one:
            for tensor in tensors:
                tensor.mul_(factor.to(device))
        else:
            torch_private.foreach_scale(tensors, factor.to(device))


def _by_device_and_dtype(
    tensors: Sequence[torch.Tensor],
) -> Mapping[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Those that have elements, as the kernels that take many want them."""
    grouped: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            grouped.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return grouped
