"""Equal to PyTorch's fully_shard, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import MixedPrecisionPolicy, fully_shard
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import decoder, loss_of, tokens_of
from tests.engine.sharded import unit
from tests.engine.versus import engines

pytestmark = pytest.mark.ranks

Shard = Callable[[nn.Module | list[nn.Module], torch.dtype | None], object]


@dataclass(frozen=True)
class Case:
    """One way of training, to be done by both engines."""

    name: str
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    reshard: bool | None = None
    recompute: Literal["no", "block", "all"] = "no"
    grouped: bool = False
    microbatches: int = 1
    forwards: int = 1
    sync: Literal["every", "last"] = "every"
    packs_as_reference: bool = False
    hold_after_backward: bool = False
    explicit_prefetch: bool = False
    steps: int = 3


@dataclass
class Trace:
    """Everything that must agree."""

    losses: list[torch.Tensor] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    params: dict[str, torch.Tensor] = field(default_factory=dict)


CASES = [
    Case("fp32", steps=10),
    Case("fp32, reshard", reshard=True),
    Case("fp32, keep", reshard=False),
    Case("bf16 params, fp32 reduce", torch.bfloat16, torch.float32, steps=10),
    Case("bf16 all, fp32 output", torch.bfloat16, output_dtype=torch.float32),
    Case("fp16 reduce", None, torch.float16),
    Case("recompute", recompute="block"),
    Case("recompute, bf16", torch.bfloat16, torch.float32, recompute="block"),
    Case("recompute of several units at once", recompute="all"),
    Case("grouped modules", grouped=True),
    Case("two forwards before backward", forwards=2),
    Case("two forwards, recompute", forwards=2, recompute="block"),
    Case("two forwards, recompute of several", forwards=2, recompute="all"),
    Case("accumulate with sync", microbatches=3),
    Case("accumulate without sync", microbatches=3, sync="last"),
    Case("accumulate bf16 in fp32", torch.bfloat16, torch.float32, microbatches=3, sync="last"),
    Case("accumulate, kept whole", microbatches=2, sync="last", hold_after_backward=True),
    Case("explicit prefetch", explicit_prefetch=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_train_as_the_reference_does(gangs: Gangs, case: Case) -> None:
    gangs(2).run(compare_with_reference, case)


@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks_sum_in_the_order_of_the_reference(gangs: Gangs, world: int) -> None:
    gangs(world).run(compare_with_reference, Case("fp32", packs_as_reference=True))


def test_one_rank_trains_as_the_reference_does(gangs: Gangs) -> None:
    gangs(1).run(compare_with_reference, Case("bf16", torch.bfloat16, torch.float32))


class Reused(nn.Module):
    """Uses its input several times, and has no parameters besides those of a unit below."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.layer(x)) + x.tanh() * 1.7 + x.sin() / 3


def test_a_unit_without_parameters_sums_in_the_order_of_the_reference(gangs: Gangs) -> None:
    gangs(2).run(check_unit_without_parameters)


def check_unit_without_parameters(ctx: RankContext) -> None:
    grads = []
    for engine in engines():
        torch.manual_seed(0)
        embed, reused = nn.Linear(64, 64), Reused()
        model: Any = nn.ModuleList([embed, reused]).to(ctx.device)
        for each in (reused.layer, reused, embed):
            engine.shard(each, mesh=ctx.mesh)
        hidden = embed(ctx.batch(0, 64, 64))
        torch.autograd.backward((reused(hidden) * hidden + hidden.cos()).square().mean())
        grads.append([local(param.grad) for param in model.parameters()])
    for grad, expected in zip(*grads, strict=True):
        assert grad is not None
        assert expected is not None
        assert torch.equal(grad, expected)


def compare_with_reference(ctx: RankContext, case: Case) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy as TheirPolicy  # noqa: PLC0415 - only the oracle may load it
    from torch.distributed.fsdp import fully_shard as their_fully_shard  # noqa: PLC0415 - only the oracle may load it

    def ours(module: nn.Module | list[nn.Module], output_dtype: torch.dtype | None) -> object:
        fully_shard(
            module,
            mesh=ctx.mesh,
            reshard_after_forward=case.reshard,
            mp_policy=MixedPrecisionPolicy(case.param_dtype, case.reduce_dtype, output_dtype),
        )
        first = module if isinstance(module, nn.Module) else module[0]
        unit(first).set_agree_on_unused_params(not case.packs_as_reference)
        return module

    def theirs(module: nn.Module | list[nn.Module], output_dtype: torch.dtype | None) -> object:
        return their_fully_shard(
            module,
            mesh=ctx.mesh,
            reshard_after_forward=case.reshard,
            mp_policy=TheirPolicy(case.param_dtype, case.reduce_dtype, output_dtype),
        )

    assert_equal(train(ctx, case, ours), train(ctx, case, theirs))


def train(ctx: RankContext, case: Case, shard: Shard) -> Trace:
    model = sharded_model(ctx, case, shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trace = Trace()
    for step in range(case.steps):
        for micro in range(case.microbatches):
            last = micro == case.microbatches - 1
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last or case.sync == "every")
            if case.hold_after_backward:
                model.set_reshard_after_backward(last)
            loss = joined_loss(ctx, case, model, 100 * step + 10 * micro)
            torch.autograd.backward(loss)
            trace.losses.append(loss.detach())
        trace.grads.append({n: local(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    model.state_dict()  # hangs the slices on all modules
    trace.params = {n: cast("torch.Tensor", local(p)) for n, p in model.named_parameters()}
    return trace


def sharded_model(ctx: RankContext, case: Case, shard: Shard) -> Any:  # noqa: ANN401 - a class of either engine
    model = decoder(recompute=case.recompute).to(ctx.device)
    blocks = list[Any](model.blocks)
    if case.grouped:
        shard(blocks[:2], None)
    for block in blocks[2:] if case.grouped else blocks:
        shard(block, None)
    shard(model, case.output_dtype)
    if case.explicit_prefetch:
        for earlier, later in pairwise(blocks):
            earlier.set_modules_to_forward_prefetch([later])
            later.set_modules_to_backward_prefetch([earlier])
    return model


def joined_loss(ctx: RankContext, case: Case, model: nn.Module, seed: int) -> torch.Tensor:
    loss = torch.zeros((), device=ctx.device)
    for forward in range(case.forwards):
        loss = loss + loss_of(model, tokens_of(seed + forward, ctx.rank).to(ctx.device))
    return loss


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach().clone()


def assert_equal(ours: Trace, theirs: Trace) -> None:
    assert [t.item() for t in ours.losses] == [t.item() for t in theirs.losses]
    for step, (mine, reference) in enumerate(zip(ours.grads, theirs.grads, strict=True)):
        assert mine.keys() == reference.keys()
        for name, grad in mine.items():
            expected = reference[name]
            if grad is None or expected is None:
                assert grad is expected, f"step {step}: {name}"
            else:
                assert grad.dtype == expected.dtype
                assert torch.equal(grad, expected), f"step {step}: {name}"
    assert ours.params.keys() == theirs.params.keys()
    for name, param in ours.params.items():
        assert torch.equal(param, theirs.params[name]), name
