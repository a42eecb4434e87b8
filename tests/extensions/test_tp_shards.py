"""State of a data-parallel x tensor-parallel mesh, out as tensor-parallel shards and back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from fsdp_core import fully_shard, torch_private
from fsdp_core.checkpoint import (
    fill_from_tp_shards,
    model_state,
    tp_shards,
    whole_tensors,
)
from fsdp_core.checkpoint.local_shards import ShardEntry
from fsdp_core.errors import (
    CheckpointError,
    MissingShardError,
    ShardMismatchError,
    UnsupportedError,
)
from fsdp_core.fsdp1 import DTensorExtensions
from tests.engine.gang import Gangs, RankContext
from tests.extensions.grid import grid, numbered

pytestmark = pytest.mark.ranks

LENGTHS = [8, 7, 5, 1]
LAYOUTS: list[tuple[Placement, Placement]] = [
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(1), Shard(1)),
    (Shard(0), Replicate()),
    (Replicate(), Shard(0)),
    (Replicate(), Replicate()),
]


def test_any_layout_goes_out_whole_and_comes_back_exactly(gangs: Gangs) -> None:
    gangs(4).run(check_layouts)


def check_layouts(ctx: RankContext) -> None:
    mesh = grid(ctx)
    state: dict[str, torch.Tensor] = {}
    wholes: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for length in LENGTHS:
        whole = numbered(ctx, length, 5)
        for dp, tp in LAYOUTS:
            name = f"{length} {dp} {tp}"
            wholes[name] = whole
            state[name] = distribute_tensor(whole, mesh, [dp, tp])
            expected[name] = distribute_tensor(whole, mesh["tp"], [tp]).to_local()
        name = f"{length} strided"
        wholes[name] = whole
        state[name] = as_fsdp2_shards(whole, mesh)
        expected[name] = distribute_tensor(whole, mesh["tp"], [Shard(0)]).to_local()
    plain = numbered(ctx, 3)
    state |= {"plain": plain, "over dp": distribute_tensor(plain, mesh["dp_shard"], [Shard(0)])}
    state["over tp"] = distribute_tensor(plain, mesh["tp"], [Shard(0)])
    wholes |= {"plain": plain, "over dp": plain, "over tp": plain}
    half = plain[2:] if mesh["tp"].get_local_rank() else plain[:2]
    expected |= {"plain": plain, "over dp": plain, "over tp": half}
    check_out_and_back(state, wholes, expected)


def as_fsdp2_shards(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Cut by the tensor-parallel axis first, then by the data-parallel one, both on dim 0."""
    rows = whole
    for axis in ("tp", "dp_shard"):
        rows = distribute_tensor(rows, mesh[axis], [Shard(0)]).to_local()
    placements = [torch_private.strided_shard(0, mesh.size(1)), Shard(0)]
    return DTensor.from_local(
        rows.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def check_out_and_back(
    state: dict[str, torch.Tensor],
    wholes: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
) -> None:
    shards = [replace(shard, tensor=shard.tensor.clone()) for shard in tp_shards(state)]
    assert [shard.fqn for shard in shards] == list(state)
    for shard in shards:
        whole = wholes[shard.fqn]
        assert torch.equal(shard.tensor, expected[shard.fqn]), shard.fqn
        assert shard.global_shape == tuple(whole.shape)
        box = zip(shard.offsets, shard.tensor.shape, strict=True)
        part = whole[tuple(slice(start, start + size) for start, size in box)]
        assert torch.equal(part, shard.tensor), shard.fqn
    for name, tensor in whole_tensors(state):
        assert torch.equal(tensor, wholes[name]), name
    before = {name: local_of(tensor).clone() for name, tensor in state.items()}
    for tensor in state.values():
        local_of(tensor).fill_(-1.0)
    fill_from_tp_shards(state, iter(shards))
    for name, tensor in state.items():
        assert torch.equal(local_of(tensor), before[name]), name


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return torch_private.local_tensor(tensor).detach()
    return tensor.detach()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 14)
        self.down = nn.Linear(14, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.norm(self.down(self.up(x).relu()))
        return result


def test_a_sharded_model_goes_out_whole_and_comes_back_at_other_axes(gangs: Gangs) -> None:
    gangs(4).run(check_model)


def check_model(ctx: RankContext) -> None:
    model = sharded_mlp(ctx, grid(ctx), "dp_shard")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.autograd.backward(model(torch.ones(2, 6, device=ctx.device)).sum())
    optimizer.step()
    state = model_state(model)
    strided = [p.placements for p in model.parameters() if isinstance(p, DTensor)]
    assert any("_StridedShard" in type(each[0]).__name__ for each in strided)
    wholes = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in state.items()
    }
    shards = [replace(shard, tensor=shard.tensor.clone()) for shard in tp_shards(state)]
    for name, tensor in whole_tensors(state):
        assert torch.equal(tensor, wholes[name])
    for shape in ((2, 2), (2, 1, 2)):
        mesh = grid(ctx, shape)
        other = sharded_mlp(ctx, mesh, ("dp_replicate", "dp_shard")[-len(shape) + 1 :])
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        fill_from_tp_shards(model_state(other), shards)
        for name, tensor in whole_tensors(model_state(other)):
            assert torch.equal(tensor, wholes[name]), name


