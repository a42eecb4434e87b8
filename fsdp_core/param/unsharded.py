"""The whole parameter that forward and backward compute with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.layout import Slicing
from fsdp_core.param import slices


class Unsharded(Protocol):
    """A whole parameter whose memory comes and goes.

    Autograd saves references to the parameter and to views of it between forward and backward.
    So the object is made once, and freeing or filling it resizes and rewrites its storage,
    which every alias sees. While it is free its version is another, so that autograd refuses a
    backward that would read freed memory; most kernels would end the process.
    """

    @property
    def parameter(self) -> nn.Parameter:
        """An autograd leaf; one object for life."""

    @property
    def held_bytes(self) -> int:
        """Memory it has at present."""

    def free(self) -> None:
        """Gives the memory back; every alias is unusable until it is filled again."""


class UnshardedParam:
    """A whole parameter over one flat buffer. After construction its memory is free.

    Attributes:
        flat: 1D; what a gather is copied into.
        is_shared: Whether all ranks of the host compute with the same memory.
        versioned: What autograd may have saved, with a version each.
    """

    def __init__(
        self,
        numel: int,
        shape: Callable[[torch.Tensor], torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        memory: torch.Tensor | None = None,
    ) -> None:
        """Makes the parameter.

        Args:
            numel: Elements of the buffer, padding included.
            shape: Gives the buffer the form that modules compute with, without a copy.
            dtype: Of the parameter.
            device: On which modules compute.
            memory: 1D, of `numel` elements, which all ranks of the host share: it is filled without
                a gather and never freed. None: memory of its own.
        """
        self.is_shared = memory is not None
        with torch_private.outside_inference_mode(), torch.no_grad():
            self.flat = torch.empty(numel, dtype=dtype, device=device) if memory is None else memory
            self._parameter = nn.Parameter(shape(self.flat), requires_grad=False)
        # A DTensor counts versions of its own, which autograd looks at where it has saved that.
        is_apart = isinstance(self._parameter, DTensor)
        self.versioned = (self.flat, self._parameter) if is_apart else (self.flat,)
        self.free()

    @property
    def parameter(self) -> nn.Parameter:
        """The leading elements of `flat` in the original form."""
        return self._parameter

    @property
    def held_bytes(self) -> int:
        """Bytes of all of `flat`, or 0."""
        return self.flat.untyped_storage().size()

    def allocate(self) -> None:
        """Gets memory of undefined content; a no-op where there is some."""
        if not self.is_shared:
            allocate_as_saved(*self.versioned)

    def destination(self, slicing: Slicing) -> torch.Tensor:
        """Memory for the rows of a gather, (parts, row): its own where rows end to end are the parameter."""
        self.allocate()
        if slicing.leads:
            return self.flat[: slicing.row * slicing.parts].view(slicing.parts, slicing.row)
        return self.flat.new_empty((slicing.parts, slicing.row))

    def fill(self, rows: torch.Tensor, slicing: Slicing) -> None:
        """Takes over what arrived in `destination`."""
        if not slicing.leads:
            physical = self.flat[: slicing.total].view(slicing.shape)
            with torch_private.preserve_version([self.flat]):
                slices.join(rows, slicing, physical)

    def free(self) -> None:
        """Gives the memory back; what all ranks share stays."""
        if not self.is_shared:
            free_for_autograd(*self.versioned)


class WholeMemory:
    """The memory of several whole parameters, which comes and goes together.

    Args:
        wholes: What all ranks share is written, but never freed.
    """

    def __init__(self, wholes: Sequence[UnshardedParam]) -> None:
        self._versioned = tuple(tensor for whole in wholes for tensor in whole.versioned)
        wholes = [whole for whole in wholes for _ in whole.versioned]
        self._storages = [whole.flat.untyped_storage() for whole in wholes]
        # Bytes that come and go: none of what is shared, or has no elements. Both have versions all the same.
        self._sizes = [0 if w.is_shared else w.flat.numel() * w.flat.itemsize for w in wholes]

    def fill(self, copy: Callable[[], None]) -> None:
        """Gets memory and has `copy` fill it; autograd takes the values for those that it saved."""
        versioned = self._versioned
        # A version that was counted when memory was given back is taken back with it.
        versions = [
            version - (storage.size() == 0 < size)
            for version, storage, size in zip(
                torch_private.versions(versioned), self._storages, self._sizes, strict=True
            )
        ]
        filled = 0
        try:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                if size and storage.size() != size:
                    storage.resize_(size)  # may raise
                filled += 1
            copy()
        finally:
            torch_private.set_versions(versioned[:filled], versions[:filled])

    def free(self) -> None:
        """Gives memory back, as `free_for_autograd` does."""
        held = [i for i, size in enumerate(self._sizes) if size and self._storages[i].size() != 0]
        refused = [self._versioned[i] for i in held]
        torch_private.set_versions(refused, [each + 1 for each in torch_private.versions(refused)])
        for i in held:
            self._storages[i].resize_(0)


def allocate(tensor: torch.Tensor) -> None:
    """Gives `tensor`, which covers its storage, memory of undefined content if it has none."""
    storage = tensor.untyped_storage()
    nbytes = tensor.numel() * tensor.itemsize
    if storage.size() != nbytes:
        storage.resize_(nbytes)


def free(tensor: torch.Tensor) -> None:
    """Takes the memory of a tensor's storage away; aliases stay, and are unusable."""
    storage = tensor.untyped_storage()
    if storage.size() != 0:
        storage.resize_(0)


def allocate_as_saved(tensor: torch.Tensor, *wrappers: torch.Tensor) -> None:
    """Undoes `free_for_autograd`; a no-op where there is memory."""
    was_free = tensor.numel() > 0 and tensor.untyped_storage().size() == 0
    allocate(tensor)  # may raise
    if was_free:
        for each in (tensor, *wrappers):
            torch_private.shift_version(each, -1)


def free_for_autograd(tensor: torch.Tensor, *wrappers: torch.Tensor) -> None:
    """Frees `tensor` and has autograd refuse to read what it saved of it, its views and its wrappers."""
    if tensor.untyped_storage().size() != 0:
        for each in (tensor, *wrappers):
            torch_private.shift_version(each, 1)
        free(tensor)
