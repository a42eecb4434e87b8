"""By which operations gradients are averaged, without overflow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp

from fsdp_core import torch_private

# Where the reference sees no risk of overflow; elsewhere the division is split around the sum.
_WIDE_DTYPES = frozenset({torch.float32, torch.bfloat16})


@dataclass(frozen=True)
class Reduction:
    """Divide, reduce along the shard axis, reduce along the replicate axis, divide again.

    Attributes:
        scatter_op: The reduce-scatter's operation.
        replica_op: The all-reduce's operation.
        pre_divide: Applied to the contribution; 1 means not at all.
        post_divide: Applied to the result; 1 means not at all.
    """

    scatter_op: ReduceOp | ReduceOp.RedOpType = ReduceOp.SUM
    replica_op: ReduceOp.RedOpType = ReduceOp.SUM
    pre_divide: float = 1.0
    post_divide: float = 1.0

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        *,
        shards: int,
        replicas: int = 1,
        divide_factor: float | None = None,
        force_sum: bool = False,
        scales_sums: bool = False,
    ) -> Reduction:
        """The mean over all ranks in `dtype`, or the sum divided by `divide_factor`.

        The mean has the reference's numerics. Wide dtypes use the backend's own AVG. In others
        each of N summands is first divided by the power of two next above sqrt(N), if N allows,
        and the sum by the rest of N: so neither the summands underflow nor the sum overflows.

        A factor of one's own is applied before the sum in wide dtypes: by the backend where it has
        a scaled sum, else by dividing the contribution.

        Args:
            dtype: In which gradients travel.
            shards: Ranks of the reduce-scatter.
            replicas: Ranks of the all-reduce.
            divide_factor: Instead of the number of ranks.
            force_sum: Use sums alone.
            scales_sums: Whether the reduce-scatter's backend multiplies summands itself.
        """
        ranks = shards * replicas
        if dtype in _WIDE_DTYPES and not force_sum:
            if divide_factor is None:
                mean = ReduceOp.SUM if ranks == 1 else ReduceOp.AVG
                return cls(mean, mean)
            if divide_factor == shards:
                return cls(ReduceOp.AVG, ReduceOp.SUM)
            if scales_sums:
                return cls(torch_private.scaled_sum(1 / divide_factor))
            return cls(pre_divide=divide_factor)
        factor = float(ranks) if divide_factor is None else divide_factor
        if dtype in _WIDE_DTYPES:
            return cls(post_divide=factor)
        pre = 1
        while factor % pre == 0 and factor / pre > pre:
            pre *= 2
        return cls(pre_divide=float(pre), post_divide=factor / pre)
