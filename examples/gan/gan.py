"""Two networks against each other, with an optimizer each: what parts by name do not reach."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from meshloom import Trainable

NOISE = 8


class Ring(Dataset):
    """Points of eight small clusters on a circle, each with noise to make another point of."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        # What is random in a sample is the same again after a restart, on however many ranks.
        angle = 2 * math.pi * (index % 8) / 8
        centre = torch.tensor([math.cos(angle), math.sin(angle)])
        return {"real": centre + 0.05 * torch.randn(2), "noise": torch.randn(NOISE)}


def layers(into: int, out: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(into, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, out),
    )


class Gan(Trainable):
    steps_itself = True  # train_batch calls context.backward and context.step

    def __init__(self, width: int = 64, rate: float = 1e-3) -> None:
        self.width = width
        self.rate = rate

    def build_model(self):
        return {
            "generator": layers(NOISE, 2, self.width),
            "discriminator": layers(2, 1, self.width),
        }

    def build_optimizer(self, models):
        return {
            name: torch.optim.Adam(model.parameters(), lr=self.rate, betas=(0.5, 0.9))
            for name, model in models.items()
        }

    def build_data(self):
        return Ring(4096), Ring(512)

    def train_batch(self, batch, context):
        generator, discriminator = context.models["generator"], context.models["discriminator"]
        made = generator(batch["noise"])
        against = (
            F.softplus(-discriminator(batch["real"])) + F.softplus(discriminator(made.detach()))
        ).mean()
        context.backward(against, into="discriminator")
        context.step("discriminator")
        loss = F.softplus(-discriminator(made)).mean()
        context.backward(loss, into="generator")  # through the discriminator, which does not learn
        context.step("generator")
        return {"loss": loss, "against": against}

    def eval_batch(self, batch, context):
        """How far the made points are from the circle, and how well they are spread along it."""
        made = context.models["generator"](batch["noise"])
        distance = (made.norm(dim=1) - 1).abs().mean()
        return {"loss": distance, "off_centre": made.mean(dim=0).norm()}
