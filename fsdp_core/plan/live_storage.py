"""How many bytes of tensor storage are alive, at each moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import torch

from fsdp_core.plan import fakes

if TYPE_CHECKING:
    from types import TracebackType

    from fsdp_core.plan.fakes import LookInto


class LiveStorage:
    """Within it, adds up the storages of all tensors that operators return, until they are freed.

    Views count once, with what they look at. Storages that were there before, and are looked at
    again, count unless `ignore` names them.

    Attributes:
        live: Bytes alive.
        peak: Most since `forget_peak`.
        operators: Results of operators so far.
    """

    def __init__(
        self,
        granularity: int = 1,
        also: Callable[[str, torch.Tensor], None] | None = None,
        *,
        of_fakes: bool = False,
        look_into: LookInto | None = None,
    ) -> None:
        """Counts nothing yet.

        Args:
            granularity: Each storage counts as a multiple of so many bytes.
            also: Told each operator's name and result, too.
            of_fakes: Count tensors without memory as if they had some, and no others. By default
                they do not count: DTensor tries operators on such.
            look_into: Says what an operator takes within itself; see `OperatorWatch`.
        """
        self._also = also
        self._of_fakes = of_fakes
        self.live = 0
        self.peak = 0
        self.operators = 0
        self._granularity = granularity
        self._levels: list[int] | None = None
        self._look_into = look_into
        self._levels_within: list[int] = []
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._ignored: dict[int, torch.UntypedStorage] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(fakes.watching_resizes(self._resized))
        self._stack.enter_context(fakes.OperatorWatch(self._seen, self._look_into, self._within))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def ignore(self, tensor: torch.Tensor) -> None:
        """Never counts this tensor's storage."""
        storage = tensor.untyped_storage()
        self._ignored[fakes.storage_key(storage)] = storage

    def counted(self, tensor: torch.Tensor) -> int:
        """Bytes that are counted for this tensor's storage."""
        entry = self._known.get(fakes.storage_key(tensor.untyped_storage()))
        return 0 if entry is None else entry[0]

    def forget_peak(self) -> None:
        """Looks for the peak from now on."""
        self.peak = self.live

    def take_levels(self) -> list[int]:
        """What `live` was after each growth since this was called last."""
        levels, self._levels = self._levels, []
        return levels or []

    def take_levels_within(self) -> list[int]:
        """What `live` was with what operators take within themselves, for each that was looked into."""
        levels, self._levels_within = self._levels_within, []
        return levels

    def _within(self, extra: int) -> None:
        self._levels_within.append(self.live + self._rounded(extra))

    def _seen(self, operator: object, tensor: torch.Tensor) -> None:
        self.operators += 1
        if fakes.is_without_memory(tensor) is self._of_fakes:
            self._count(tensor.untyped_storage())
        if self._also is not None:
            self._also(str(operator), tensor)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = fakes.storage_key(storage)
        if key in self._known or key in self._ignored:
            return
        reference = fakes.when_freed(storage, lambda: self._freed(key))
        nbytes = self._rounded(storage.nbytes())
        self._known[key] = (nbytes, reference)
        self._grow(nbytes)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = fakes.storage_key(storage)
        if key in self._known:
            before, reference = self._known[key]
            nbytes = self._rounded(storage.nbytes())
            self._known[key] = (nbytes, reference)
            self._grow(nbytes - before)

    def _freed(self, key: int) -> None:
        nbytes, _ = self._known.pop(key)
        self._grow(-nbytes)

    def _grow(self, nbytes: int) -> None:
        self.live += nbytes
        if nbytes > 0:
            self.peak = max(self.peak, self.live)
            if self._levels is not None:
                self._levels.append(self.live)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._granularity) * self._granularity
