"""The grid's model: small, and awkward exactly where a cell says so."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.engine.grid.cell import Weights

BLOCKS = 3


@dataclass(frozen=True)
class Sizes:
    """Of every dim."""

    vocab: int
    width: int
    hidden: int


# Multiples of 1, 2, 3 and 4.
EVEN = Sizes(vocab=24, width=12, hidden=24)
# Halves of a hidden dim, one for each tensor-parallel rank, are odd.
UNEVEN = Sizes(vocab=11, width=13, hidden=14)


class Block(nn.Module):
    """An MLP with a residual."""

    def __init__(self, sizes: Sizes, *, is_unused: bool, has_gate: bool) -> None:
        super().__init__()
        if is_unused:
            # First in the packing order: whether it is packed shifts all others.
            self.never = nn.Parameter(torch.randn(4, 12))
        self.norm = nn.LayerNorm(sizes.width)
        self.up = nn.Linear(sizes.width, sizes.hidden)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)
        self.gate = nn.Parameter(torch.ones(1)) if has_gate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + change if self.gate is None else x + self.gate * change


class Net(nn.Module):
    """Token ids (batch, length) to logits."""

    def __init__(self, weights: Weights, *, checkpointed: bool) -> None:
        super().__init__()
        sizes = UNEVEN if weights == "uneven" else EVEN
        self.embed = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(
            Block(
                sizes,
                is_unused=weights == "unused" and index != 1,
                has_gate=weights == "uneven",
            )
            for index in range(BLOCKS)
        )
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        self.checkpointed = checkpointed
        # As small as usual: a tied head starts near uniform guesses.
        nn.init.normal_(self.embed.weight, std=0.3)
        if weights == "tied":
            self.head.weight = self.embed.weight
        if weights == "frozen":
            # Within a unit, a whole unit, and in the root.
            self.blocks[0].get_submodule("up").requires_grad_(requires_grad=False)
            self.blocks[1].requires_grad_(requires_grad=False)
            self.norm.requires_grad_(requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        # Each position differs by its neighbour: bf16's rounding averages out over many.
        x = x + x.roll(1, dims=1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def net(weights: Weights, *, checkpointed: bool = False) -> Net:
    """The same on every rank and in every run."""
    torch.manual_seed(7)
    return Net(weights, checkpointed=checkpointed)


def tokens_of(step: int, micro: int, data_rank: int) -> torch.Tensor:
    """The token ids of one rank and microbatch, (16, 8)."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + data_rank)
    return torch.randint(UNEVEN.vocab, (16, 8), generator=generator)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Averaged over all positions; what follows a token is a function of it."""
    following = (5 * tokens + 3) % UNEVEN.vocab
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), following.flatten())
