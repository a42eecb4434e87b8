"""Models that were not looked at while estimates were made: convolutions, recurrence, mixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fsdp_core.plan.model import MeshPlan, ShardingPlan, UnitPlan
from tests.engine.gang import RankContext
from tests.plan.suite import (
    CLASSES,
    FOUR,
    LAYERS,
    TWO,
    VOCAB,
    Case,
    Held,
    Mlp,
    foreach,
    held_by,
    image_loss,
    momentum,
    next_token_loss,
    sgd,
    vector_loss,
)

ONE = MeshPlan()


class Recurrent(nn.Module):
    """A language model on LSTM or GRU layers, a unit each."""

    class Layer(nn.Module):
        def __init__(self, kind: Callable[..., nn.Module], width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.inner = kind(width, width, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = x + self.inner(self.norm(x))[0]
            return result

    def __init__(self, kind: Callable[..., nn.Module], width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(self.Layer(kind, width) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Towers(nn.Module):
    """Two encoders whose pairs are told apart within the batch."""

    def __init__(self, width: int = 256, out: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, out)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (functional.normalize(layer(x), dim=-1) for layer in self.layers)
        return 10 * first @ second.T


def in_batch_loss(model: nn.Module, batch: int) -> torch.Tensor:
    scores = model(torch.randn(batch, 256))
    return functional.cross_entropy(scores, torch.arange(batch))


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 192, layers: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.place = nn.Parameter(torch.zeros(1, 64, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x.mean(1))
        return logits


class CheckpointedMlp(Mlp):
    """Computes all its layers again by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layers, x, use_reentrant=False)
        logits: torch.Tensor = self.head(x)
        return logits


class Bottleneck(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.past = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.past(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), nn.BatchNorm2d(64), nn.ReLU())
        widths = [64, 64, 128, 128, 256, 256]
        self.layers = nn.ModuleList(
            Bottleneck(inside, outside, 1 + (inside != outside))
            for inside, outside in zip([64, *widths], widths, strict=False)
        )
        self.head = nn.Linear(256, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.stem(x), 2)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


class UNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            self._double(inside, outside)
            for inside, outside in zip([3, *sizes], sizes, strict=False)
        )
        self.rise = nn.ModuleList(
            nn.ConvTranspose2d(size, size // 2, 2, 2) for size in sizes[:0:-1]
        )
        self.up = nn.ModuleList(self._double(size, size // 2) for size in sizes[:0:-1])
        self.head = nn.Conv2d(width, CLASSES, 1)

    @staticmethod
    def _double(inside: int, outside: int) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv2d(inside, outside, 3, 1, 1), nn.BatchNorm2d(outside), nn.ReLU()),
            *(nn.Conv2d(outside, outside, 3, 1, 1), nn.BatchNorm2d(outside), nn.ReLU()),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for place, down in enumerate(self.down):
            x = down(functional.max_pool2d(x, 2) if place else x)
            kept.append(x)
        for rise, up, beside in zip(self.rise, self.up, kept[-2::-1], strict=True):
            x = up(torch.cat((rise(x), beside), 1))
        logits: torch.Tensor = self.head(x)
        return logits.mean((2, 3))


class Volumes(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv3d(1, width, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv3d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU())
            for _ in range(3)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x.mean((2, 3, 4)))
        return logits


def volume_loss(model: nn.Module, batch: int) -> torch.Tensor:
    logits = model(torch.randn(batch, 1, 12, 24, 24))
    return functional.cross_entropy(logits, torch.randint(CLASSES, (batch,)))


class Expert(nn.Module):
    """A mixture in which each expert takes the places that it wants most."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.rise = nn.Parameter(torch.randn(experts, width, 2 * width) / 16)
        self.fall = nn.Parameter(torch.randn(experts, 2 * width, width) / 16)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.norm(x).flatten(0, 1)
        share = self.gate(places).softmax(-1).T
        weight, chosen = share.topk(len(places) // len(share), -1)
        taken = places[chosen]
        made = torch.bmm(functional.gelu(torch.bmm(taken, self.rise)), self.fall)
        made = made * weight.unsqueeze(-1)
        summed = torch.zeros_like(places).index_add(0, chosen.flatten(), made.flatten(0, 1))
        return x + summed.view_as(x)


class Mixture(nn.Module):
    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Expert(width, 8) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Mixer(nn.Module):
    """Of places, then of channels; no attention."""

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.places = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            self.channels = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.places(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
            mixed: torch.Tensor = x + self.channels(self.norms[1](x))
            return mixed

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.layers = nn.ModuleList(self.Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x.mean(1))
        return logits


class Wave(nn.Module):
    """Gated, dilated convolutions in one dimension."""

    class Layer(nn.Module):
        def __init__(self, width: int, dilation: int) -> None:
            super().__init__()
            self.gated = nn.Conv1d(width, 2 * width, 3, padding=dilation, dilation=dilation)
            self.out = nn.Conv1d(width, width, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            level, gate = self.gated(x).chunk(2, 1)
            out: torch.Tensor = x + self.out(level.tanh() * gate.sigmoid())
            return out

    def __init__(self, width: int = 128, layers: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(self.Layer(width, 2**place) for place in range(layers))
        self.head = nn.Conv1d(width, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x).mean(2)
        return logits


def wave_loss(model: nn.Module, batch: int) -> torch.Tensor:
    logits = model(torch.randn(batch, 1, 1024))
    return functional.cross_entropy(logits, torch.randint(CLASSES, (batch,)))


class SeqToSeq(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 3 * width, 0.1, batch_first=True) for _ in range(2)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, 3 * width, 0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        memory = x = self.embed(tokens)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        logits: torch.Tensor = self.head(x)
        return logits


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv:2302.06675), its moment in bf16."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # none is given
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                moment = self.state[param].setdefault(
                    "moment", torch.zeros_like(param, dtype=torch.bfloat16)
                )
                update = moment.float().mul_(0.9).add_(param.grad, alpha=0.1).sign_()
                param.add_(update, alpha=-group["lr"])
                moment.mul_(0.99).add_(param.grad, alpha=0.01)


class ByRows(torch.optim.Optimizer):
    """Keeps a moment of each row and each column of a matrix, and of each element of a vector."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # none is given
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                square = param.grad.square()
                for dim in range(param.ndim):
                    others = [other for other in range(param.ndim) if other != dim]
                    seen = square.mean(others, keepdim=True) if others else square
                    self.state[param].setdefault(dim, torch.zeros_like(seen)).lerp_(seen, 0.1)
                scale = torch.ones_like(param)
                for dim in range(param.ndim):
                    scale.mul_(self.state[param][dim])
                param.addcdiv_(param.grad, scale.sqrt_().add_(1e-3), value=-group["lr"])


deep = partial(Mlp, 256, 1024, 12)
CLIPPED = ShardingPlan(TWO, LAYERS)
WIDE_CASES = (
    Case("two towers, one batch", Towers, in_batch_loss, CLIPPED, micro_batch=1024),
    Case("LSTM, one rank", partial(Recurrent, nn.LSTM), next_token_loss, ShardingPlan(ONE, LAYERS)),
    Case("LSTM", partial(Recurrent, nn.LSTM), next_token_loss, CLIPPED, micro_batch=16),
    Case(
        "LSTM, one unit",
        partial(Recurrent, nn.LSTM),
        next_token_loss,
        ShardingPlan(TWO),
        micro_batch=8,
    ),
    Case("GRU", partial(Recurrent, nn.GRU), next_token_loss, CLIPPED, micro_batch=16),
    Case("Elman", partial(Recurrent, nn.RNN), next_token_loss, CLIPPED, micro_batch=16),
    Case(
        "ViT, bf16, reduced in fp32, one unit",
        VisionTransformer,
        image_loss,
        ShardingPlan(TWO, param_dtype="bf16", reduce_dtype="fp32"),
        foreach,
        micro_batch=16,
    ),
    Case("ViT", VisionTransformer, image_loss, CLIPPED, micro_batch=16),
    Case(
        "own checkpoint over all layers",
        partial(CheckpointedMlp, 256, 1024, 6),
        vector_loss,
        ShardingPlan(FOUR, (UnitPlan(("layers.*",)),)),
        micro_batch=256,
    ),
    Case("Lion, bf16 moment, one rank", deep, vector_loss, ShardingPlan(ONE, LAYERS), Lion),
    Case("Lion, bf16 moment", deep, vector_loss, CLIPPED, Lion),
    Case("moments by shape", deep, vector_loss, CLIPPED, ByRows),
    Case("deep MLP, one unit", deep, vector_loss, ShardingPlan(TWO), micro_batch=64),
    Case("deep MLP, SGD", deep, vector_loss, ShardingPlan(FOUR, LAYERS), sgd, micro_batch=64),
    Case(
        "ResNet, HSDP",
        ResNet,
        image_loss,
        ShardingPlan(MeshPlan(dp_replicate=2, dp_shard=2), LAYERS),
        momentum,
        micro_batch=8,
    ),
    Case(
        "ResNet, kept",
        ResNet,
        image_loss,
        ShardingPlan(TWO, (UnitPlan(("layers.*",), reshard_after_forward=False),)),
        momentum,
        micro_batch=8,
    ),
    Case(
        "U-Net, batch norm",
        UNet,
        image_loss,
        ShardingPlan(TWO, (UnitPlan(("down.*",)), UnitPlan(("up.*",)))),
        micro_batch=8,
    ),
    Case("3-D convolutions", Volumes, volume_loss, CLIPPED, micro_batch=4),
    Case("mixture of experts", Mixture, next_token_loss, CLIPPED, micro_batch=16),
    Case("mixer", Mixer, image_loss, CLIPPED, micro_batch=32),
    Case(
        "mixer, bf16",
        Mixer,
        image_loss,
        ShardingPlan(TWO, LAYERS, param_dtype="bf16", reduce_dtype="fp32"),
        micro_batch=32,
    ),
    Case("WaveNet", Wave, wave_loss, CLIPPED, micro_batch=8),
    Case(
        "sequence to sequence",
        SeqToSeq,
        next_token_loss,
        ShardingPlan(TWO, (UnitPlan(("encoder.*",)), UnitPlan(("decoder.*",)))),
        micro_batch=16,
    ),
)
WIDE = {case.name: case for case in WIDE_CASES}


def measured_wide(ctx: RankContext, name: str) -> Held:
    """As `tests.plan.suite.measured`."""
    return held_by(ctx, WIDE[name])