def sharded_mlp(ctx: RankContext, mesh: DeviceMesh, dp: str | tuple[str, ...]) -> nn.Module:
    torch.manual_seed(5)
    model = Mlp().to(ctx.device)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh[dp])
    return model


class Counting(DTensorExtensions):
    """Ours, and what it was asked for."""

    def __init__(self, ctx: RankContext) -> None:
        super().__init__(torch.get_device_module(ctx.device))
        self.asked: Counter[str] = Counter()

    def chunk_dtensor(
        self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh
    ) -> torch.Tensor:
        self.asked["chunk"] += 1
        return super().chunk_dtensor(tensor, rank, device_mesh)

    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        self.asked["gather"] += 1
        return super().all_gather_dtensor(tensor, parent_mesh)


def test_nothing_is_gathered_before_it_is_asked_for(gangs: Gangs) -> None:
    gangs(4).run(check_bounded)


def check_bounded(ctx: RankContext) -> None:
    extension = Counting(ctx)
    mesh = grid(ctx)
    state: dict[str, torch.Tensor] = {
        str(i): distribute_tensor(numbered(ctx, 4, 4), mesh, [Shard(0), Shard(1)]) for i in range(3)
    }
    shards = []
    with CommDebugMode() as comms:  # type: ignore[no-untyped-call]  # PyTorch's
        for i, shard in enumerate(tp_shards(state, extension=extension)):
            assert comms.get_total_counts() == extension.asked["gather"] == i + 1
            shards.append(shard)
    fill_from_tp_shards(state, shards, extension=extension)
    assert extension.asked == {"gather": 3, "chunk": 3}
    strided: dict[str, torch.Tensor] = {"w": as_fsdp2_shards(numbered(ctx, 8, 2), mesh)}
    out = list(tp_shards(strided))
    with CommDebugMode() as comms:  # type: ignore[no-untyped-call]  # PyTorch's
        fill_from_tp_shards(strided, out)
    assert comms.get_total_counts() == 0, "slices of the shard need no other rank"


def test_what_has_no_whole_shards_is_refused_by_name(gangs: Gangs) -> None:
    gangs(4).run(check_refused)


def check_refused(ctx: RankContext) -> None:
    mesh = grid(ctx)
    whole = numbered(ctx, 8, 4)
    device = ctx.device.type
    swapped = init_device_mesh(device, (2, 2), mesh_dim_names=("tp", "dp_shard"))
    nameless = init_device_mesh(device, (2, 2))
    both: list[Placement] = [Shard(0), Shard(1)]
    strided: list[Placement] = [Shard(1), torch_private.strided_shard(0, 2)]
    partial: list[Placement] = [Partial(), Shard(0)]
    for tensor, words in [
        (distribute_tensor(whole, swapped, both), "does not tell its tensor-parallel axis"),
        (distribute_tensor(whole, nameless, both), "does not tell its tensor-parallel axis"),
        (DTensor.from_local(whole, mesh, strided, run_check=False), "must be one slice"),
        (DTensor.from_local(whole, mesh, partial, run_check=False), "a sum still to be made"),
    ]:
        state: dict[str, torch.Tensor] = {"layer.weight": tensor}
        for refused in (tp_shards, whole_tensors):
            with pytest.raises(UnsupportedError, match=r"^'layer\.weight' .*") as caught:
                list(refused(state))
            assert words in str(caught.value)


def test_shards_that_do_not_fit_are_refused_by_name(gangs: Gangs) -> None:
    gangs(4).run(check_misfits)


def check_misfits(ctx: RankContext) -> None:
    mesh = grid(ctx)
    target = distribute_tensor(numbered(ctx, 8, 4), mesh, [Shard(0), Shard(1)])
    state: dict[str, torch.Tensor] = {"w": target, "v": torch.zeros(2)}
    right, vector = list(tp_shards(state))
    other = 0 if right.offsets[1] else 2
    wrong: list[ShardEntry] = [
        replace(right, tensor=right.tensor.double()),
        replace(right, tensor=right.tensor[:, :1]),
        replace(right, offsets=(0, other)),
        replace(right, global_shape=(8, 5)),
    ]
    for shard in wrong:
        with pytest.raises(ShardMismatchError, match=r"^'w': this rank needs"):
            fill_from_tp_shards(state, [shard, vector])
    with pytest.raises(ShardMismatchError, match=r"^'v'"):
        fill_from_tp_shards(state, [replace(vector, tensor=torch.zeros(1))])
    with pytest.raises(MissingShardError, match=r"no shard of \['v'\]"):
        fill_from_tp_shards(state, [right])
    with pytest.raises(CheckpointError, match="'x', which this state does not have"):
        fill_from_tp_shards(state, [replace(right, fqn="x")])
