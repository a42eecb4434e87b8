"""Small models of many kinds, for benchmarks that must not depend on what a model is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from services.worker.rank.models.decoder import Decoder
from tests.plan.suite import ConvNet, Mlp

CLASSES = 10
LENGTH, VOCAB = 48, 512


@dataclass(frozen=True)
class Varied:
    """A model, and the loss of a micro-batch of so many samples."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    batch: int


class Digits(nn.Sequential):
    """A convnet for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES)),
        )


class _Level(nn.Module):
    def __init__(self, outside: int, inside: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(outside, inside, 3, padding=1), nn.GroupNorm(4, inside), nn.SiLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result


class UNet(nn.Module):
    """Two levels down and up again."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.down = nn.ModuleList((_Level(3, width), _Level(width, 2 * width)))
        self.middle = _Level(2 * width, 4 * width)
        self.up = nn.ModuleList((_Level(6 * width, 2 * width), _Level(3 * width, width)))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """An image as large as `x`."""
        kept = []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = level(torch.cat((functional.interpolate(x, scale_factor=2.0), kept.pop()), 1))
        image: torch.Tensor = self.head(x)
        return image


class ViT(nn.Module):
    """Patches of an image through PyTorch's own encoder layers."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.layers = nn.ModuleList(_encoder(width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x.mean(1))
        return logits


def _encoder(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)


class Lstm(nn.Module):
    """Two layers over embedded tokens."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return logits


class Translator(nn.Module):
    """An encoder, and a decoder that attends to it."""

    def __init__(self, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.encoder = nn.ModuleList(_encoder(width) for _ in range(layers))
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the same tokens."""
        seen = x = self.embed(tokens)
        for layer in self.encoder:
            seen = layer(seen)
        for layer in self.decoder:
            x = layer(x, seen)
        logits: torch.Tensor = self.head(x)
        return logits


class _Experts(nn.Module):
    """Every expert computes all, and a gate weighs what they say."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm(x)
        said = torch.stack([expert(inner) for expert in self.experts], -1)
        weighed: torch.Tensor = x + (said * self.gate(inner).softmax(-1).unsqueeze(-2)).sum(-1)
        return weighed


class _Mixing(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.places = nn.Sequential(
            nn.Linear(length, 2 * length), nn.GELU(), nn.Linear(2 * length, length)
        )
        self.channels = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.places(x.transpose(1, 2)).transpose(1, 2)
        mixed: torch.Tensor = x + self.channels(x)
        return mixed


class _Dilated(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, 2 * width, 3, padding=dilation, dilation=dilation)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        signal, gate = self.conv(x).chunk(2, 1)
        result: torch.Tensor = x + self.out(signal.tanh() * gate.sigmoid())
        return result


class WaveNet(nn.Module):
    """Dilated convolutions over a signal."""

    def __init__(self, width: int = 48, layers: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(_Dilated(width, 2**n) for n in range(layers))
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A signal as long as `x`."""
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        signal: torch.Tensor = self.head(x)
        return signal


class Words(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(
        self, blocks: Callable[[], nn.Module], layers: int, width: int, vocab: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(blocks() for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Towers(nn.Module):
    """Two maps whose outputs are compared over the batch."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(*(_Residual(width) for _ in range(3)), nn.Linear(width, 64))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """How alike each pair is."""
        alike: torch.Tensor = self.left(x) @ self.right(x).T
        return alike


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.body(x)
        return result


def _same(model: nn.Module, size: int, shape: tuple[int, ...]) -> torch.Tensor:
    x = torch.randn(size, *shape)
    return functional.mse_loss(model(x), x)


def _classes(model: nn.Module, size: int, shape: tuple[int, ...]) -> torch.Tensor:
    labels = torch.randint(CLASSES, (size,))
    return functional.cross_entropy(model(torch.randn(size, *shape)), labels)


def _words(model: nn.Module, size: int, vocab: int = VOCAB) -> torch.Tensor:
    tokens = torch.randint(vocab, (size, LENGTH + 1))
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _pairs(model: nn.Module, size: int) -> torch.Tensor:
    alike = model(torch.randn(size, 256))
    return functional.cross_entropy(alike, torch.arange(size))


_IMAGE = (3, 32, 32)
VARIED: dict[str, Varied] = {
    "digits": Varied(Digits, partial(_classes, shape=(1, 8, 8)), 32),
    "mlp": Varied(partial(Mlp, 256, 768, 6), partial(_classes, shape=(256,)), 64),
    "resnet": Varied(partial(ConvNet, 48), partial(_classes, shape=_IMAGE), 16),
    "unet": Varied(UNet, partial(_same, shape=_IMAGE), 16),
    "vit": Varied(ViT, partial(_classes, shape=_IMAGE), 16),
    "lstm": Varied(Lstm, _words, 16),
    "translator": Varied(Translator, _words, 16),
    "experts": Varied(
        partial(Words, partial(_Experts, 96, 4), 3, 96, VOCAB), partial(_words, vocab=VOCAB), 16
    ),
    "mixer": Varied(
        partial(Words, partial(_Mixing, LENGTH, 96), 4, 96, VOCAB), partial(_words, vocab=VOCAB), 16
    ),
    "wavenet": Varied(WaveNet, partial(_same, shape=(1, 512)), 16),
    "vocabulary": Varied(
        partial(Words, partial(_encoder, 96), 2, 96, 8192), partial(_words, vocab=8192), 8
    ),
    "decoder": Varied(partial(Decoder, dim=192, layers=4, heads=4, vocab=VOCAB), _words, 16),
    "towers": Varied(Towers, _pairs, 256),
}
