"""DTensor to plain tensor and back, as often as a unit is gathered.

Source: `torch/distributed/tensor/parallel/_data_parallel_utils.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from fsdp_core import torch_private


class DeviceHandle(Protocol):
    """A device's module of PyTorch, `torch.cpu` or `torch.cuda`, or FSDP1's wrapper of it."""

    # A stream's class differs from device to device.
    def current_stream(self) -> Any:  # noqa: ANN401, D102 - see above; PyTorch's name
        ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]:  # noqa: ANN401, D102 - as above
        ...


def _flatten_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, torch_private.Spec | None]:
    """The local tensor of a DTensor, made to require grad, and its spec; else (tensor, None)."""
    if not isinstance(tensor, DTensor):
        return tensor, None
    local = torch_private.local_tensor(tensor)
    return local.requires_grad_(), torch_private.spec_of(tensor)


def _unflatten_tensor(
    tensor: torch.Tensor,
    spec: torch_private.Spec,
    *,
    device_handle: DeviceHandle | None = None,
    compute_stream: object | None = None,
) -> DTensor:
    """A DTensor of `spec` over the plain `tensor`, differentiably.

    The gradient that comes back to `tensor` may be the promise of a functional collective. Whoever
    flattens gradients copies raw storage, which does not wait; so the gradient waits here.

    Args:
        tensor: This rank's local tensor.
        spec: From `_flatten_tensor`.
        device_handle: Needed with `compute_stream`.
        compute_stream: Where the wait is put; default is the current stream.
    """
    result = DTensor.from_local(
        tensor,
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=spec.stride,
    )
    if tensor.requires_grad:
        tensor.register_hook(  # type: ignore[no-untyped-call]  # PyTorch's
            partial(_waited_gradient, device_handle=device_handle, compute_stream=compute_stream)
        )
    return result


def _waited_gradient(
    grad: torch.Tensor, device_handle: DeviceHandle | None, compute_stream: object | None
) -> torch.Tensor:
    if device_handle is None or compute_stream is None:
        return torch_private.waited(grad)
    with device_handle.stream(compute_stream):
        return torch_private.waited(grad)
