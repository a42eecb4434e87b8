"""State dicts and materialisation of sharded models."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any, cast
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fsdp_core import MixedPrecisionPolicy, Owned, ShardedState, SharedMemoryPolicy, fully_shard
from fsdp_core.errors import ArgumentError, StateError
from fsdp_core.options import PlacementFn
from fsdp_core.param import owned_over
from fsdp_core.param.grouping import charge_of
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import Decoder, decoder, loss_of, tokens_of
from tests.engine.sharded import backward_once, local, shard_decoder, state, states, unit
from tests.engine.versus import full

pytestmark = pytest.mark.ranks


def test_state_dict_is_sharded_without_communication(gangs: Gangs) -> None:
    gangs(3).run(check_state_dict)


def check_state_dict(ctx: RankContext) -> None:
    model = shard_decoder(ctx, reshard=False)
    with torch.no_grad():
        model(tokens_of(0, ctx.rank).to(ctx.device))
    assert state(model).groups[0].sharded_state is ShardedState.UNSHARDED
    taken = model.state_dict()
    assert all(g.sharded_state is ShardedState.SHARDED for s in states(model) for g in s.groups)
    assert all(isinstance(value, DTensor) for value in taken.values())
    for name, value in decoder().to(ctx.device).state_dict().items():
        rows = torch.chunk(value, ctx.world)
        mine = rows[ctx.rank] if ctx.rank < len(rows) else value[:0]
        assert torch.equal(local(taken[name]), mine), name
    # It may be kept: it aliases the parameters over all later steps.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    backward_once(ctx, model)
    optimizer.step()
    for name, param in model.named_parameters():
        assert torch.equal(local(taken[name]), local(param)), name


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trips_and_training_goes_on(gangs: Gangs, *, assign: bool) -> None:
    gangs(3).run(check_round_trip, assign)


def check_round_trip(ctx: RankContext, assign: bool) -> None:  # noqa: FBT001 - shipped positionally
    model = shard_decoder(ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward_once(ctx, model)
    optimizer.step()
    optimizer.zero_grad()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    expected = backward_once(ctx, model, step=1)

    torch.manual_seed(99)
    other = shard_decoder(ctx, Decoder())
    backward_once(ctx, other)
    other.zero_grad()
    result = other.load_state_dict(saved, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert other.head.weight is other.embed.weight
    assert torch.equal(backward_once(ctx, other, step=1), expected)
    assert_same_grads(other, model)


def assert_same_grads(mine: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            assert torch.equal(local(a.grad), local(b.grad)), name


def test_a_gather_started_before_loading_is_not_used_after(gangs: Gangs) -> None:
    gangs(2).run(check_load_drops_gathers)


def check_load_drops_gathers(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    expected = backward_once(ctx, model)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    unit(model.blocks[0]).unshard(async_op=True)
    model.load_state_dict(saved)
    assert torch.equal(backward_once(ctx, model), expected)


def test_meta_parameters_are_named_when_forward_needs_them(gangs: Gangs) -> None:
    gangs(2).run(check_meta_error)


def check_meta_error(ctx: RankContext) -> None:
    model = shard_decoder(ctx, meta_decoder())
    assert all(param.is_meta for param in model.parameters())
    with pytest.raises(RuntimeError, match="should be materialized from meta device") as caught:
        loss_of(model, tokens_of(0, ctx.rank).to(ctx.device))
    assert "'norm.weight'" in str(caught.value)
    with pytest.raises(RuntimeError, match="still on meta device"):
        unit(model.blocks[0]).unshard()


def meta_decoder() -> Decoder:
    with torch.device("meta"):
        return decoder()


@pytest.mark.parametrize("way", ["assign", "to_empty"])
def test_a_model_made_on_meta_trains_as_one_made_whole(gangs: Gangs, way: str) -> None:
    gangs(3).run(check_meta, way)


def check_meta(ctx: RankContext, way: str) -> None:
    whole = decoder().to(ctx.device)
    model = shard_decoder(ctx, meta_decoder())
    if way == "assign":
        sharded = {
            name: distribute_tensor(value, ctx.mesh, cast("DTensor", param).placements)
            for (name, value), param in zip(
                whole.state_dict().items(), model.state_dict().values(), strict=True
            )
        }
        model.load_state_dict(sharded, assign=True)
    else:
        model.to_empty(device=ctx.device)
        with torch.no_grad():
            for param, value in zip(model.parameters(), whole.parameters(), strict=True):
                param.copy_(distribute_tensor(value, ctx.mesh, cast("DTensor", param).placements))
    reference = shard_decoder(ctx)
    for step in range(2):
        assert torch.equal(backward_once(ctx, model, step), backward_once(ctx, reference, step))
    assert_same_grads(model, reference)


def test_dtype_changed_after_sharding_is_seen(gangs: Gangs) -> None:
    gangs(3).run(check_dtype_change)


def check_dtype_change(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    backward_once(ctx, model)  # the whole parameters exist in float32
    model.zero_grad()
    model.to(torch.float64)
    assert model.embed.weight.dtype == torch.float64
    backward_once(ctx, model)
    assert cast("torch.Tensor", model.embed.weight.grad).dtype == torch.float64


@pytest.mark.parametrize(
    "shared", [None, SharedMemoryPolicy(), SharedMemoryPolicy(share_storage=True)]
)
@pytest.mark.parametrize("way", ["dtype", "empty"])
def test_a_part_of_a_unit_that_is_converted_trains_on(
    gangs: Gangs, way: str, shared: SharedMemoryPolicy | None
) -> None:
    gangs(2).run(check_converted_part, way, shared)


def check_converted_part(ctx: RankContext, way: str, shared: SharedMemoryPolicy | None) -> None:
    """No unit itself, so that nothing tells the engine; its slices are new tensors since."""
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).to(ctx.device)
    model = copy.deepcopy(plain)
    fully_shard(model, mesh=ctx.mesh, shared_memory=shared)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    x = torch.ones(3, 4, device=ctx.device)
    for step in range(4):
        losses = [each(x).square().mean() for each in (plain, model)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step != 1:
            continue
        for part in (plain[0], model[0]):
            if way == "dtype":
                part.double().float()
                continue
            part.to_empty(device=ctx.device)
            for param in part.parameters():
                nn.init.constant_(param, 0.25)
        dist.barrier()  # with one copy, others may not read before all have written


@pytest.mark.parametrize(
    ("case", "part"),
    [
        *((case, part) for case in ("gloo", "memory", "storage") for part in ("", "1")),
        ("owned", ""),
    ],
)
def test_gradients_that_wait_are_converted_with_their_parameters(
    gangs: Gangs, case: str, part: str
) -> None:
    gangs(2).run(check_converted_grads, case, part)


def check_converted_grads(ctx: RankContext, case: str, part: str) -> None:
    """A microbatch that is not reduced, a conversion, and one that is: the sum of both."""
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).to(ctx.device)
    for param in plain.parameters():
        nn.init.constant_(param, 0.3)
    model = copy.deepcopy(plain)
    policies = {"memory": SharedMemoryPolicy(), "storage": SharedMemoryPolicy(share_storage=True)}
    sharded: Any = fully_shard(
        model,
        mesh=ctx.mesh,
        shard_placement_fn=matrices_owned_by_the_first if case == "owned" else None,
        shared_memory=policies.get(case),
    )
    params = list(model.parameters())
    for number in range(2):
        sharded.set_requires_gradient_sync(number == 1)
        x = ctx.batch(number, 3, 4)
        for each in (plain, model):
            torch.autograd.backward(each(x.to(next(each.parameters()).dtype)).square().mean())
            if number == 0:
                each.get_submodule(part).double()
                if part:
                    each[1].register_forward_pre_hook(lambda _, args: args[0].double())
    assert_averages(ctx, params, plain)


def assert_averages(
    ctx: RankContext, params: list[nn.Parameter], plain: nn.Module, *, check_dtype: bool = True
) -> None:
    """The gradients are those of the plain module, averaged over ranks; owned ones are the first rank's."""
    for param, expected in zip(params, plain.parameters(), strict=True):
        assert expected.grad is not None
        dist.all_reduce(expected.grad, dist.ReduceOp.AVG)
        grad = param.grad
        assert grad is not None
        if owned_over(param) is None:
            torch.testing.assert_close(full(grad), expected.grad, check_dtype=check_dtype)
        elif ctx.rank == 0:
            torch.testing.assert_close(local(grad), expected.grad, check_dtype=check_dtype)


class TwoEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Embedding(4, 3), nn.Embedding(4, 3)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.one(at).double().sum() + self.other(at).double().sum()
        return loss


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(
    ("case", "part"),
    [
        *((case, part) for case in ("gloo", "memory", "storage") for part in ("", "one")),
        ("owned", ""),
    ],
)
def test_gradients_of_a_forward_before_a_conversion_are_converted(
    gangs: Gangs, case: str, part: str, *, goes_on: bool
) -> None:
    gangs(2).run(check_graph_before_conversion, case, part, goes_on=goes_on)


def check_graph_before_conversion(ctx: RankContext, case: str, part: str, *, goes_on: bool) -> None:
    """Autograd saves no embedding, so that nothing else refuses the backward."""
    plain = TwoEmbeddings().to(ctx.device)
    model = copy.deepcopy(plain)
    policies = {"memory": SharedMemoryPolicy(), "storage": SharedMemoryPolicy(share_storage=True)}
    fully_shard(
        model,
        mesh=ctx.mesh,
        reshard_after_forward=True,
        shard_placement_fn=matrices_owned_by_the_first if case == "owned" else None,
        shared_memory=policies.get(case),
    )
    params = list(model.parameters())
    at = torch.tensor([0, 1, 1 + ctx.rank], device=ctx.device)
    for each in (plain, model):
        loss = each(at)
        each.get_submodule(part).double()
        torch.autograd.backward(loss + each(at) if goes_on else loss)
    assert_averages(ctx, params, plain, check_dtype=False)


def matrices_owned_by_the_first(param: nn.Parameter) -> Owned | None:
    return Owned(0) if param.ndim > 1 else None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, *, is_used: bool) -> torch.Tensor:
        return x * self.scale if is_used else x * 1


class ScaledHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.head = Scaled(), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, *, scales: bool | None) -> torch.Tensor:
        """None: the scale's unit does not run."""
        found: torch.Tensor = self.head(x if scales is None else self.scaled(x, is_used=scales))
        return found


@pytest.mark.parametrize("owner", [None, Owned(0)])
def test_a_reduction_without_a_gather_has_one_dtype_after_a_conversion(
    gangs: Gangs, owner: Owned | None
) -> None:
    gangs(2).run(check_reduction_without_gather, owner)


def check_reduction_without_gather(ctx: RankContext, owner: Owned | None) -> None:
    model: Any = ScaledHead().to(ctx.device)
    nn.init.constant_(model.head.weight, 0.5)
    fully_shard(model.scaled, mesh=ctx.mesh, shard_placement_fn=lambda _: owner)
    fully_shard(model, mesh=ctx.mesh)
    x = torch.ones(2, 4, device=ctx.device, requires_grad=True)
    model.set_requires_gradient_sync(False)
    torch.autograd.backward(model(x, scales=ctx.rank == 0).sum())
    model.bfloat16()
    model.set_requires_gradient_sync(True)
    torch.autograd.backward(model(x.detach().bfloat16(), scales=None).sum())
    grad = model.scaled.scale.grad
    assert grad is not None
    assert local(grad).dtype is torch.bfloat16
    assert all(local(grad) == 0.5)  # the mean of 1 and none


def test_sums_that_wait_for_an_all_reduce_in_another_dtype_are_named(gangs: Gangs) -> None:
    gangs(2).run(check_converted_sums)


def check_converted_sums(ctx: RankContext) -> None:
    grid = init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(nn.Linear(4, 2).to(ctx.device), mesh=grid)
    x = ctx.batch(0, 3, 4)
    model.set_requires_all_reduce(False)
    torch.autograd.backward(model(x).sum())
    model.double()
    model.set_requires_all_reduce(True)
    with pytest.raises(StateError, match=r"'weight'.* wait for the all-reduce in torch.float32"):
        torch.autograd.backward(model(x.double()).sum())
    model.reset_iter_state()
    torch.autograd.backward(model(x.double()).sum())
    assert model.weight.grad is not None


