"""Models as a user might get them wrong."""

import torch
from torch import nn


class RaisesInForward(nn.Module):
    """Its second rank cannot compute."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.head = nn.Linear(16, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() == 1:
            raise ValueError("the user's model is wrong in its own way")
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits
