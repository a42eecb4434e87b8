"""A decoder-only transformer: RoPE, RMSNorm, SwiGLU, causal attention; no biases.

Sources: Vaswani et al. 2017 (arXiv:1706.03762); RoPE: Su et al. 2021 (arXiv:2104.09864); RMSNorm:
Zhang and Sennrich 2019 (arXiv:1910.07467); SwiGLU: Shazeer 2020 (arXiv:2002.05202).

Shapes: ``B`` sequences, ``T`` tokens each, ``D`` model width, ``H`` heads of ``D / H``.
"""

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

BYTES = 256
_HIDDEN_MULTIPLE = 32


class Projection(nn.Linear):
    """A linear map without bias, ``[..., inputs]`` to ``[..., outputs]``.

    Args:
        inputs: Width of the input.
        outputs: Width of the output.
        std: Standard deviation of the first values.
    """

    def __init__(self, inputs: int, outputs: int, *, std: float) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Draws new values for the weight."""
        nn.init.normal_(self.weight, std=self.std)


class Rotary(nn.Module):
    """Turns pairs of channels by an angle that grows with the position (RoPE).

    The angles are computed in fp32 whatever the precision of the model, because in bf16 the
    positions beyond 256 would not be distinct.
    """

    inverse_periods: torch.Tensor

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.base = base
        self.register_buffer("inverse_periods", torch.empty(head_dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Recomputes the frequencies."""
        exponents = torch.arange(0, self.head_dim, 2, device=self.inverse_periods.device)
        self.inverse_periods.copy_(self.base ** (-exponents / self.head_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates ``x``, ``[B, H, T, D / H]``, of positions 0 to ``T - 1``."""
        positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inverse_periods.float())
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


class Attention(nn.Module):
    """Causal self-attention over ``[B, T, D]``.

    Under tensor parallelism each rank has the projections of some heads and computes only these.
    """

    def __init__(self, dim: int, heads: int, *, rope_base: float, out_std: float) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = Projection(dim, dim, std=dim**-0.5)
        self.key = Projection(dim, dim, std=dim**-0.5)
        self.value = Projection(dim, dim, std=dim**-0.5)
        self.rotary = Rotary(self.head_dim, rope_base)
        self.out = Projection(dim, dim, std=out_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mixes every token with those before it."""
        query, key, value = (self._heads(project(x)) for project in self._projections)
        mixed = functional.scaled_dot_product_attention(
            self.rotary(query), self.rotary(key), value, is_causal=True
        )
        joined: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined

    @property
    def _projections(self) -> tuple[Projection, Projection, Projection]:
        return self.query, self.key, self.value

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """``[B, T, D]`` of this rank's heads as ``[B, H, T, D / H]``."""
        if projected.shape[-1] % self.head_dim:
            raise ValueError(
                f"decoder: tp leaves each rank a width of {projected.shape[-1]}, which is not a "
                f"multiple of the head size {self.head_dim}; choose a tp that divides heads"
            )
        batch, length, _ = projected.shape
        return projected.view(batch, length, -1, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """A gated feed-forward layer over ``[B, T, D]``."""

    def __init__(self, dim: int, hidden: int, *, out_std: float) -> None:
        super().__init__()
        self.gate = Projection(dim, hidden, std=dim**-0.5)
        self.up = Projection(dim, hidden, std=dim**-0.5)
        self.down = Projection(hidden, dim, std=out_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transforms each token by itself."""
        transformed: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return transformed


class Block(nn.Module):
    """Attention and feed-forward, each normed before and added to the stream ``[B, T, D]``."""

    def __init__(
        self, dim: int, heads: int, hidden: int, *, rope_base: float, residual_scale: float
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(
            dim, heads, rope_base=rope_base, out_std=dim**-0.5 * residual_scale
        )
        self.feed_forward_norm = nn.RMSNorm(dim, eps=1e-5)
        self.feed_forward = SwiGLU(dim, hidden, out_std=hidden**-0.5 * residual_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One step of the stream."""
        x = x + self.attention(self.attention_norm(x))
        summed: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return summed


class Decoder(nn.Module):
    """The whole model: int64 tokens ``[B, T]`` to logits ``[B, T, vocab]``.

    Args:
        dim: Width of the stream; a multiple of ``2 * heads``.
        layers: Number of blocks.
        heads: Attention heads of a block.
        vocab: Number of different tokens; 256 for bytes.
        hidden: Width of the feed-forward layer. None takes 8/3 of ``dim`` (which gives SwiGLU as
            many parameters as a plain layer of width ``4 * dim``), rounded up to 32.
        rope_base: Longest period of RoPE, in tokens, over 2 pi.

    Raises:
        ValueError: ``dim`` does not split into heads of an even width, or a size is below 1.
    """

    meta_init: ClassVar[bool] = True

    def __init__(
        self,
        dim: int = 192,
        layers: int = 6,
        heads: int = 6,
        vocab: int = BYTES,
        hidden: int | None = None,
        rope_base: float = 10_000.0,
    ) -> None:
        super().__init__()
        if min(dim, layers, heads, vocab) < 1 or dim % (2 * heads):
            raise ValueError(
                f"decoder: dim {dim} must be a multiple of 2 x heads ({heads}), "
                f"and layers ({layers}) and vocab ({vocab}) at least 1"
            )
        if hidden is None:
            hidden = -(-8 * dim // (3 * _HIDDEN_MULTIPLE)) * _HIDDEN_MULTIPLE
        # Each block adds two terms to the stream: its variance stays that of the embedding.
        scale = (2 * layers) ** -0.5
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(
            Block(dim, heads, hidden, rope_base=rope_base, residual_scale=scale)
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        # Small, so that the first loss is that of the uniform distribution, ln(vocab).
        self.head = Projection(dim, vocab, std=0.1 * dim**-0.5)

    def get_input_embeddings(self) -> nn.Embedding:
        """The table of tokens, by the name that models of transformers have for it."""
        return self.embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the token after each given one."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
