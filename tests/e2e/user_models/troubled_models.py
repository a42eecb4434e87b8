"""Models of which one rank gets into trouble in its own way."""

import torch
from torch import nn

VOCAB = 256


class _Small(nn.Module):
    """Enough of a language model to train."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.head = nn.Linear(dim, VOCAB)
        self.passes = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.training and torch.distributed.get_rank() == 1:
            self.trouble()
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits

    def trouble(self) -> None:
        """What is wrong with rank 1."""


class SlowOnRankOne(_Small):
    """Rank 1 computes far more than the other."""

    def trouble(self) -> None:
        work = torch.ones(384, 384)
        for _ in range(12):
            work = work @ work / 384
