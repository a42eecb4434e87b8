"""Small models with every awkward parameter: uneven, tied, frozen, unused, of one element."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Recompute = Literal["no", "block", "all"]

VOCAB, WIDTH, HIDDEN, BLOCKS = 11, 13, 7, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.gate = nn.Parameter(torch.ones(1))
        self.never = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        result: torch.Tensor = x + self.gate * self.down(hidden)
        return result


class Decoder(nn.Module):
    """Token ids (batch, length) to logits; head and embedding tied, one bias frozen."""

    def __init__(self, *, recompute: Recompute = "no") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute
        self.norm.bias.requires_grad = False
        first = self.blocks[0]
        assert isinstance(first, Block)
        first.up.bias.requires_grad = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.recompute == "all":
            x = checkpoint(self._run_blocks, x, use_reentrant=False)
        else:
            x = self._run_blocks(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def _run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            each = self.recompute == "block"
            x = checkpoint(block, x, use_reentrant=False) if each else block(x)
        return x


def decoder(*, recompute: Recompute = "no") -> Decoder:
    """The same decoder on every rank."""
    torch.manual_seed(7)
    return Decoder(recompute=recompute)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token loss, averaged over all positions."""
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(step: int, rank: int, *, batch: int = 4, length: int = 6) -> torch.Tensor:
    """One rank's token ids of one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCAB, (batch, length), generator=generator)
