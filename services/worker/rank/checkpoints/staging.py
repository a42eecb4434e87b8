"""Where a rank copies its state while the next step computes, to be written while training goes on.

Between two updates nobody writes what the optimizer alone changes: forward and backward passes read
the parameters and write gradients. So these copies are made beside the next step, and training
waits for them only where it is about to update.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch


class StateChangedError(RuntimeError):
    """Something else than the optimizer's step changed a tensor while it was being copied.

    Args:
        name: The tensor's, in the state.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} was changed between two optimizer steps, while it was being copied; what "
            "forward or backward passes change belongs in buffers. From now on training waits "
            "for the copies"
        )


class CopyLane(Protocol):
    """Where the copies of one state are made, beside the training thread."""

    def enter(self) -> contextlib.AbstractContextManager[None]:
        """Copies of the calling thread within are made here."""
        ...

    def finish(self) -> None:
        """Returns once all copies are made."""
        ...

    def hold(self) -> None:
        """What the training thread does from now on is done after the copies."""
        ...


class HostLane:
    """The thread that copies: a copy is made when the call returns."""

    def enter(self) -> contextlib.AbstractContextManager[None]:
        """Changes nothing."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Already so."""

    def hold(self) -> None:
        """Already so."""


class StreamLane:
    """A stream beside that of the training thread, behind what that has enqueued so far.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._begun = torch.cuda.current_stream(stream.device).record_event()
        self._copied = self._begun

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Copies within are enqueued on the stream."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._begun)
            try:
                yield
            finally:
                self._copied = self._stream.record_event()

    def finish(self) -> None:
        """Waits for the stream."""
        self._copied.synchronize()

    def hold(self) -> None:
        """Has the device wait, not the host."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)


class Staged:
    """One state on its way into copies.

    The thread that writes calls ``make``, once; the one that trains calls ``wait`` before it
    updates anything.

    Args:
        copies: By name; ``make`` adds those of ``originals``.
        originals: What is still to be copied.
        wholes: What each of them is the local part of, itself if it is none.
        lane: Where they are copied.
    """

    def __init__(
        self,
        copies: dict[str, torch.Tensor],
        originals: Mapping[str, torch.Tensor],
        wholes: Mapping[str, torch.Tensor],
        lane: CopyLane,
    ) -> None:
        self._copies = copies
        self._originals = originals
        self._wholes = wholes
        self._lane = lane
        self._versions = {name: self._version(name) for name in originals}
        self._verdict = threading.Lock()
        self._changed: list[str] | None = None
        self._handed_over = threading.Event()

    @property
    def is_pending(self) -> bool:
        """Whether ``wait`` would have the calling thread wait."""
        return not self._handed_over.is_set()

    def make(self, go_on: Callable[[], None]) -> Mapping[str, torch.Tensor]:
        """Makes the copies that are not made yet; returns all of them.

        Args:
            go_on: Called before each copy; what it raises ends the copying.

        Raises:
            StateChangedError: An original was changed meanwhile.
        """
        try:
            with self._lane.enter():
                for name, original in self._originals.items():
                    go_on()
                    copy = _place(original, self._copies.get(name))
                    self._copies[name] = copy.copy_(original, non_blocking=True)
        finally:
            self._handed_over.set()
        self._lane.finish()
        if changed := self._judged():
            raise StateChangedError(changed[0])
        return self._copies

    def wait(self) -> None:
        """Returns once what the training thread does changes the originals behind the copies."""
        self._handed_over.wait()
        self._judged()
        self._lane.hold()

    def _judged(self) -> list[str]:
        """The originals that were changed.

        It is judged once: when all copies are made or, if that comes first, before the update,
        which rightly changes all.
        """
        with self._verdict:
            if self._changed is None:
                self._changed = [
                    name for name in self._originals if self._version(name) != self._versions[name]
                ]
            return self._changed

    def _version(self, name: str) -> tuple[int, int]:
        """Grows with each change in place, through whichever alias but those of ``.data``.

        What changes a DTensor does not count for its local part.
        """
        return _version(self._originals[name]), _version(self._wholes[name])


class Staging:
    """Memory for the copies of one state at a time, kept from one state to the next.

    Fresh memory costs more than the copying: the kernel has to map and clear each page of it. For
    tensors of an accelerator it is page-locked.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._nbytes = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def nbytes(self) -> int:
        """Of the copies, those included that are still to be made."""
        return self._nbytes

    def begin(
        self, tensors: Mapping[str, torch.Tensor], lasting: Mapping[str, torch.Tensor]
    ) -> Staged:
        """Copies ``tensors`` but for those named in ``lasting``, whose copies ``make`` makes.

        What an earlier call staged must be made, and is no longer there.
        """
        self._kept = {name: kept for name, kept in self._kept.items() if name in tensors}
        self._nbytes = sum(tensor.nbytes for tensor in tensors.values())
        for name, tensor in tensors.items():
            if name not in lasting:
                copy = _place(tensor, self._kept.get(name))
                self._kept[name] = copy.copy_(tensor, non_blocking=True)
        originals = {name: tensor for name, tensor in tensors.items() if name in lasting}
        return Staged(self._kept, originals, lasting, self._lane(tensors))

    def _lane(self, tensors: Mapping[str, torch.Tensor]) -> CopyLane:
        device = next((t.device for t in tensors.values() if t.is_cuda), None)
        if device is None:
            return HostLane()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # PyTorch's
        return StreamLane(self._streams[device])


def _place(tensor: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
        return kept
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _version(tensor: torch.Tensor) -> int:
    return tensor._version  # noqa: SLF001 the only name that PyTorch has for it
