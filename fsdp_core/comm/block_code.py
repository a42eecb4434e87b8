"""Blocks of numbers as one-byte codes, each block with a scale of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from fsdp_core.errors import ArgumentError

SCALE_DTYPE = torch.float32
DEFAULT_BLOCK_SIZE = 256
_SMALLEST_SCALE = torch.finfo(SCALE_DTYPE).tiny


@dataclass(frozen=True)
class BlockCode:
    """Symmetric absolute-maximum quantisation of blocks of consecutive elements.

    With scale = max|block| / `top`, the code of x is x / scale, rounded to the nearest value
    that `dtype` has. So zero stays zero, and a block with a number that is not finite comes
    back without a finite one in place of it.

    How far the decoded number is from x, besides float32's own rounding:

    int8
        scale / 2 = max|block| / 254, since codes are one apart. Source: absmax quantisation in
        Dettmers et al., arXiv 2208.07339, section 2; by blocks in ZeRO++, arXiv 2306.10209.
    float8_e4m3fn
        The larger of |x| / 16 and scale / 1024: three bits of mantissa, so half a unit in the
        last place is 2^-4 of the power of two below x; below 2^-6 codes are 2^-9 apart.
        Source: the format's table in Micikevicius et al., arXiv 2209.05433.

    Blocks smaller than 2^-126 * `top`, about 1e-36, are less precise than that.

    Attributes:
        dtype: Of the codes.
        top: The largest code.
        block_size: Elements that share a scale; the last block of a row may have fewer.

    Raises:
        ArgumentError: `block_size` is not positive.
    """

    dtype: torch.dtype
    top: float
    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ArgumentError(f"block_size must be at least 1, not {self.block_size}.")

    @classmethod
    def int8(cls, block_size: int = DEFAULT_BLOCK_SIZE) -> Self:
        """Integers from -127 to 127."""
        return cls(torch.int8, 127.0, block_size)

    @classmethod
    def float8(cls, block_size: int = DEFAULT_BLOCK_SIZE) -> Self:
        """Floating-point numbers with 4 bits of exponent and 3 of mantissa, up to 448."""
        return cls(torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max, block_size)

    def scales_for(self, numel: int) -> int:
        """How many scales a row of `numel` elements has."""
        return -(-numel // self.block_size)

    def encode(self, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Writes the codes of `rows`.

        Args:
            rows: (rows, n) floating-point numbers.
            codes: Written; (rows, n) of `dtype`.
            scales: Written; (rows, `scales_for(n)`) of float32.
        """
        for numbers, code, scale in self._blocks(rows, codes, scales):
            exact = numbers.to(SCALE_DTYPE)
            scale.copy_(exact.abs().amax(dim=2, keepdim=True).div_(self.top))
            scale.clamp_(min=_SMALLEST_SCALE)  # of a block of zeros, which is then not 0 / 0
            quotient = exact / scale
            code.copy_(quotient if self.dtype.is_floating_point else quotient.round_())

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes the numbers that `codes` stand for into `rows`, in the dtype of `rows`.

        Shapes as for `encode`.
        """
        for numbers, code, scale in self._blocks(rows, codes, scales):
            # Codes of integers are converted within the product, without a copy.
            factor = code.to(SCALE_DTYPE) if self.dtype.is_floating_point else code
            torch.mul(factor, scale, out=numbers)

    def _blocks(
        self, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Views (rows, blocks, elements), and (rows, blocks, 1) of the scales: whole blocks, rest."""
        full, rest = divmod(rows.size(1), self.block_size)
        cut = full * self.block_size
        if full:
            shape = (full, self.block_size)
            yield (
                torch.unflatten(rows[:, :cut], 1, shape),
                torch.unflatten(codes[:, :cut], 1, shape),
                scales[:, :full].unsqueeze(2),
            )
        if rest:
            yield (
                rows[:, cut:].unsqueeze(1),
                codes[:, cut:].unsqueeze(1),
                scales[:, full:].unsqueeze(2),
            )
