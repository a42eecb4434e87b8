"""What an optimizer keeps and needs, by which its share of memory is known for any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod


@dataclass(frozen=True)
class MatrixState:
    """What an optimizer keeps for a matrix, where that follows from its shape.

    Of tensors of more dims, rows are the first dim and columns the product of the others.

    Attributes:
        copies: As `OptimizerFacts.state_copies`.
        element_bytes: As `OptimizerFacts.state_element_bytes`.
        row_bytes: Bytes for each row.
        column_bytes: Bytes for each column.
        bytes: What it keeps besides.
    """

    copies: int = 0
    element_bytes: float = 0.0
    row_bytes: float = 0.0
    column_bytes: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class OptimizerFacts:
    """Memory of an optimizer, in copies of what it trains.

    Attributes:
        state_copies: Tensors of a parameter's shape and dtype that it keeps for each.
        state_bytes: What it keeps besides for each parameter.
        step_copies_of_all: Temporary copies of all parameters in a step (``foreach``).
        step_copies_of_largest: Temporary copies of one parameter at a time.
        state_element_bytes: Bytes for each element that are no whole copy: state in a narrower
            dtype.
        matrices: Of what has two dims and more, if that is not as the above.
    """

    state_copies: int = 0
    state_bytes: int = 0
    step_copies_of_all: int = 0
    step_copies_of_largest: int = 0
    state_element_bytes: float = 0.0
    matrices: MatrixState | None = None

    def state_of(self, shape: Sequence[int], copy: int) -> int:
        """Bytes that it keeps for a parameter.

        Args:
            shape: Of what the optimizer sees.
            copy: Bytes of a tensor of that shape and the parameter's dtype.
        """
        numel = prod(shape)
        if len(shape) < _MATRIX_DIMS or self.matrices is None:
            return (
                self.state_copies * copy
                + ceil(self.state_element_bytes * numel)
                + (self.state_bytes)
            )
        kept = self.matrices
        columns = numel // shape[0] if shape[0] else 0
        rest = kept.element_bytes * numel + kept.row_bytes * shape[0] + kept.column_bytes * columns
        return kept.copies * copy + ceil(rest) + kept.bytes


_MATRIX_DIMS = 2

ADAMW_FUSED = OptimizerFacts(state_copies=2, state_bytes=4)
"""`torch.optim.AdamW(fused=True)`."""

SGD = OptimizerFacts()
"""`torch.optim.SGD` without momentum and weight decay."""
