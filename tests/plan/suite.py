"""Models and layouts on which estimates are compared with what ranks really hold."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from fsdp_core import FSDPModule
from fsdp_core.plan.allocator_peak import HostPeak
from fsdp_core.plan.apply import apply_plan
from fsdp_core.plan.live_storage import LiveStorage
from fsdp_core.plan.model import (
    Conditions,
    Estimate,
    MeshPlan,
    ModelProfile,
    ShardDim,
    ShardingPlan,
    SharedMemory,
    TensorParallelPlan,
    Training,
    UnitPlan,
    estimate,
)
from fsdp_core.plan.optimizer_facts import optimizer_facts
from fsdp_core.plan.profiling import profile_model
from fsdp_core.plan.study import ModelUnderStudy
from services.worker.rank.models.decoder import Decoder
from services.worker.rank.process.host_memory import shared_bytes
from tests.engine.gang import RankContext

VOCAB, LENGTH = 512, 64
CLASSES, PIXELS = 10, 32

MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
                for _ in range(layers)
            )
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(x))
        return logits


class Residual(nn.Module):
    def __init__(self, channels: int, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = norm
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.second(functional.relu(self.norm(self.first(x))))
        return result


class ConvNet(nn.Module):
    def __init__(self, channels: int = 96, blocks: int = 3, *, by_batch: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(
            *(
                # On a CPU the statistics of a batch mix no dtypes.
                Residual(
                    channels, nn.BatchNorm2d(channels) if by_batch else nn.GroupNorm(8, channels)
                )
                for _ in range(blocks)
            )
        )
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = functional.max_pool2d(self.blocks(self.stem(x)), 2).mean((2, 3))
        logits: torch.Tensor = self.head(features)
        return logits


class Encoder(nn.Module):
    """PyTorch's own transformer layers, with dropout; embedding and head may be tied."""

    def __init__(self, width: int = 128, layers: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 3 * width, 0.1, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Adapted(nn.Module):
    """A frozen body whose blocks each have a small trained adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(256, 768, 4)
        self.body.requires_grad_(requires_grad=False)
        self.adapters = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, adapter in zip(self.body.layers, self.adapters, strict=True):
            x = layer(x) + adapter(x)
        logits: torch.Tensor = self.body.head(x)
        return logits


def decoder() -> Decoder:
    return Decoder(dim=192, layers=4, heads=4, vocab=VOCAB)


def next_token_loss(model: nn.Module, batch: int) -> torch.Tensor:
    tokens = torch.randint(VOCAB, (batch, LENGTH + 1))
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def image_loss(model: nn.Module, batch: int) -> torch.Tensor:
    return _class_loss(model, torch.randn(batch, 3, PIXELS, PIXELS))


def vector_loss(model: nn.Module, batch: int) -> torch.Tensor:
    return _class_loss(model, torch.randn(batch, 256))


def _class_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    labels = torch.randint(CLASSES, (len(x),))
    return functional.cross_entropy(model(x).float(), labels)


adamw = partial(torch.optim.AdamW, fused=True)
foreach = partial(torch.optim.AdamW, foreach=True)
one_by_one = partial(torch.optim.AdamW, foreach=False)
sgd = partial(torch.optim.SGD, lr=0.01)
momentum = partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=True)
decayed = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1, foreach=False)


@dataclass(frozen=True)
class Case:
    """A model, how it is sharded, and how it trains.

    Attributes:
        name: For the table.
        make: Builds the model.
        loss: Of a micro-batch.
        plan: Its mesh says how many ranks there are.
        optimizer: Over the sharded parameters.
        micro_batch: Samples.
        accumulation: Micro-batches in a step.
    """

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    plan: ShardingPlan
    optimizer: MakeOptimizer = adamw
    micro_batch: int = 4
    accumulation: int = 1


SPLIT = (
    TensorParallelPlan(
        tuple(
            f"blocks.*.{name}"
            for name in (
                "attention.query",
                "attention.key",
                "attention.value",
                "feed_forward.gate",
                "feed_forward.up",
            )
        ),
        "colwise",
    ),
    TensorParallelPlan(("blocks.*.attention.out", "blocks.*.feed_forward.down"), "rowwise"),
)
TWO, FOUR = MeshPlan(dp_shard=2), MeshPlan(dp_shard=4)
BLOCKS = (UnitPlan(("blocks.*",)),)
LAYERS = (UnitPlan(("layers.*",)),)
ALL_CASES = (
    Case("decoder", decoder, next_token_loss, ShardingPlan(TWO, BLOCKS)),
    Case(
        "decoder, foreach AdamW, long batch",
        decoder,
        next_token_loss,
        ShardingPlan(TWO, BLOCKS),
        foreach,
        micro_batch=8,
    ),
    Case(
        "decoder, bf16, reduced in fp32",
        decoder,
        next_token_loss,
        ShardingPlan(TWO, BLOCKS, param_dtype="bf16", reduce_dtype="fp32"),
    ),
    Case(
        "decoder, bf16, head and norm a unit",
        decoder,
        next_token_loss,
        ShardingPlan(
            FOUR,
            (UnitPlan(("blocks.*",)), UnitPlan(("embedding",)), UnitPlan(("norm", "head"))),
            param_dtype="bf16",
        ),
        one_by_one,
    ),
    Case(
        "decoder, recomputed blocks",
        decoder,
        next_token_loss,
        ShardingPlan(TWO, (UnitPlan(("blocks.*",), recompute=True),)),
        micro_batch=8,
    ),
    Case("decoder, one unit", decoder, next_token_loss, ShardingPlan(TWO), sgd),
    Case(
        "decoder, kept whole after forward",
        decoder,
        next_token_loss,
        ShardingPlan(FOUR, (UnitPlan(("blocks.*",), reshard_after_forward=False),)),
    ),
    Case(
        "decoder, resharded to 2 of 4",
        decoder,
        next_token_loss,
        ShardingPlan(FOUR, (UnitPlan(("blocks.*",), reshard_after_forward=2),)),
    ),
    Case(
        "decoder, prefetch 2, accumulated",
        decoder,
        next_token_loss,
        ShardingPlan(
            FOUR,
            (UnitPlan(("blocks.*",), prefetch=2),),
            param_dtype="bf16",
            reduce_dtype="fp32",
        ),
        accumulation=3,
    ),
    Case(
        "decoder, HSDP 2 x 2",
        decoder,
        next_token_loss,
        ShardingPlan(
            MeshPlan(dp_replicate=2, dp_shard=2), BLOCKS, param_dtype="bf16", reduce_dtype="fp32"
        ),
        foreach,
    ),
    Case(
        "decoder, TP 2 x 2",
        decoder,
        next_token_loss,
        ShardingPlan(MeshPlan(dp_shard=2, tp=2), BLOCKS, tensor_parallel=SPLIT),
        foreach,
    ),
    Case("encoder", Encoder, next_token_loss, ShardingPlan(FOUR, LAYERS), momentum),
    Case(
        "encoder, tied within the root",
        partial(Encoder, tied=True),
        next_token_loss,
        ShardingPlan(TWO, LAYERS),
    ),
    Case(
        "encoder, tied over two units",
        partial(Encoder, tied=True),
        next_token_loss,
        ShardingPlan(TWO, (*LAYERS, UnitPlan(("embed",)), UnitPlan(("head",)))),
        decayed,
    ),
    Case(
        "MLP",
        partial(Mlp, 256, 768, 6),
        vector_loss,
        ShardingPlan(TWO, (UnitPlan(("layers.*",)),)),
        momentum,
        micro_batch=128,
    ),
    Case(
        "MLP, offloaded, sharded on dim 1",
        partial(Mlp, 256, 768, 6),
        vector_loss,
        ShardingPlan(
            FOUR, (UnitPlan(("layers.*",), offload=True, shard_dims=(ShardDim("*.weight", 1),)),)
        ),
        micro_batch=128,
    ),
    Case(
        "frozen body",
        Adapted,
        vector_loss,
        ShardingPlan(TWO, (UnitPlan(("body.layers.*",)), UnitPlan(("adapters.*",)))),
        micro_batch=256,
    ),
    Case(
        "convnet",
        ConvNet,
        image_loss,
        ShardingPlan(TWO, BLOCKS),
        momentum,
        micro_batch=8,
    ),
    Case(
        "convnet, bf16, recomputed",
        partial(ConvNet, by_batch=False),
        image_loss,
        ShardingPlan(
            FOUR,
            (UnitPlan(("blocks.*",), recompute=True),),
            param_dtype="bf16",
            reduce_dtype="fp32",
        ),
        micro_batch=8,
    ),
)
CASES = {case.name: case for case in ALL_CASES}
WAYS_TO_SHARE: tuple[SharedMemory, ...] = ("copy", "storage")
SHARED = {
    f"{name}, {way}": replace(
        CASES[name],
        name=f"{name}, {way}",
        plan=replace(CASES[name].plan, shared_memory=way),
    )
    for name in (
        "decoder",
        "decoder, bf16, reduced in fp32",
        "encoder, tied over two units",
        "MLP",
        "frozen body",
        "decoder, kept whole after forward",
        "decoder, prefetch 2, accumulated",
        "decoder, HSDP 2 x 2",
        "decoder, TP 2 x 2",
        "MLP, offloaded, sharded on dim 1",
    )
    for way in WAYS_TO_SHARE
}
STEPS = 4


class Held(NamedTuple):
    """The most bytes of a rank after the first step.

    Attributes:
        tensors: Of live storages; views of memory that ranks share count, too.
        allocated: That the allocator gave out, and this rank's part of memory that ranks share.
    """

    tensors: int
    allocated: int


def measured(ctx: RankContext, name: str) -> Held:
    """What one of the cases here holds."""
    return held_by(ctx, {**CASES, **SHARED}[name])


def held_by(ctx: RankContext, case: Case) -> Held:
    """Trains for some steps, after one that fills what libraries of kernels keep for themselves."""
    _train_for(ctx, case, 1)
    return _train_for(ctx, case, STEPS)


def _train_for(ctx: RankContext, case: Case, steps: int) -> Held:
    torch.manual_seed(ctx.rank)
    gc.collect()
    allocator, resting, peaks, tensors = HostPeak(), 0, [], []
    allocator.begin()
    with LiveStorage() as live:
        model = case.make()
        apply_plan(model, case.plan, _mesh(ctx, case.plan.mesh))
        optimizer = case.optimizer(p for p in model.parameters() if p.requires_grad)
        for step in range(steps):
            if step:
                live.forget_peak()
            resting += allocator.held()
            allocator.begin()
            _train(case, model, optimizer)
            peaks.append(resting + allocator.most())
            tensors.append(live.peak)
        # It grows alone, and not any more after the first steps.
        shared = shared_bytes()
    allocator.end()
    # The lowest: threads of gloo free late what they have where they wait for a processor.
    return Held(min(tensors[1:], default=0), min(peaks[1:], default=0) + shared)


def _train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert isinstance(model, FSDPModule)
    for number in range(1, case.accumulation + 1):
        model.set_requires_gradient_sync(number == case.accumulation)
        torch.autograd.backward(case.loss(model, case.micro_batch))
    optimizer.step()
    optimizer.zero_grad()


def _mesh(ctx: RankContext, sizes: MeshPlan) -> DeviceMesh:
    axes = {"dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard, "tp": sizes.tp}
    axes = {axis: size for axis, size in axes.items() if size > 1 or axis == "dp_shard"}
    return init_device_mesh(ctx.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def estimated(case: Case, *, only_tensors: bool = False) -> Estimate:
    """The same from a profile of the model and the plan alone."""
    plan = case.plan
    needed = {
        Conditions(
            unit.param_dtype or plan.param_dtype, plan.output_dtype, unit.recompute, plan.mesh.tp
        )
        for unit in (*plan.units, UnitPlan(("",)))
    }
    study = ModelUnderStudy(case.make, case.loss, tensor_parallel=plan.tensor_parallel)
    profile = _profile(study, tuple(sorted(needed, key=str)))
    facts = optimizer_facts(case.optimizer)
    return estimate(
        profile,
        plan,
        Training(case.micro_batch, case.accumulation, facts),
        only_tensors=only_tensors,
    )


@cache
def _profile(study: ModelUnderStudy, conditions: tuple[Conditions, ...]) -> ModelProfile:
    return profile_model(study, conditions)
