"""Matrices that one rank holds whole: training with Muon, traffic, memory, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_core import CPUOffloadPolicy, MixedPrecisionPolicy, Owned, clip_grad_norm_, fully_shard
from fsdp_core.checkpoint import load_model_state, load_optimizer_state
from fsdp_core.errors import ArgumentError, ArgumentTypeError, StateError, UnsupportedError
from fsdp_core.layout import OwnedPacking, balanced_owners
from fsdp_core.low_precision import gather_in_low_precision
from fsdp_core.param import OwnedParam, owned_over
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import BLOCKS, Decoder, decoder, loss_of, tokens_of
from tests.engine.sharded import backward_once, held_unsharded_bytes, local, state, states, unit
from tests.engine.test_checkpoint import Stored, joined, stored
from tests.engine.test_low_precision import GATHER, counted
from tests.engine.test_state_dict import meta_decoder

# -- Arithmetic


def test_rows_hold_what_their_rank_owns() -> None:
    packing = OwnedPacking((3, 5, 2, 4), (1, 0, 1, 1), 3)
    assert packing.offsets == (0, 0, 3, 5)
    assert (packing.row, packing.total) == (9, 27)
    assert OwnedPacking((), (), 2).row == 0


def test_owners_are_balanced_by_size_and_chosen_ones_are_kept() -> None:
    assert balanced_owners([1, 8, 4, 4], [None] * 4, 2) == (0, 0, 1, 1)
    assert balanced_owners([5, 5, 5], [None] * 3, 4) == (0, 1, 2)
    assert balanced_owners([1, 8, 4], [None, 1, None], 2) == (0, 1, 0)
    with pytest.raises(ArgumentError, match="Rank 2 cannot own"):
        balanced_owners([1], [2], 2)


# -- Training


class SmallMuon(torch.optim.Optimizer):
    """Momentum whose update is the nearest semi-orthogonal matrix, by Newton-Schulz steps."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes no closure
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param))
                momentum.mul_(0.9).add_(param.grad)
                whole = local(momentum) if isinstance(momentum, DTensor) else momentum
                if whole.numel() > 0:
                    assert whole.shape == param.shape
                    target = local(param) if isinstance(param, DTensor) else param
                    target.sub_(group["lr"] * orthogonal(whole))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    x: torch.Tensor = matrix / (torch.linalg.vector_norm(matrix) + 1e-7)
    for _ in range(5):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


def is_matrix(name: str) -> bool:
    return any(part in name for part in ("up.weight", "down.weight", "never"))


def own_matrices(param: nn.Parameter) -> Owned | None:
    return Owned() if tuple(param.shape) in {(7, 13), (13, 7), (3, 2)} else None


def owned_decoder(
    ctx: RankContext, model: Decoder | None = None, policy: MixedPrecisionPolicy | None = None
) -> Decoder:
    """Each block owns three matrices, of which one is never used; one in the root is frozen."""
    model = decoder().to(ctx.device) if model is None else model
    policy = policy or MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh, shard_placement_fn=own_matrices, mp_policy=policy)
    fully_shard(model, mesh=ctx.mesh, mp_policy=policy)
    return model


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    return [
        SmallMuon([param for name, param in named.items() if is_matrix(name)], lr=0.02),
        torch.optim.AdamW([p for name, p in named.items() if not is_matrix(name)], lr=1e-2),
    ]


def step_all(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_muon_on_owned_matrices_trains_as_one_process_does(gangs: Gangs, world: int) -> None:
    gangs(world).run(check_training)


def check_training(ctx: RankContext) -> None:
    model, plain = owned_decoder(ctx), decoder().to(ctx.device)
    freeze(model)
    freeze(plain)
    both = (optimizers_of(model), optimizers_of(plain))
    with torch.inference_mode():
        model(tokens_of(0, 0).to(ctx.device))
    for step in range(6):
        mine = backward_once(ctx, model, step)
        dist.all_reduce(mine)
        tokens = torch.cat([tokens_of(step, rank) for rank in range(ctx.world)]).to(ctx.device)
        alone = loss_of(plain, tokens)
        torch.autograd.backward(alone)
        assert mine.item() / ctx.world == pytest.approx(alone.item(), abs=1e-5)
        assert held_unsharded_bytes(model) == 0
        check_grads(ctx, model, plain)
        for optimizers in both:
            step_all(optimizers)
    for found in states(model):
        unit(found.modules[0]).unshard()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), param, rtol=0, atol=1e-5)


def freeze(model: Decoder) -> None:
    model.get_parameter("blocks.1.down.weight").requires_grad = False


def check_grads(ctx: RankContext, model: Decoder, plain: Decoder) -> None:
    for param in (p for found in states(model) for p in found.params):
        expected, grad = plain.get_parameter(param.fqn).grad, param.sharded_param.grad
        assert (grad is None) == (expected is None), param.fqn
        if isinstance(param, OwnedParam) and grad is not None and expected is not None:
            if param.owner == ctx.rank:
                torch.testing.assert_close(local(grad), expected, rtol=1e-4, atol=1e-6)
            else:
                assert local(grad).numel() == 0


@pytest.mark.ranks
def test_only_the_owner_holds_elements(gangs: Gangs) -> None:
    held = gangs(3).run(held_elements)
    for name in held[0]:
        sizes = sorted(rank[name] for rank in held)
        assert sizes[:2] == [0, 0], name
        assert sizes[2] in {91, 6}
    per_rank = [sum(sizes for name, sizes in rank.items() if "blocks.0" in name) for rank in held]
    assert sorted(per_rank) == [6, 91, 91]


def held_elements(ctx: RankContext) -> dict[str, int]:
    model = owned_decoder(ctx)
    optimizers = optimizers_of(model)
    backward_once(ctx, model)
    optimizers[0].step()
    held = {}
    for name, param in model.named_parameters():
        if is_matrix(name):
            numel = local(param).untyped_storage().nbytes()
            assert isinstance(param, DTensor)
            assert tuple(param.shape) in {(7, 13), (13, 7), (3, 2)}
            assert param.placements == (Replicate(),)
            kept = [param, *([] if param.grad is None else [param.grad])]
            kept += [v for v in optimizers[0].state[param].values() if torch.is_tensor(v)]
            assert len({local(each).numel() for each in kept}) == 1
            held[name] = numel // 4
    return held


@pytest.mark.ranks
def test_a_unit_still_has_one_gather_and_one_reduction(gangs: Gangs) -> None:
    gangs(2).run(check_traffic)


REDUCE = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


def check_traffic(ctx: RankContext) -> None:
    model = nn.ParameterList([torch.ones(4, 4), torch.ones(4, 2), torch.ones(2, 4), torch.ones(6)])
    root = Sum(model).to(ctx.device)
    fully_shard(
        root,
        mesh=ctx.mesh,
        shard_placement_fn=lambda p: Owned() if p.ndim > 1 else None,
    )
    with counted(GATHER, 1) as gathered, counted(REDUCE, 1) as reduced:
        torch.autograd.backward(root())
    # 16 elements on one rank, 8 + 8 on the other, half of 6 on each; four flags.
    assert gathered == [4 * (16 + 3)]
    assert reduced == [4 * 2 * (16 + 3 + 4)]
    assert [local(p).numel() for p in root.tensors] == (
        [16, 0, 0, 3] if ctx.rank == 0 else [0, 8, 8, 3]
    )


class Sum(nn.Module):
    def __init__(self, tensors: nn.ParameterList) -> None:
        super().__init__()
        self.tensors = tensors

    def forward(self) -> torch.Tensor:
        return torch.stack([tensor.sum() for tensor in self.tensors]).sum()


@pytest.mark.ranks
def test_replicas_hold_the_same_whole_matrices(gangs: Gangs) -> None:
    gangs(4).run(check_hsdp)


def check_hsdp(ctx: RankContext) -> None:
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("replicas", "shards"))
    inner = RankContext(ctx.rank, ctx.world, ctx.device, mesh)
    model, plain = owned_decoder(inner), decoder().to(ctx.device)
    both = (optimizers_of(model), optimizers_of(plain))
    for step in range(3):
        backward_once(ctx, model, step)
        tokens = torch.cat([tokens_of(step, rank) for rank in range(4)]).to(ctx.device)
        torch.autograd.backward(loss_of(plain, tokens))
        for optimizers in both:
            step_all(optimizers)
    for param in (p for found in states(model) for p in found.params):
        if isinstance(param, OwnedParam) and param.owner == mesh.get_local_rank("shards"):
            expected = plain.get_parameter(param.fqn)
            torch.testing.assert_close(local(param.sharded_param), expected, rtol=0, atol=1e-5)


@pytest.mark.ranks
def test_replicas_may_average_later(gangs: Gangs) -> None:
    gangs(4).run(check_late_average)


def check_late_average(ctx: RankContext) -> None:
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("replicas", "shards"))
    inner = RankContext(ctx.rank, ctx.world, ctx.device, mesh)
    early, late = owned_decoder(inner), owned_decoder(inner)
    for step in range(2):
        backward_once(ctx, early, step)
        for group in (group for found in states(late) for group in found.groups):
            group.options.all_reduce_grads = step == 1
        backward_once(ctx, late, step)
    for name, param in early.named_parameters():
        other = late.get_parameter(name)
        assert (param.grad is None) == (other.grad is None), name
        if param.grad is not None and other.grad is not None:
            torch.testing.assert_close(local(param.grad), local(other.grad))


@pytest.mark.ranks
def test_gradients_accumulate_and_mixed_precision_computes(gangs: Gangs) -> None:
    gangs(2).run(check_accumulation)


def check_accumulation(ctx: RankContext) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    once, split = owned_decoder(ctx, policy=policy), owned_decoder(ctx, policy=policy)
    unit(split).set_requires_gradient_sync(False)
    for step in range(3):
        backward_once(ctx, once, step)
        if step == 2:
            unit(split).set_requires_gradient_sync(True)
        backward_once(ctx, split, step)
    for name, param in once.named_parameters():
        other = split.get_parameter(name)
        assert (param.grad is None) == (other.grad is None)
        if param.grad is not None and other.grad is not None:
            assert param.grad.dtype == torch.float32
            torch.testing.assert_close(local(param.grad), local(other.grad), rtol=1e-4, atol=1e-5)


# -- What users do besides


@pytest.mark.ranks
@pytest.mark.parametrize("converted", [0, 1])
def test_a_converted_one_leaves_the_others_their_precision(gangs: Gangs, converted: int) -> None:
    gangs(2).run(check_converted_beside, converted)


def check_converted_beside(ctx: RankContext, converted: int) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(ctx.device)
    grads = []
    for converts in (False, True):
        model = copy.deepcopy(plain)
        fully_shard(model, mesh=ctx.mesh, mp_policy=policy, shard_placement_fn=lambda _: Owned(0))
        if converts:
            model[converted].bfloat16()
        model(ctx.batch(0, 3, 4)).float().square().mean().backward()
        grad = model.get_parameter(f"{1 - converted}.weight").grad
        assert grad is not None
        grads.append(local(grad))
    assert torch.equal(*grads)


def test_an_owned_scalar_is_loaded_and_converted(gangs: Gangs) -> None:
    gangs(2).run(check_owned_scalar)


def check_owned_scalar(ctx: RankContext) -> None:
    model: Any = nn.Linear(2, 2).to(ctx.device)
    model.scale = nn.Parameter(torch.tensor(2.0, device=ctx.device))
    fully_shard(
        model, mesh=ctx.mesh, shard_placement_fn=lambda p: None if p.ndim else Owned(rank=1)
    )
    for assign in (False, True):
        model.load_state_dict(model.state_dict(), assign=assign)
    model.double()
    model.unshard()
    assert model.scale.item() == 2.0


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (3, 1)])
def test_a_checkpoint_fills_other_owners(gangs: Gangs, before: int, after: int) -> None:
    saved = gangs(before).run(save)
    shards = [shard for rank in saved for shard in rank]
    assert sum(shard.fqn == "model.blocks.0.up.weight" for shard in shards) == 1
    loaded = gangs(after).run(load, shards)
    expected, got = joined(saved), joined(loaded)
    assert got.keys() == expected.keys()
    assert "optim.blocks.0.up.weight.exp_avg" in got
    for name, values in expected.items():
        assert torch.equal(got[name], values), name


