"""Gradients that are reduced as one byte an element."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_core.comm.block_code import DEFAULT_BLOCK_SIZE, SCALE_DTYPE, BlockCode
from fsdp_core.comm.strategies import OrdinaryMemory, ReduceOp, ReduceScatter
from fsdp_core.errors import UnsupportedError

_GROUPS_TIMEOUT = timedelta(0)  # as PyTorch understands it
_ALIGNMENT = SCALE_DTYPE.itemsize


class QuantizedReduceScatter(OrdinaryMemory, ReduceScatter):
    """Sends int8 blocks to the ranks that need them, which sum in float32.

    A ring would quantise partial sums again at every hop. Here each contribution is quantised once,
    sent by one all-to-all, and summed in rank order by its receiver: the idea of qgZ in ZeRO++,
    arXiv 2306.10209, section 3.3, without its second level. What a rank contributes to its own row
    is not quantised.

    An element of the sum over N ranks is off by at most the sum over the N - 1 others of
    max|block| / 254, so (N - 1) * M / 254 where M bounds the gradient's elements; of a mean,
    by 1 / N of that. See `BlockCode`. Each element then costs 1 + 4 / `block_size` bytes, a
    quarter of float32's.

    Args:
        block_size: Elements that share a scale; smaller is more precise.
    """

    def __init__(self, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        self._code = BlockCode.int8(block_size)

    @property
    def granularity(self) -> int:
        """Elements of one block disturb each other."""
        return self._code.block_size

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Quantises and starts the exchange; the sum is made by the work's `wait`.

        Raises:
            UnsupportedError: `op` is neither a sum nor a mean.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UnsupportedError(
                f"QuantizedReduceScatter sums or averages, and was asked for {op}. Use the default "
                "reduce-scatter with this operation."
            )
        exchange = _Exchange(self._code, input_tensor, group, async_op=async_op)
        work = _SumOfExchange(exchange, output_tensor, is_mean=op == dist.ReduceOp.AVG)
        if async_op:
            return work
        work.wait()
        return None


class _Exchange:
    """Rows of bytes, one to each rank and one from each: scales first, so that they are aligned."""

    def __init__(
        self,
        code: BlockCode,
        contribution: torch.Tensor,
        group: dist.ProcessGroup,
        *,
        async_op: bool,
    ) -> None:
        self.ranks, self.rank = group.size(), group.rank()
        self.own = contribution.view(self.ranks, -1)
        self._code = code
        self._numel = self.own.size(1)
        self._scale_bytes = _ALIGNMENT * code.scales_for(self._numel)
        row = -(-(self._scale_bytes + self._numel) // _ALIGNMENT) * _ALIGNMENT
        self._sent = contribution.new_zeros((self.ranks, row), dtype=torch.uint8)
        self._received = torch.empty_like(self._sent)
        code.encode(self.own, *self._parts(self._sent))
        self._work: dist.Work | None = dist.all_to_all_single(
            self._received, self._sent, group=group, async_op=async_op
        )

    @property
    def has_ended(self) -> bool:
        """Whether the exchange has ended."""
        return self._work is None or self._work.is_completed()

    def wait(self, timeout: timedelta) -> None:
        """Waits until all rows have arrived."""
        if self._work is not None:
            self._work.wait(timeout)

    def decode(self, rank: int, numbers: torch.Tensor) -> None:
        """Writes what `rank` contributed, (1, n)."""
        self._code.decode(*self._parts(self._received.narrow(0, rank, 1)), numbers)

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = rows.narrow(1, self._scale_bytes, self._numel).view(self._code.dtype)
        return codes, rows.narrow(1, 0, self._scale_bytes).view(SCALE_DTYPE)


class _SumOfExchange(dist.Work):
    """The exchange in flight, and the sum that follows it."""

    def __init__(self, exchange: _Exchange, output: torch.Tensor, *, is_mean: bool) -> None:
        super().__init__()
        self._exchange = exchange
        self._output = output
        self._is_mean = is_mean

    def is_completed(self) -> bool:
        """Whether the exchange has ended; the sum is then still to be made."""
        return self._exchange.has_ended

    def wait(self, timeout: timedelta = _GROUPS_TIMEOUT) -> bool:
        """Waits for the exchange and writes the sum; on an accelerator, on the current stream."""
        exchange = self._exchange
        exchange.wait(timeout)
        total = self._output.new_zeros((1, self._output.numel()), dtype=SCALE_DTYPE)
        numbers = torch.empty_like(total)
        for rank in range(exchange.ranks):
            if rank == exchange.rank:
                total += exchange.own[rank]
            else:
                exchange.decode(rank, numbers)
                total += numbers
        if self._is_mean:
            total /= exchange.ranks
        self._output.copy_(total.view(-1))
        return True
