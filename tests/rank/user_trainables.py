"""Trainables of users, named in specs as ``tests.rank.user_trainables:…``."""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshloom import DataSource, Trainable
from meshloom.data import Batch
from meshloom.trainable import Context, Loss, Models
from tests.rank.user_vision import Classifier

NOISE, POINT = 4, 2
VOCAB = 11


class Points(DataSource):
    """Points on a circle, and noise to make others of."""

    @property
    def digest(self) -> str:
        return "points"

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        angles = torch.tensor([(step * 12 + i) * 0.7 for i in indices])
        noise = [[math.sin(step * 3 + i * 5 + k) for k in range(NOISE)] for i in indices]
        return {"real": torch.stack([angles.cos(), angles.sin()], 1), "noise": torch.tensor(noise)}

    def validation(self) -> Sequence[Batch]:
        return [self.batch(1_000, range(6))]


def blocks(width: int, into: int) -> nn.Sequential:
    layers = [nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, into)]
    return nn.Sequential(*layers)


class Gan(Trainable):
    """Two models, two optimizers, two losses, a state with tensors of both kinds."""

    steps_itself = True

    def __init__(self, rate: float = 0.01) -> None:
        self._rate = rate
        self._seen = 0
        self._means = torch.zeros(2)
        self._slow: dict[str, torch.Tensor] = {}

    def build_model(self) -> Models:
        return {"generator": blocks(NOISE, POINT), "discriminator": blocks(POINT, 1)}

    def build_optimizer(self, models: Models) -> Mapping[str, torch.optim.Optimizer]:
        generator = models["generator"].named_parameters()
        self._slow = {name: each.detach().clone() for name, each in generator}
        return {
            "generator": torch.optim.Adam(models["generator"].parameters(), lr=self._rate),
            "discriminator": torch.optim.SGD(
                models["discriminator"].parameters(), lr=self._rate, momentum=0.9
            ),
        }

    def build_data(self) -> object:
        return Points()

    def train_batch(self, batch: Batch, context: Context) -> Loss:
        generator, discriminator = context.models["generator"], context.models["discriminator"]
        fake = generator(batch["noise"])
        against = -(
            functional.logsigmoid(discriminator(batch["real"])).mean()
            + functional.logsigmoid(-discriminator(fake.detach())).mean()
        )
        context.backward(against, into="discriminator")
        context.step("discriminator")
        loss = -functional.logsigmoid(discriminator(fake)).mean()
        context.backward(loss, into="generator")
        context.step("generator")
        if context.is_training:
            self._remember(generator, context.step_number)
        return {"loss": loss, "against": against}

    def _remember(self, generator: nn.Module, step: int) -> None:
        self._seen += 1
        self._means = self._means * 0.5 + step
        for name, each in generator.named_parameters():
            self._slow[name].lerp_(each.detach(), 0.5)

    def state_dict(self) -> Mapping[str, Any]:
        return {"seen": self._seen, "means": self._means, "slow": self._slow, "tags": ["a", None]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state["tags"] == ["a", None]
        assert all(isinstance(each, DTensor) for each in state["slow"].values())
        self._seen, self._means, self._slow = state["seen"], state["means"], state["slow"]


class Alone(Trainable):
    """Leaves out all that may be left out."""

    def build_model(self) -> nn.Module:
        return Classifier()


class Remembering(Alone):
    """Keeps how bright the pictures of its own rank were, and how many, of which its loss depends."""

    def __init__(self) -> None:
        self._bright = torch.zeros(())
        self._all = [torch.ones(()) for _ in range(1 + dist.get_rank())]
        self._seen = 0

    def train_batch(self, batch: Batch, context: Context) -> Loss:
        self._seen += len(batch[0]) * (1 + dist.get_rank())
        self._bright = self._bright * 0.5 + batch[0].mean()
        self._all.append(self._bright)
        loss = context.loss(batch)["loss"]
        return {"loss": loss * (1 + self._bright) + loss * sum(self._all) / self._seen}

    def state_dict(self) -> Mapping[str, Any]:
        return {"bright": self._bright, "all": self._all, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._bright, self._all, self._seen = state["bright"], state["all"], state["seen"]


class Dependent(Gan):
    """Needs a server to go on, which is away."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise ConnectionRefusedError(f"the server of {sorted(state)} is away")


class Doubled(Alone):
    """Makes two passes of a batch, and has an optimizer of its own."""

    def build_optimizer(self, models: Models) -> torch.optim.Optimizer:
        return torch.optim.Adam(models["model"].parameters(), lr=0.01)

    def train_batch(self, batch: Batch, context: Context) -> Loss:
        again = context.models["model"](batch[0]).square().mean()
        return {"loss": context.loss(batch)["loss"] + again, "again": again}


class Spoilt(Alone):
    """Its gradients overflow at step 3, on one rank alone."""

    def train_batch(self, batch: Batch, context: Context) -> Loss:
        found = dict(context.loss(batch))
        if context.step_number == 3 and dist.get_rank() == dist.get_world_size() - 1:
            steep = found["loss"] * 1e36
            found["loss"] = found["loss"] + (steep - steep.detach())
        return found


class Shrinking(Alone):
    """Shrinks what it trains before each pass."""

    def train_batch(self, batch: Batch, context: Context) -> Loss:
        for parameter in context.models["model"].parameters():
            parameter.data.mul_(0.9)
        return context.loss(batch)


class Accumulating(Alone):
    """Steps with the gradients of two steps, whenever the number of one is even."""

    steps_itself = True

    def train_batch(self, batch: Batch, context: Context) -> Loss:
        loss = context.loss(batch)
        context.backward(loss["loss"] / 2)
        if context.step_number % 2 == 0:
            context.step()
        return loss


class Slowing(Alone):
    """Updates by its own optimizer, with a rate that falls with each update, as PyTorch's schedulers have it."""

    steps_itself = True

    def build_optimizer(self, models: Models) -> torch.optim.Optimizer:
        self._optimizer = torch.optim.SGD(models["model"].parameters(), lr=0.1)
        return self._optimizer

    def train_batch(self, batch: Batch, context: Context) -> Loss:
        loss = context.loss(batch)
        context.backward(loss["loss"])
        if context.is_training:
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._optimizer.param_groups[0]["lr"] *= 0.5
        return loss


class Stepping(Alone):
    """Steps, and does not say so."""

    def train_batch(self, batch: Batch, context: Context) -> Loss:
        loss = context.loss(batch)
        context.step()
        return loss


class Masked(DataSource):
    """Tokens of which as many count as the place of the sample says; of some none."""

    @property
    def digest(self) -> str:
        return "masked"

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        rows = [[(step * 3 + i * 7 + k * k) % VOCAB for k in range(9)] for i in indices]
        tokens = torch.tensor(rows)
        counted = torch.tensor([(i * 5 + step) % 9 if i % 12 > 1 else 0 for i in indices])
        labels = tokens.masked_fill(torch.arange(9) > counted[:, None], -100)
        return {"input_ids": tokens, "labels": labels}

    def validation(self) -> Sequence[Batch]:
        return [self.batch(99, [0, 1]), self.batch(99, range(2, 7))]


class AllMasked(Masked):
    """The same tokens, none of which counts."""

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        tokens = super().batch(step, indices)["input_ids"]
        return {"input_ids": tokens, "labels": torch.full_like(tokens, -100)}


class Whole(Masked):
    """The same tokens, all of which count."""

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        tokens = super().batch(step, indices)["input_ids"]
        return {"input_ids": tokens, "labels": tokens.clone()}


class Unmasked(Masked):
    """The same again, without labels."""

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        return {"input_ids": super().batch(step, indices)["input_ids"]}


class TokenLoss(nn.Module):
    """Has the mean over its labels in its output, as models of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU())])
        self.head = nn.Linear(8, VOCAB)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> SimpleNamespace:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        targets = (input_ids if labels is None else labels)[:, 1:]
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


class Undetermined(TokenLoss):
    """Computes with an operator that sums in any order."""

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> SimpleNamespace:
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
        return super().forward(input_ids, labels)