def save(ctx: RankContext) -> list[Stored]:
    model = owned_decoder(ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        backward_once(ctx, model, step)
        step_all([optimizer])
    return stored(model, optimizer)


def load(ctx: RankContext, shards: list[Stored]) -> list[Stored]:
    model = owned_decoder(ctx, meta_decoder())
    model.to_empty(device=ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved = [shard.saved() for shard in shards]
    load_model_state(model, saved)
    load_optimizer_state(model, optimizer, saved)
    result = stored(model, optimizer)
    backward_once(ctx, model, 2)
    step_all([optimizer])
    return result


@pytest.mark.ranks
def test_state_dicts_load_and_strangers_are_refused(gangs: Gangs) -> None:
    gangs(2).run(check_state_dict)


def check_state_dict(ctx: RankContext) -> None:
    first, second = owned_decoder(ctx), owned_decoder(ctx)
    optimizers = optimizers_of(first)
    backward_once(ctx, first)
    step_all(optimizers)
    for assign in (False, True):
        second.load_state_dict(copy.deepcopy(first.state_dict()), assign=assign)
        assert backward_once(ctx, first, 3) == backward_once(ctx, second, 3)
    name = "blocks.0.up.weight"
    stranger = distribute_tensor(torch.ones(7, 13, device=ctx.device), ctx.mesh, [Shard(0)])
    with pytest.raises(ArgumentTypeError, match="is owned by rank"):
        second.load_state_dict({**first.state_dict(), name: stranger}, assign=True)
    first.to(torch.float64)
    loss_of(first, tokens_of(0, 0).to(ctx.device))
    first.blocks[0].get_submodule("up").to(torch.float32)
    unit(first.blocks[0]).reshard()
    state(first.blocks[0]).refresh()
    with pytest.raises(StateError, match="Convert all of them, or none"):
        unit(first.blocks[0]).unshard()


@pytest.mark.ranks
def test_clipping_counts_owned_gradients_once_and_torchs_refuses(gangs: Gangs) -> None:
    gangs(3).run(check_norm)


def check_norm(ctx: RankContext) -> None:
    model, plain = owned_decoder(ctx), decoder().to(ctx.device)
    backward_once(ctx, model)
    tokens = torch.cat([tokens_of(0, rank) for rank in range(ctx.world)]).to(ctx.device)
    torch.autograd.backward(loss_of(plain, tokens))
    with pytest.raises(RuntimeError, match="same mesh"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert (owned_over(param) is None) == (param.placements == (Shard(0),))
    total = clip_grad_norm_(model.parameters(), 0.1)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    check_grads(ctx, model, plain)


@pytest.mark.ranks
def test_owned_matrices_may_live_on_the_host(gangs: Gangs) -> None:
    gangs(2).run(check_offload)


def check_offload(ctx: RankContext) -> None:
    model = nn.Linear(4, 6, bias=False).to(ctx.device)
    exact = model.weight.detach().clone()
    fully_shard(
        model,
        mesh=ctx.mesh,
        shard_placement_fn=lambda _: Owned(1),
        offload_policy=CPUOffloadPolicy(),
    )
    torch.autograd.backward(model(torch.ones(2, 4, device=ctx.device)).sum())
    weight = state(model).params[0].sharded_param
    assert weight.grad is not None
    assert local(weight).device == local(weight.grad).device == torch.device("cpu")
    assert local(weight).numel() == (24 if ctx.rank == 1 else 0)
    unit(model).unshard()
    assert torch.equal(model.weight, exact)


@pytest.mark.ranks
def test_what_cannot_be_owned_is_refused(gangs: Gangs) -> None:
    gangs(4).run(check_refusals)


def check_refusals(ctx: RankContext) -> None:
    def own(_: nn.Parameter) -> Owned:
        return Owned()

    low = nn.Linear(64, 64)
    gather_in_low_precision(low)
    with pytest.raises(UnsupportedError, match="Int8Weight"):
        fully_shard(low.to(ctx.device), mesh=ctx.mesh, shard_placement_fn=own)
    with pytest.raises(UnsupportedError, match="smaller mesh"):
        fully_shard(
            nn.Linear(2, 2).to(ctx.device),
            mesh=ctx.mesh,
            reshard_after_forward=2,
            shard_placement_fn=own,
        )
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    split = nn.Linear(4, 4, bias=False)
    split.weight = nn.Parameter(distribute_tensor(split.weight.detach(), mesh["tp"], [Shard(0)]))
    with pytest.raises(UnsupportedError, match="is a DTensor"):
        fully_shard(split, mesh=mesh["dp"], shard_placement_fn=own)
    with pytest.raises(ArgumentError, match="Rank 4 cannot own"):
        fully_shard(nn.Linear(2, 2), mesh=ctx.mesh, shard_placement_fn=lambda _: Owned(4))


@pytest.mark.ranks
def test_torchs_own_muon_updates_owned_matrices(gangs: Gangs) -> None:
    gangs(2).run(check_torch_muon)


def check_torch_muon(ctx: RankContext) -> None:
    torch.manual_seed(4)
    plain = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(BLOCKS))).to(ctx.device)
    model = copy.deepcopy(plain)
    fully_shard(model, mesh=ctx.mesh, shard_placement_fn=lambda _: Owned())
    for each in (model, plain):
        optimizer = torch.optim.Muon(each.parameters(), lr=0.1)
        torch.autograd.backward(each(torch.eye(6, device=ctx.device)).square().sum())
        optimizer.step()  # type: ignore[no-untyped-call]  # PyTorch's
    unit(model).unshard()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_an_operator_for_all_parameters_at_once_is_refused(gangs: Gangs, option: str) -> None:
    """It would leave out all that the owner of the first does not hold."""
    gangs(2).run(check_all_at_once, option)


def check_all_at_once(ctx: RankContext, option: str) -> None:
    model = nn.Linear(4, 4).to(ctx.device)
    fully_shard(
        model,
        mesh=ctx.mesh,
        shard_placement_fn=lambda param: Owned() if param.ndim == 2 else None,
    )
    torch.autograd.backward(model(torch.ones(2, 4, device=ctx.device)).sum())
    options: dict[str, Any] = {option: True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    with pytest.raises(UnsupportedError, match="would step owned parameters together"):
        optimizer.step()
    torch.optim.AdamW([model.bias], **options).step()
    torch.optim.AdamW(model.parameters()).step()
