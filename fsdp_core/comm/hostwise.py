"""Collectives of ranks on several hosts: through memory within a host, by a process group between hosts.

Ranks that have the same place on their hosts exchange over the network, the ranks of a host through a
segment that all of it map. Over a ring of all ranks most of what a rank receives would come from ranks of
its own host through a socket.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from fsdp_core.comm.collectives import GroupCollectives
from fsdp_core.errors import UnsupportedError

if TYPE_CHECKING:
    from fsdp_core.comm import strategies
    from fsdp_core.comm.shared_memory import HostAxes, OutBox, SharedMemoryAxis


_LOOK: Final = timedelta(seconds=0.25)
"""Between two looks whether ranks of this host still run."""


class HostwiseCollectives(GroupCollectives):
    """Collectives over all ranks of a group that lies on several hosts.

    Sums are those of each host's ranks in their order, which the process group then adds.

    Args:
        name: Of the mesh axis.
        group: All ranks.
        axes: How they reach each other; `across` is there.

    Attributes:
        within: The ranks of this host.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, axes: HostAxes) -> None:
        if axes.across is None:
            raise UnsupportedError("Ranks of one host need no process group.")
        super().__init__(name, group)
        self.within = axes.within
        self._across = axes.across
        self._hosts, self._host = axes.hosts, axes.host

    def all_gather(
        self, output: torch.Tensor, contribution: torch.Tensor, *, on_stream: bool
    ) -> dist.Work | None:
        """Gathers the rows of this place from all hosts; `wait` copies those of the host's other places."""
        del on_stream
        numel = contribution.numel()
        box = self.within.take_box(self._hosts * numel * contribution.itemsize)
        column = self._view(self.within.rank, box.place, self._hosts, numel, output.dtype)
        column[self._host].copy_(contribution)
        work = self._across.all_gather(column.view(-1), column[self._host])
        return cast("dist.Work", _Gather(self, work, box, output))

    def finish_gather(self, box: OutBox, output: torch.Tensor) -> None:
        """Copies what the ranks of this host have gathered, and ends the use of `box`."""
        within, ranks = self.within, self.within.size
        numel = output.numel() // self.size
        what = f"exchange of {output.numel()} gathered elements on this host"
        number = within.start(what, box)
        rows = output.view(self._hosts, ranks, numel)
        for place, at in enumerate(within.await_started(number, what)):
            rows[:, place].copy_(self._view(place, at, self._hosts, numel, output.dtype))
        within.give_back(box)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        contribution: torch.Tensor,
        op: strategies.ReduceOp,
        *,
        on_stream: bool,
    ) -> dist.Work | None:
        """Adds within the host, and starts the sum over hosts.

        Raises:
            UnsupportedError: `op` is neither a sum nor a mean.
        """
        del on_stream
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise UnsupportedError(f"Ranks of several hosts cannot reduce by {op}.")
        within, ranks = self.within, self.within.size
        box = within.take_box(contribution.numel() * contribution.itemsize)
        mine = self._view(within.rank, box.place, 1, contribution.numel(), contribution.dtype)
        mine.view(-1).copy_(contribution)
        what = f"sum of {contribution.numel()} elements on this host"
        number = within.start(what, box)
        numel = output.numel()
        first, second, *more = (
            self._view(place, at, self._hosts * ranks, numel, output.dtype)[within.rank :: ranks]
            for place, at in enumerate(within.await_started(number, what))
        )
        partial = first + second
        for rows in more:
            partial += rows
        within.give_back(box)
        work = self._across.all_reduce(partial)
        divisor = self.size if op == ReduceOp.AVG else 1
        return cast("dist.Work", _Sum(work, partial[self._host], output, divisor, within))

    def _view(self, place: int, at: int, rows: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.within.view(place, at, rows * numel, dtype).view(rows, numel)


class _Gather:
    """Between hosts it goes on; within the host it happens where it is waited for."""

    def __init__(
        self, collectives: HostwiseCollectives, work: dist.Work, box: OutBox, output: torch.Tensor
    ) -> None:
        self._collectives = collectives
        self._work = work
        self._box = box
        self._output = output

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Again, where it timed out."""
        _wait_for(self._work, timeout, self._collectives.within)
        self._collectives.finish_gather(self._box, self._output)
        return True


class _Sum:
    """A sum over hosts, of which a mean is made."""

    def __init__(
        self,
        work: dist.Work,
        row: torch.Tensor,
        output: torch.Tensor,
        divisor: int,
        within: SharedMemoryAxis,
    ) -> None:
        self._work = work
        self._row = row
        self._output = output
        self._divisor = divisor
        self._within = within

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Again, where it timed out."""
        _wait_for(self._work, timeout, self._within)
        if self._divisor != 1:
            torch.div(self._row, self._divisor, out=self._output)
        else:
            self._output.copy_(self._row)
        return True


def _wait_for(work: dist.Work, timeout: timedelta | None, within: SharedMemoryAxis) -> None:
    """Waits for what goes on between hosts, unless a rank of this host has ended.

    The rank of another host that this one waits for may itself wait for one that failed by that death.
    """
    deadline = None if timeout is None else monotonic() + timeout.total_seconds()
    while True:
        began = monotonic()
        try:
            work.wait(_LOOK)
        except RuntimeError:
            # A time-out leaves the collective running; anything else has ended it at once.
            if monotonic() - began < _LOOK.total_seconds() / 2:
                raise
            within.raise_if_ended("exchange with other hosts")
            if deadline is not None and monotonic() >= deadline:
                raise
        else:
            return
