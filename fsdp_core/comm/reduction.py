"""By which operation gradients are averaged, without overflow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp

# Wide enough exponents for a sum over ranks; elsewhere the division is split around the sum.
_WIDE_DTYPES = frozenset({torch.float32, torch.bfloat16})


@dataclass(frozen=True)
class Reduction:
    """Divide, reduce, divide again.

    Attributes:
        op: The collective's operation.
        pre_divide: Applied to the contribution; 1 means not at all.
        post_divide: Applied to the result; 1 means not at all.
    """

    op: ReduceOp.RedOpType
    pre_divide: float = 1.0
    post_divide: float = 1.0

    @classmethod
    def mean(cls, dtype: torch.dtype, ranks: int) -> Reduction:
        """The mean over `ranks` in `dtype`, with the reference's numerics.

        Wide dtypes use the backend's own AVG. In others each of N summands is first divided by
        the power of two next above sqrt(N), if N allows, and the sum by the rest of N: so
        neither the summands underflow nor the sum overflows.
        """
        if dtype in _WIDE_DTYPES:
            return cls(ReduceOp.SUM if ranks == 1 else ReduceOp.AVG)
        pre = 1
        while ranks % pre == 0 and ranks / pre > pre:
            pre *= 2
        return cls(ReduceOp.SUM, float(pre), ranks / pre)
