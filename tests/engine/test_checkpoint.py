"""Saved at one world size, loaded at another, and trained on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import nn

from fsdp_core import fully_shard
from fsdp_core.checkpoint import (
    SavedShard,
    fill_from_shards,
    load_model_state,
    load_optimizer_state,
    local_shards,
    model_state,
    optimizer_state,
)
from fsdp_core.errors import (
    CheckpointError,
    MetaParameterError,
    MissingShardError,
    OverlappingShardsError,
    ShardMismatchError,
)
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import Decoder
from tests.engine.sharded import backward_once, shard_decoder, unit
from tests.engine.test_state_dict import meta_decoder


@dataclass(frozen=True)
class Stored:
    """A shard as a file would hold it."""

    fqn: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: str
    values: torch.Tensor

    def saved(self) -> SavedShard:
        shape = tuple(self.values.shape)
        return SavedShard(self.fqn, self.global_shape, self.offsets, shape, self.values.__getitem__)


Optimizers = dict[str, Callable[[nn.Module], torch.optim.Optimizer]]

OPTIMIZERS: Optimizers = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda model: torch.optim.AdamW(
        [{"params": [p]} for p in model.parameters()], lr=1e-2, amsgrad=True
    ),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


def trained(ctx: RankContext, kind: str, steps: int) -> tuple[Decoder, torch.optim.Optimizer]:
    model = shard_decoder(ctx)
    optimizer = OPTIMIZERS[kind](model)
    for step in range(steps):
        train_step(ctx, model, optimizer, step)
    return model, optimizer


def train_step(
    ctx: RankContext, model: Decoder, optimizer: torch.optim.Optimizer, step: int
) -> float:
    loss = backward_once(ctx, model, step)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def stored(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Stored]:
    state = {**model_state(model), **optimizer_state(model, optimizer)}
    return [
        Stored(e.fqn, e.global_shape, e.offsets, e.dtype, e.tensor.to("cpu", copy=True))
        for e in local_shards(state)
    ]


def save(ctx: RankContext, kind: str) -> list[Stored]:
    return stored(*trained(ctx, kind, steps=3))


def load(ctx: RankContext, kind: str, shards: Iterable[Stored], start: str) -> list[Stored]:
    """Loads into a model that was made on meta, or into one that has trained differently."""
    if start == "meta":
        model = shard_decoder(ctx, meta_decoder())
        model.to_empty(device=ctx.device)
        optimizer = OPTIMIZERS[kind](model)
    else:
        model, optimizer = trained(ctx, kind, steps=1)
    saved = [shard.saved() for shard in shards]
    load_model_state(model, saved)
    load_optimizer_state(model, optimizer, saved)
    return stored(model, optimizer)


def joined(ranks: list[list[Stored]]) -> dict[str, torch.Tensor]:
    """Whole tensors from the shards of all ranks."""
    whole: dict[str, torch.Tensor] = {}
    for shard in (shard for rank in ranks for shard in rank):
        dtype = getattr(torch, shard.dtype)
        target = whole.setdefault(shard.fqn, torch.empty(shard.global_shape, dtype=dtype))
        target[
            tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.values.shape, strict=True))
        ] = shard.values
    return whole


@pytest.mark.ranks
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 3, 4])
def test_state_of_two_ranks_loads_bit_exactly_at_another_size(
    gangs: Gangs, world: int, kind: str
) -> None:
    ranks = gangs(2).run(save, kind)
    flat = [shard for rank in ranks for shard in rank]
    expected = joined(ranks)
    for start in ("meta", "trained"):
        actual = joined(gangs(world).run(load, kind, flat, start))
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[fqn], expected[fqn]) for fqn in expected)


@pytest.mark.ranks
def test_names_and_boxes_are_those_of_the_contract(gangs: Gangs) -> None:
    ranks = gangs(2).run(save, "adamw")
    names = {shard.fqn for rank in ranks for shard in rank}
    assert {"model.embed.weight", "optim.embed.weight.exp_avg", "optim.embed.weight.step"} <= names
    assert "model.head.weight" not in names, "tied: saved once"
    assert "optim.norm.bias.exp_avg" not in names, "frozen: never updated"
    gates = [shard for rank in ranks for shard in rank if shard.fqn == "model.blocks.0.gate"]
    assert [(g.global_shape, g.offsets, g.dtype) for g in gates] == [((1,), (0,), "float32")]
    steps = [rank for rank, shards in enumerate(ranks) for s in shards if s.fqn.endswith(".step")]
    assert set(steps) == {0}, "replicated: saved by rank 0"


@pytest.mark.ranks
def test_training_resumes_bit_exactly(gangs: Gangs) -> None:
    gangs(2).run(check_resume, gangs(2).run(save, "adamw"))


def check_resume(ctx: RankContext, ranks: list[list[Stored]]) -> None:
    saved = [shard.saved() for rank in ranks for shard in rank]
    model, optimizer = trained(ctx, "adamw", steps=3)
    other = shard_decoder(ctx, Decoder())
    resumed = OPTIMIZERS["adamw"](other)
    schedule = torch.optim.lr_scheduler.ConstantLR(resumed, factor=1.0)
    load_model_state(other, saved)
    load_optimizer_state(other, resumed, saved)
    for step in (3, 4, 5):
        assert train_step(ctx, other, resumed, step) == train_step(ctx, model, optimizer, step)
        schedule.step()
    mine, theirs = stored(other, resumed), stored(model, optimizer)
    assert [s.fqn for s in mine] == [s.fqn for s in theirs]
    assert all(torch.equal(a.values, b.values) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.ranks
def test_a_gather_in_flight_does_not_outlive_a_load(gangs: Gangs) -> None:
    gangs(2).run(check_load_during_a_gather, gangs(2).run(save, "adamw"))


def check_load_during_a_gather(ctx: RankContext, ranks: list[list[Stored]]) -> None:
    saved = [shard.saved() for rank in ranks for shard in rank]
    model, other = trained(ctx, "adamw", steps=1)[0], shard_decoder(ctx)
    for each in (model, *model.blocks):
        unit(each).unshard(async_op=True)
    load_model_state(model, saved)
    load_model_state(other, saved)
    assert torch.equal(backward_once(ctx, model), backward_once(ctx, other))


def test_loading_optimizer_state_touches_no_parameter_and_takes_one_step_for_all() -> None:
    source = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(source.parameters(), lr=1.0)
    torch.autograd.backward(source(torch.ones(1, 3)).sum())
    optimizer.step()
    saved = whole_shards(optimizer_state(source, optimizer))
    model = nn.Linear(3, 2)
    model.weight.data.fill_(-0.0)
    model.weight.grad = torch.ones(2, 3)
    before = model.weight.detach().clone()
    other = torch.optim.AdamW(model.parameters(), lr=1.0)
    steps: list[torch.optim.Optimizer] = []
    other.register_step_post_hook(lambda done, _, __: steps.append(done))
    load_optimizer_state(model, other, saved)
    assert steps == [other]
    assert torch.equal(model.weight.detach().signbit(), before.signbit())
    assert torch.equal(model.weight.grad, torch.ones(2, 3))
    assert [p for group in other.param_groups for p in group["params"]] == [*model.parameters()]
    assert torch.equal(other.state[model.weight]["step"], torch.tensor(1.0))
    assert set(other.state) == set(model.parameters())


def whole_shards(state: dict[str, torch.Tensor]) -> list[SavedShard]:
    return [
        SavedShard(n, tuple(t.shape), (0,) * t.ndim, tuple(t.shape), t.clone().__getitem__)
        for n, t in state.items()
    ]


def halves(tensor: torch.Tensor) -> list[SavedShard]:
    shape = tuple(tensor.shape)
    return [
        SavedShard("w", shape, (start, 0), (2, 3), tensor[start : start + 2].__getitem__)
        for start in (0, 2)
    ]


def test_faults_are_found_by_name_before_anything_is_written() -> None:
    whole = torch.arange(12.0).view(4, 3)
    first, second = halves(whole)
    target = {"w": torch.full((4, 3), -1.0)}
    with pytest.raises(MissingShardError, match="'w': saved shards hold 6 of 12"):
        fill_from_shards(target, [first])
    with pytest.raises(MissingShardError, match="'w'"):
        fill_from_shards(target, [])
    with pytest.raises(OverlappingShardsError, match="'w'"):
        fill_from_shards(target, [first, second, first])
    with pytest.raises(ShardMismatchError, match=r"'w' has shape \(4, 3\), but was saved with"):
        fill_from_shards(target, [replace(first, global_shape=(5, 3)), second])
    assert torch.equal(target["w"], torch.full((4, 3), -1.0))
    with pytest.raises(ShardMismatchError, match="has dtype float32, but the saved shard gave fl"):
        fill_from_shards(target, halves(whole.double()))
    with pytest.raises(MetaParameterError, match="'w' is still on the meta device"):
        fill_from_shards({"w": torch.empty(4, 3, device="meta")}, [first, second])
    fill_from_shards(target, iter([second, first, replace(first, fqn="other")]))
    assert torch.equal(target["w"], whole)


def test_state_that_the_model_or_optimizer_lacks_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    extra = whole_shards({"model.absent": torch.ones(1), "optim.weight.other": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"model does not: \['model\.absent'\]"):
        load_model_state(model, [*whole_shards(model_state(model)), *extra])
    with pytest.raises(CheckpointError, match=r"this optimizer does not: \['optim\.weight\.other"):
        load_optimizer_state(model, optimizer, extra)
    with pytest.raises(CheckpointError, match="holds a parameter of shape"):
        optimizer_state(nn.Linear(3, 2), optimizer)


class Later(torch.optim.Optimizer):
    """Keeps a value of each parameter from its second step on, how often it stepped, and the same in its group."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.5, "made": 0})

    @torch.no_grad()
    def step(self, _: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # the base class overloads it
        for group in self.param_groups:
            group["made"] += 1
            for param in group["params"]:
                state = self.state[param]
                state["made"] = state.get("made", 0) + 1
                if state["made"] > 1:
                    state["kept"] = param.bfloat16()
                    state["rate"] = 0.1


@pytest.mark.ranks
def test_a_model_whose_hooks_give_copies_takes_them_back(gangs: Gangs) -> None:
    kept = [shard for rank in gangs(2).run(count) for shard in rank]
    again = [shard for rank in gangs(2).run(take_back, kept) for shard in rank]
    assert {shard.fqn for shard in kept} >= {"model.0.weight", "model._extra_state"}
    for one, other in zip(kept, again, strict=True):
        assert torch.equal(one.values, other.values), one.fqn


class Counting(nn.Sequential):
    """Counts its passes, gives copies of all that it has, and knows an older form of it."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 2))
        self.passes = 0
        self.register_state_dict_post_hook(give_copies)  # type: ignore[no-untyped-call]  # PyTorch's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        first, second = self
        return cast("torch.Tensor", second(first(x)))

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.passes)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.passes = int(state)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, torch.Tensor],
        prefix: str,
        local_metadata: dict[str, int],
        *others: Any,  # noqa: ANN401 torch's
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "_extra_state"] = torch.tensor(0)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


def give_copies(_: nn.Module, state: dict[str, torch.Tensor], *__: object) -> None:
    state.update({name: each.clone() for name, each in state.items()})


@pytest.mark.parametrize("takes_back", [False, True])
def test_copies_under_other_names_that_nobody_takes_back_are_refused(takes_back: bool) -> None:  # noqa: FBT001 a case
    source, model = nn.Linear(3, 2), nn.Linear(3, 2)
    for each in (source, model):
        each.register_state_dict_post_hook(rename)  # type: ignore[no-untyped-call]  # PyTorch's
    if takes_back:
        model.register_load_state_dict_pre_hook(rename_back)  # type: ignore[no-untyped-call]  # PyTorch's
    shards = [shard.saved() for shard in stored(source, torch.optim.SGD(source.parameters()))]
    if takes_back:
        load_model_state(model, shards)
        assert torch.equal(model.weight, source.weight)
    else:
        with pytest.raises(CheckpointError, match=r"\['weight', 'bias'\] would keep"):
            load_model_state(model, shards)


def rename(_: nn.Module, state: dict[str, torch.Tensor], *__: object) -> None:
    for name in tuple(state):
        state[f"old_{name}"] = state.pop(name).clone()


def rename_back(_: nn.Module, state: dict[str, torch.Tensor], *__: object) -> None:
    for name in tuple(state):
        state[name.removeprefix("old_")] = state.pop(name)


class Brief(nn.Linear):
    """Keeps its weight's sum, and takes a state dict as many do: without ``strict``, and without an answer.

    It is reset before.
    """

    total: torch.Tensor | None = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]  # what is tried
        self.reset_parameters()
        super().load_state_dict(state_dict)
        self.total = self.weight.detach().sum()


def test_a_model_may_take_its_state_without_strict_and_without_an_answer() -> None:
    source, model = Brief(3, 2), Brief(3, 2)
    load_model_state(model, whole_shards(model_state(source)))
    assert torch.equal(model.weight, source.weight)
    assert model.total == source.weight.sum()


def counting(ctx: RankContext, seed: int) -> Counting:
    torch.manual_seed(seed)
    model = Counting().to(ctx.device)
    fully_shard(model, mesh=ctx.mesh)
    return model


def count(ctx: RankContext) -> list[Stored]:
    model = counting(ctx, 1)
    model(ctx.batch(0, 3, 4)).sum().backward()
    return stored(model, torch.optim.SGD(model.parameters()))


def take_back(ctx: RankContext, shards: list[Stored]) -> list[Stored]:
    model = counting(ctx, 2)
    load_model_state(model, [shard.saved() for shard in shards])
    return stored(model, torch.optim.SGD(model.parameters()))


def test_state_that_an_optimizer_makes_in_later_steps_is_made_where_that_is_known() -> None:
    source, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, fresh = Later(source.parameters()), Later(other.parameters())
    optimizer.step()
    optimizer.step()
    saved = whole_shards(optimizer_state(source, optimizer))
    with pytest.raises(CheckpointError, match=r"this optimizer does not: \['optim\.bias\.kept'"):
        load_optimizer_state(other, fresh, saved)
    load_optimizer_state(other, fresh, saved, later_keys=True, numbers=["made", "rate", "kept"])
    assert fresh.param_groups[0]["made"] == 0
    assert fresh.state[other.weight]["made"] == 2
    assert torch.equal(fresh.state[other.weight]["kept"], source.weight.bfloat16())
    assert type(fresh.state[other.bias]["rate"]) is float
    assert fresh.state[other.bias]["rate"] == 0.1
    boxes = [replace(each, fqn="optim.weight.rows") for each in halves(torch.ones(4, 3))]
    with pytest.raises(CheckpointError, match=r"does not: \['optim\.weight\.rows'\]"):
        load_optimizer_state(other, Later(other.parameters()), [*saved, *boxes], later_keys=True)
