"""The whole parameter that forward and backward compute with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp_core import torch_private

if TYPE_CHECKING:
    from fsdp_core.layout import Chunking


class UnshardedParam:
    """One parameter object for life, whose memory comes and goes.

    Autograd saves references to the parameter and to views of it between forward and backward.
    So the object is made once, and freeing or filling it resizes and rewrites its storage,
    which every alias sees. After construction the memory is free.

    Attributes:
        flat: 1D, the padded slices of all ranks end to end; what a gather is copied into.
        parameter: The leading elements of `flat` in the original shape; an autograd leaf.
    """

    def __init__(
        self,
        shape: torch.Size,
        chunking: Chunking,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        row = shape[1:].numel()
        with torch_private.outside_inference_mode(), torch.no_grad():
            self.flat = torch.empty(chunking.padded_length * row, dtype=dtype, device=device)
            whole = self.flat[: chunking.length * row].view(shape)
            self.parameter = nn.Parameter(whole, requires_grad=False)
        self._nbytes = self.flat.numel() * self.flat.itemsize
        self.free()

    def allocate(self) -> None:
        """Gets memory of undefined content; a no-op where there is some."""
        storage = self.flat.untyped_storage()
        if storage.size() != self._nbytes:
            storage.resize_(self._nbytes)

    def free(self) -> None:
        """Gives the memory back; every alias is unusable until the next `allocate`."""
        storage = self.flat.untyped_storage()
        if storage.size() != 0:
            storage.resize_(0)
