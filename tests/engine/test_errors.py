"""What the engine refuses, in which words, and as which of the reference's types."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_core import fully_shard, observe, register_fsdp_forward_method
from fsdp_core.comm import Ticket
from fsdp_core.errors import (
    ArgumentError,
    ArgumentTypeError,
    EngineError,
    StateError,
    TensorKindError,
    TicketError,
)
from fsdp_core.runtime import NullObserver
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import decoder
from tests.engine.sharded import backward_once, shard_decoder, unit

pytestmark = pytest.mark.ranks


def test_refusals_at_the_call(gangs: Gangs) -> None:
    gangs(1).run(check_refusals)


def check_refusals(ctx: RankContext) -> None:
    mesh = ctx.mesh
    with pytest.raises(ValueError, match="does not support containers that do not implement forw"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=mesh)
    linear = nn.Linear(2, 2)
    fully_shard(linear, mesh=mesh)
    with pytest.raises(AssertionError, match="can only be applied to a module once") as caught:
        fully_shard(linear, mesh=mesh)
    assert isinstance(caught.value, EngineError)
    with pytest.raises(
        AssertionError, match="Shard dim 1 is invalid for 1D tensor: parameter 'bia"
    ):
        fully_shard(nn.Linear(2, 2), mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(ValueError, match="Invalid shard_placement_fn result: 1"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, shard_placement_fn=lambda _: 1)  # type: ignore[arg-type, return-value]  # the fault under test
    nameless = DeviceMesh(ctx.device.type, torch.zeros(1, 1, dtype=torch.int))
    with pytest.raises(AssertionError, match="2D mesh for HSDP with mesh_dim_names specified"):
        fully_shard(nn.Linear(2, 2), mesh=nameless)
    with pytest.raises(ValueError, match="factor of 1, not 3"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=3)


def test_refusals_of_setters(gangs: Gangs) -> None:
    gangs(1).run(check_setters)


def check_setters(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    with pytest.raises(ValueError, match="reshard_after_forward should be a bool, got"):
        unit(model).set_reshard_after_forward(2)  # type: ignore[arg-type]  # the fault under test
    with pytest.raises(ValueError, match="Expects FSDPModule but got"):
        unit(model).set_modules_to_forward_prefetch([nn.Linear(1, 1)])  # type: ignore[list-item]  # the fault under test
    with pytest.raises(ArgumentError, match="does not have a method absent"):
        register_fsdp_forward_method(model, "absent")
    with pytest.raises(ArgumentError, match="is not sharded"):
        observe(nn.Linear(1, 1), NullObserver())
    backward_once(ctx, model)
    with pytest.raises(ArgumentError, match=r"is the unit 'blocks\.0' of another"):
        observe(model.blocks[0], NullObserver())


def test_two_roots_are_refused_by_name(gangs: Gangs) -> None:
    gangs(1).run(check_roots)


def check_roots(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    x = torch.randn(1, 13, device=ctx.device)
    model.blocks[1](x)
    with pytest.raises(RuntimeError, match=r"already been lazily initialized for blocks\.1\n"):
        backward_once(ctx, model)
    pair = [nn.Linear(13, 13), nn.Linear(13, 13)]
    fully_shard(pair, mesh=ctx.mesh)
    with pytest.raises(RuntimeError, match="requires a single root module but got"):
        pair[0](x)


def test_a_parameter_shared_over_two_meshes_is_refused_by_name(gangs: Gangs) -> None:
    gangs(1).run(check_shared)


def check_shared(ctx: RankContext) -> None:
    model = decoder().to(ctx.device)
    fully_shard(model.head, mesh=ctx.mesh)
    other = DeviceMesh.from_group(dist.new_group([0]), ctx.device.type)
    with pytest.raises(ValueError, match=r"'embed\.weight' is shared with a parameter already man"):
        fully_shard(model, mesh=other)


@pytest.mark.parametrize("owns_setattr", [False, True])
def test_a_parameter_that_is_replaced_after_the_first_forward_is_named(
    gangs: Gangs, *, owns_setattr: bool
) -> None:
    gangs(2).run(check_replaced, owns_setattr)


class Watchful(nn.Linear):
    def __setattr__(self, name: str, value: torch.Tensor | nn.Module) -> None:
        super().__setattr__(name, value)


def check_replaced(ctx: RankContext, owns_setattr: bool) -> None:  # noqa: FBT001 - shipped positionally
    """The reference computes with the old one and says nothing."""
    kind = Watchful if owns_setattr else nn.Linear
    model = nn.Sequential(nn.Linear(3, 3), kind(3, 2)).to(ctx.device)
    for layer in (*model, model):
        fully_shard(layer, mesh=ctx.mesh)
    x = torch.ones(4, 3, device=ctx.device)
    expected = model(x).detach()
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    same: dict[str, torch.Tensor] = dict(model.named_parameters())
    assert torch.equal(torch.func.functional_call(model, same, (x,)), expected)
    others = {name: value for name, value in zeros.items() if name == "1.bias"}
    refused = pytest.raises(StateError, match=r"Parameter '1\.bias' was replaced on its module")
    with refused:
        torch.func.functional_call(model, others, (x,))
    assert torch.equal(model(x), expected)
    model[1].bias = nn.Parameter(zeros["1.bias"])
    with refused:
        model(x)
    model.load_state_dict(zeros, assign=True)
    assert not model(x).any()


def test_a_parameter_that_is_gone_before_the_first_forward_is_named(gangs: Gangs) -> None:
    gangs(2).run(check_gone)


def check_gone(ctx: RankContext) -> None:
    def sharded() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to(ctx.device)
        fully_shard(model, mesh=ctx.mesh)
        return model

    def refused(how: str) -> pytest.RaisesExc[ArgumentTypeError]:
        return pytest.raises(ArgumentTypeError, match=rf"Parameter '1\.weight' {how}")

    x = torch.ones(4, 3, device=ctx.device)
    model = sharded()
    values = {name: value.detach() for name, value in model.named_parameters()}
    others = {name: value for name, value in values.items() if name == "1.weight"}
    with refused("was replaced by a plain tensor"):
        torch.func.functional_call(model, others, (x,))
    assert model(x).shape == (4, 2)

    parametrized = sharded()
    nn.utils.parametrizations.weight_norm(parametrized[1])
    with refused("is registered no more"):
        parametrized(x)


@pytest.mark.parametrize("world", [1, 2])
def test_a_sparse_gradient_is_refused_by_name(gangs: Gangs, world: int) -> None:
    gangs(world).run(check_sparse)


def check_sparse(ctx: RankContext) -> None:
    model = nn.Embedding(8, 4, sparse=True).to(ctx.device)
    fully_shard(model, mesh=ctx.mesh)
    loss = model(torch.tensor([1, 2, 1], device=ctx.device)).sum()
    with pytest.raises(TensorKindError, match="gradient of parameter 'weight' is sparse"):
        torch.autograd.backward(loss)
    model.sparse = False
    torch.autograd.backward(model(torch.tensor([1, 2, 1], device=ctx.device)).sum())
    assert model.weight.grad is not None


def test_view_output_is_warned_of(gangs: Gangs) -> None:
    gangs(1).run(check_view)


class Flattened(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(-1)


def check_view(ctx: RankContext) -> None:
    model = Flattened(2, 2)
    fully_shard(model, mesh=ctx.mesh)
    with pytest.warns(UserWarning, match=r"FSDP2-wrapped module \(FSDPFlattened\) returned a view"):
        model(torch.randn(1, 2, device=ctx.device))


def test_a_ticket_is_waited_for_once() -> None:
    ticket = Ticket(None, torch.ones(1), on_complete=lambda: None)
    assert cast("float", ticket.wait().item()) == 1.0
    with pytest.raises(TicketError, match="waited for before"):
        ticket.wait()
