"""What the units under one root share in order to communicate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fsdp_core.comm.lanes import Lane

if TYPE_CHECKING:
    import torch

    from fsdp_core.comm.lanes import Lanes, Mark
    from fsdp_core.comm.ledger import CollectiveLedger


class Lent(Protocol):
    """Slices that other ranks read where they lie."""

    def await_copied(self) -> None:
        """Waits until the others have copied what this rank has."""


@dataclass(frozen=True)
class CommLink:
    """Where collectives are placed and counted, and what must not be let go before its time.

    Attributes:
        lanes: Orders device work.
        ledger: Numbers collectives per process group.
        uncopied: Slices that other ranks may still copy.
    """

    lanes: Lanes
    ledger: CollectiveLedger
    uncopied: list[Lent] = field(default_factory=list)
    _gathered: list[tuple[torch.Tensor, Mark]] = field(default_factory=list, init=False)
    _held: list[tuple[torch.Tensor, Mark]] = field(default_factory=list, init=False)
    _awaited: list[Mark] = field(default_factory=list, init=False)
    _with_results: dict[Lane, None] = field(default_factory=dict, init=False)

    def hold_gathered(self, buffer: torch.Tensor, mark: Mark) -> None:
        """Keeps a gather's buffer that is copied out until `mark`.

        While it is held, the next gather need not wait for that copy before it takes its memory.
        """
        self._gathered.append((buffer, mark))

    def let_go_gathered(self) -> None:
        """Gives the buffers back: gathers that are issued from now on come after their copies."""
        for _, mark in self._gathered:
            self.lanes.follow_mark(Lane.PACK, mark)
            self.lanes.follow_mark(Lane.GATHER, mark)
        self._gathered.clear()

    def note_results(self, lane: Lane) -> None:
        """Has the compute lane follow `lane`, which made gradients, at the end of backward."""
        self._with_results[lane] = None

    def hold_until_passed(self, buffer: torch.Tensor, mark: Mark) -> None:
        """Keeps a buffer of the reduce lane that another lane reads until `mark`.

        Without a reference the allocator could give it to the next reduction at once. The one
        held before is let go: the reduce lane then follows its mark, which is an all-reduce
        earlier, so that one of them overlaps the next reduction.
        """
        self._let_go()
        self._held.append((buffer, mark))

    def await_on_host(self, mark: Mark) -> None:
        """Has the host wait for `mark` at the end of backward: it will read what was copied."""
        self._awaited.append(mark)

    def end_backward(self) -> None:
        """Orders what follows on the compute lane, and on the host, after all reductions."""
        self._let_go()
        # No others: while a graph is captured, a stream without captured work cannot be followed.
        for lane in self._with_results:
            self.lanes.follow(Lane.COMPUTE, lane)
        self._with_results.clear()
        for mark in self._awaited:
            self.lanes.wait_on_host(mark)
        self._awaited.clear()

    def _let_go(self) -> None:
        for _, mark in self._held:
            self.lanes.follow_mark(Lane.REDUCE, mark)
        self._held.clear()
