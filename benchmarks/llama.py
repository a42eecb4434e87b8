"""A model of Llama 3's shapes (Grattafiori et al. 2024, arXiv:2407.21783), to be counted, not run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with grouped-query attention and SwiGLU."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 128_256


LLAMA_8B = Shape(4096, 32, 32, 8, 14_336)
LLAMA_70B = Shape(8192, 80, 64, 8, 28_672)


class Attention(nn.Module):
    """Causal attention in which several heads share a key and a value."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.heads
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, shape.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(shape.dim, shape.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.shared_by = shape.heads // shape.kv_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mixes ``[B, T, D]`` along T."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        key, value = (part.repeat_interleave(self.shared_by, 1) for part in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined


class Block(nn.Module):
    """Attention and SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.norm = nn.RMSNorm(shape.dim)
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One step of the stream ``[B, T, D]``."""
        x = x + self.attention(self.attention_norm(x))
        normed = self.norm(x)
        summed: torch.Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return summed


class Llama(nn.Module):
    """Tokens ``[B, T]`` to logits; without positions, which weigh nothing."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.vocab = shape.vocab
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, T, vocab]``."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(model: nn.Module, batch: int, *, length: int) -> torch.Tensor:
    """Cross entropy of the next token over random tokens."""
    assert isinstance(model, Llama)  # noqa: S101 - it knows its vocabulary
    tokens = torch.randint(model.vocab, (batch, length + 1))
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