def test_precision_policy_casts_compute_and_keeps_the_rest(gangs: Gangs) -> None:
    gangs(2).run(check_precision)


def check_precision(ctx: RankContext) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = decoder().to(ctx.device)
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh, mp_policy=policy)
    fully_shard(model, mesh=ctx.mesh, mp_policy=replace(policy, output_dtype=torch.float16))
    seen: list[torch.dtype] = []

    def look(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.extend([args[0].dtype, module.get_parameter("up.weight").dtype])

    model.blocks[1].register_forward_pre_hook(look)
    logits = model(tokens_of(0, ctx.rank).to(ctx.device))
    assert logits.dtype == torch.float16
    assert seen == [torch.bfloat16, torch.bfloat16]
    torch.autograd.backward(logits.float().sum())
    assert model.embed.weight.dtype == torch.float32
    assert cast("torch.Tensor", model.embed.weight.grad).dtype == torch.float32


def test_a_parameter_that_lies_otherwise_is_refused_by_name(gangs: Gangs) -> None:
    gangs(2).run(check_strangers)


def check_strangers(ctx: RankContext) -> None:
    whole = torch.arange(16.0, device=ctx.device).view(4, 4)
    cases: list[tuple[int, Placement]] = [(0, Shard(1)), (1, Shard(0)), (0, Replicate())]
    for dim, other in cases:
        model = nn.Sequential(nn.Linear(4, 4, bias=False)).to(ctx.device)
        fully_shard(model, mesh=ctx.mesh, shard_placement_fn=always(Shard(dim)))
        model.load_state_dict(
            {"0.weight": distribute_tensor(whole, ctx.mesh, [Shard(dim)])}, assign=True
        )
        assert torch.equal(model(torch.eye(4, device=ctx.device)), whole.t())
        for placements, shape in ((other, (4, 4)), (Shard(dim), (2, 4))):
            stranger = distribute_tensor(whole[: shape[0]], ctx.mesh, [placements])
            with pytest.raises(ArgumentError, match=r"'0\.weight' .* this rank holds"):
                # Of another shape PyTorch refuses it in a state dict, but not on the module.
                assign(model, stranger)


PLACEMENTS: tuple[Shard | Owned, ...] = (Shard(0), Owned())


def always(placement: Shard | Owned) -> PlacementFn:
    return lambda _: placement


def assign(model: nn.Sequential, value: torch.Tensor) -> None:
    state(model).reshard()
    model[0].weight = nn.Parameter(value)
    state(model).refresh()


def test_a_parameter_that_is_assigned_stays_in_the_units_charge(gangs: Gangs) -> None:
    gangs(2).run(check_charge)


def check_charge(ctx: RankContext) -> None:
    for placement in PLACEMENTS:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        fully_shard(model[0], mesh=ctx.mesh, shard_placement_fn=always(placement))
        held = ref(local(model[0].weight).untyped_storage())  # type: ignore[arg-type]  # a parameter
        model[0].load_state_dict(copy.deepcopy(model[0].state_dict()), assign=True)
        assert held() is None  # nothing holds on to the memory of the old one
        model[1].weight = model[0].weight
        fully_shard(model, mesh=ctx.mesh)
        assert state(model).params == []
        assert len(list(model.parameters())) == 1


def test_copies_and_files_of_sharded_parameters_are_in_nobodys_charge(gangs: Gangs) -> None:
    gangs(2).run(check_copies)


def check_copies(ctx: RankContext) -> None:
    for placement in PLACEMENTS:
        model = nn.Linear(6, 4, bias=False).to(ctx.device)
        fully_shard(model, mesh=ctx.mesh, shard_placement_fn=always(placement))
        file = io.BytesIO()
        torch.save(model.state_dict(keep_vars=True), file)
        file.seek(0)
        made = [
            copy.deepcopy(model.weight),
            pickle.loads(pickle.dumps(model.weight)),  # noqa: S301 - our own
            torch.load(file, weights_only=True)["weight"],
        ]
        assert charge_of(model.get_parameter("weight")) is not None
        for each in made:
            assert charge_of(cast("nn.Parameter", each)) is None
            assert torch.equal(local(each), local(model.weight))
