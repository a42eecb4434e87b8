"""Handwritten digits from scikit-learn: a plain data set and a plain model, as PyTorch users write them."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset


class Digits(Dataset):
    """Samples ``(picture [1, 8, 8], class)``; one in five is kept for validation."""

    def __init__(self, validation: bool = False) -> None:
        digits = load_digits()
        chosen = (torch.arange(len(digits.target)) % 5 == 0) == validation
        self.pictures = torch.tensor(digits.images, dtype=torch.float32)[chosen, None] / 16
        self.classes = torch.tensor(digits.target)[chosen]

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pictures[index], self.classes[index]


def data() -> dict[str, Dataset]:
    return {"train": Digits(), "validation": Digits(validation=True)}


class ConvNet(nn.Module):
    """Logits ``[samples, 10]`` of pictures ``[samples, 1, 8, 8]``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width * 16, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(pictures))
