"""Collectives of ranks on several hosts: through memory within a host, by a process group between hosts.

Ranks that have the same place on their hosts exchange over the network, the ranks of a host through a
segment that all of it map. Over a ring of all ranks most of what a rank receives would come from ranks of
its own host through a socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from fsdp_core.errors import UnsupportedError

if TYPE_CHECKING:
    from datetime import timedelta

    from fsdp_core.comm import strategies
    from fsdp_core.comm.shared_memory import HostAxes, OutBox


class HostwiseCollectives:
    """Collectives over all ranks of a group that lies on several hosts.

    Sums are those of each host's ranks in their order, which the process group then adds.

    Args:
        name: Of the mesh axis.
        group: All ranks.
        axes: How they reach each other; `across` is there.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, axes: HostAxes) -> None:
        if axes.across is None:
            raise UnsupportedError("Ranks of one host need no process group.")
        self._name = name
        self._group = group
        self._within = axes.within
        self._across = axes.across
        self._hosts, self._host = axes.hosts, axes.host

    @property
    def name(self) -> str:
        """Name of the mesh axis."""
        return self._name

    @property
    def size(self) -> int:
        """Ranks of all hosts."""
        return self._group.size()

    @property
    def rank(self) -> int:
        """This process's rank among them."""
        return self._group.rank()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Of all of them."""
        return self._group

    def scales_sums(self, device: torch.device) -> bool:
        """Gloo does not."""
        del device
        return False

    def gather_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(numel, dtype=dtype, device=device)

    def reduce_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(
        self, output: torch.Tensor, contribution: torch.Tensor, *, on_stream: bool
    ) -> dist.Work | None:
        """Gathers the rows of this place from all hosts; `wait` copies those of the host's other places."""
        del on_stream
        numel = contribution.numel()
        box = self._within.take_box(self._hosts * numel * contribution.itemsize)
        column = self._view(self._within.rank, box.place, self._hosts, numel, output.dtype)
        column[self._host].copy_(contribution)
        work = self._across.all_gather(column.view(-1), column[self._host])
        return cast("dist.Work", _Gather(self, work, box, output))

    def finish_gather(self, box: OutBox, output: torch.Tensor) -> None:
        """Copies what the ranks of this host have gathered, and ends the use of `box`."""
        within, ranks = self._within, self._within.size
        numel = output.numel() // self.size
        what = f"exchange of {output.numel()} gathered elements on this host"
        number = within.start(what, box.place)
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
        within, ranks = self._within, self._within.size
        box = within.take_box(contribution.numel() * contribution.itemsize)
        mine = self._view(within.rank, box.place, 1, contribution.numel(), contribution.dtype)
        mine.view(-1).copy_(contribution)
        what = f"sum of {contribution.numel()} elements on this host"
        number = within.start(what, box.place)
        numel = output.numel()
        first, second, *more = (
            self._view(place, at, self._hosts * ranks, numel, output.dtype)[within.rank :: ranks]
            for place, at in enumerate(within.await_started(number, what))
        )
        partial = first + second
        for rows in more:
            partial += rows
        within.give_back(box)
        work = self._across.reduce_scatter(output, partial.view(-1))
        divisor = self.size if op == ReduceOp.AVG else 1
        return cast("dist.Work", _Sum(work, partial, output, divisor))

    def all_reduce(
        self, buffer: torch.Tensor, op: strategies.ReduceOp, *, on_stream: bool
    ) -> dist.Work | None:
        """By the process group of all ranks."""
        work: dist.Work | None = dist.all_reduce(
            buffer, op=op, group=self._group, async_op=not on_stream
        )
        return work

    def _view(self, place: int, at: int, rows: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._within.view(place, at, rows * numel, dtype).view(rows, numel)


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
        _wait_for(self._work, timeout)
        self._collectives.finish_gather(self._box, self._output)
        return True


class _Sum:
    """A sum over hosts, of which a mean is made."""

    def __init__(
        self, work: dist.Work, partial: torch.Tensor, output: torch.Tensor, divisor: int
    ) -> None:
        self._work = work
        self._partial = partial  # the work refers to its memory
        self._output = output
        self._divisor = divisor

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Again, where it timed out."""
        _wait_for(self._work, timeout)
        if self._divisor != 1:
            self._output.div_(self._divisor)
        return True


def _wait_for(work: dist.Work, timeout: timedelta | None) -> None:
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)
