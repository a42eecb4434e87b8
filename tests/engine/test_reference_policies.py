"""Policies of PyTorch's own classes mean what they mean there; what is no policy is refused."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core import CPUOffloadPolicy, fully_shard
from fsdp_core.comm import mesh_info_of
from fsdp_core.errors import ArgumentTypeError
from fsdp_core.policy import offload_policy_of
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import decoder, loss_of, tokens_of
from tests.engine.versus import assert_equal, groups_of, ours, theirs, train


@pytest.mark.ranks
def test_policies_of_the_reference_are_taken_as_ours(gangs: Gangs) -> None:
    gangs(2).run(compare_policies)


def compare_policies(ctx: RankContext) -> None:
    traces = []
    for engine in (ours(), theirs()):
        model = decoder()
        precision = engine.precision(torch.bfloat16, torch.float32)
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=ctx.mesh, mp_policy=precision, offload_policy=engine.offload())
        params = [param for group in groups_of(model) for param in group.params]
        assert all(param._memory.offloads for param in params)
        traces.append(
            train(model, lambda m, step: loss_of(m, tokens_of(step, ctx.rank).to(ctx.device)))
        )
    assert_equal(*traces)
    mesh = init_device_mesh(ctx.device.type, (1, 2), mesh_dim_names=("policy_rep", "policy_shard"))
    one, other = (
        mesh_info_of(mesh, engine.mesh_dims(shard="policy_shard", replicate="policy_rep"))
        for engine in (ours(), theirs())
    )
    assert type(one) is type(other)
    assert (
        (one.shard.size, one.replicate.size) == (other.shard.size, other.replicate.size) == (2, 1)
    )


def test_an_offload_policy_is_known_by_its_class_or_refused() -> None:
    given = theirs().offload(pin_memory=False)
    assert offload_policy_of(given) == CPUOffloadPolicy(pin_memory=False)
    plain = type(given).__mro__[1]()
    assert not isinstance(offload_policy_of(plain), CPUOffloadPolicy)
    with pytest.raises(ArgumentTypeError, match="offload_policy is a bool; pass OffloadPolicy"):
        offload_policy_of(True)  # noqa: FBT003 - what is not allowed
