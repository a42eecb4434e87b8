"""A surface that a formula gives, learned with a loss and metrics of our own."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def surface(points: torch.Tensor) -> torch.Tensor:
    x, y = points.unbind(-1)
    return torch.sin(3 * x) * torch.cos(2 * y) + 0.5 * x * y


def data(samples: int = 4096, noise: float = 0.05) -> tuple[TensorDataset, TensorDataset]:
    """To train on, with noise; to validate on, without."""
    make = torch.Generator().manual_seed(11)
    points = 2 * torch.rand(samples + 512, 2, generator=make) - 1
    heights = surface(points)
    noisy = heights[:samples] + noise * torch.randn(samples, generator=make)
    return TensorDataset(points[:samples], noisy), TensorDataset(
        points[samples:], heights[samples:]
    )


class Mlp(nn.Module):
    """A mean and the logarithm of a standard deviation ``[samples, 2]`` for points ``[samples, 2]``."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 2)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        x = self.first(points)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


def likelihood(
    output: torch.Tensor,
    batch: tuple[torch.Tensor, torch.Tensor],
    least: float = 0.02,
) -> dict[str, torch.Tensor]:
    """The mean negative logarithm of the likelihood of a normal distribution, and two metrics."""
    mean, log_deviation = output.unbind(-1)
    deviation = log_deviation.exp() + least
    error = batch[1] - mean
    return {
        "loss": (0.5 * (error / deviation) ** 2 + deviation.log()).mean(),
        "absolute_error": error.abs().mean(),
        "within_0.1": (error.abs() < 0.1).float().mean(),
    }
