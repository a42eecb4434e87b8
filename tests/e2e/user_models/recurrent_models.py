"""A language model whose operators take memory within themselves."""

import torch
from torch import nn


class Recurrent(nn.Module):
    """Predicts the next byte by an LSTM of several layers."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.inner = nn.LSTM(dim, dim, layers, batch_first=True)
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of (batch, position, byte)."""
        logits: torch.Tensor = self.head(self.inner(self.embed(tokens))[0])
        return logits
