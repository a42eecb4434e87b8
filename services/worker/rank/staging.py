"""Where a rank copies its state while training waits, to be written while training goes on."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Staged:
    """Copies that the next step does not change.

    Attributes:
        tensors: By name, on the CPU; whole once ``wait`` has returned.
        copied: When an accelerator has made the copies; None where they are made.
    """

    tensors: Mapping[str, torch.Tensor]
    copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Returns once all copies are made; to be called before they are read."""
        if self.copied is not None:
            self.copied.synchronize()


class Staging:
    """Memory for the copies of one state at a time, kept from one state to the next.

    Fresh memory costs more than the copying: the kernel has to map and clear each page of it. For
    tensors of an accelerator it is page-locked, and the copies are made in the stream's order: the
    host does not wait for them, and what the next step changes it changes behind them.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> Staged:
        """Copies ``tensors``; what an earlier call copied is no longer there."""
        self._kept = {name: self._place(name, tensor) for name, tensor in tensors.items()}
        on_cuda = False
        for name, tensor in tensors.items():
            self._kept[name].copy_(tensor, non_blocking=True)
            on_cuda = on_cuda or tensor.is_cuda
        if not on_cuda:
            return Staged(self._kept)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # PyTorch's
        copied.record()
        return Staged(self._kept, copied)

    def _place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
