"""In which memory a parameter's slice and its gradient live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from fsdp_core.policy import CPUOffloadPolicy, OffloadPolicy

if TYPE_CHECKING:
    from fsdp_core.comm import CommContext, Stream

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class HostMemory:
    """The device's own memory, or the host's.

    Attributes:
        device: On which modules compute.
        offloads: Whether slices live on the host.
        pins: Whether that memory is page-locked. A machine without an accelerator cannot pin,
            and has no copies that pinning would speed up.
    """

    device: torch.device
    offloads: bool
    pins: bool

    @classmethod
    def of(cls, policy: OffloadPolicy, device: torch.device) -> Self:
        """What `policy` means on `device`."""
        offloads = isinstance(policy, CPUOffloadPolicy)
        pins = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and device != _HOST
        return cls(device, offloads, pins)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in this memory; one on meta stays there."""
        if not self.offloads or tensor.is_meta:
            return tensor
        tensor = tensor.to(_HOST)
        return tensor.pin_memory() if self.pins else tensor

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, page-locked if it should be and is not; it is never moved otherwise."""
        if self.pins and tensor.device == _HOST and not tensor.is_pinned():
            return tensor.pin_memory()
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` may live where it does."""
        return not self.offloads or tensor.device == _HOST

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` where modules compute, copied on the current stream."""
        if not self.offloads:
            return tensor
        return tensor.to(self.device, non_blocking=True)

    def take_grad(
        self, grad: torch.Tensor, comm: CommContext, stream: Stream, *, may_overlap: bool
    ) -> torch.Tensor:
        """`grad` in this memory.

        Args:
            grad: On the device; the caller is on `stream`.
            comm: Waits for copies at the end of backward.
            stream: Where the copy is placed.
            may_overlap: Whether the host may go on before the copy has arrived.
        """
        if not self.offloads:
            return grad
        overlaps = may_overlap and self.pins
        copy = grad.to(_HOST, non_blocking=overlaps)
        if overlaps:
            comm.await_on_host(comm.streams.record_event(stream))
        return copy
