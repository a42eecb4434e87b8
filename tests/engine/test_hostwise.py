"""Groups on several hosts: memory within each, gloo between. Parts of this host stand for hosts."""

from __future__ import annotations

import logging
import os
import pickle
import re
import select
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_core import MixedPrecisionPolicy, SharedMemoryPolicy, fully_shard
from fsdp_core.comm import HostwiseCollectives, desync, host_axes_of
from fsdp_core.errors import DesyncError, PeerError
from tests.engine.gang import Gang, Gangs, RankContext
from tests.engine.sharded import state, unit
from tests.engine.test_desync import Choosing, train_out_of_step
from tests.engine.test_shared_memory import NOTICED_WITHIN_S, _Told

pytestmark = pytest.mark.ranks

TWO_BY_TWO = ("a", "a", "b", "b")


@pytest.fixture(autouse=True)
def _on_the_host(device: str) -> None:
    if device != "cpu":
        pytest.skip("memory of the host is shared by CPU ranks")


def policy_on(ctx: RankContext, parts: Sequence[str]) -> SharedMemoryPolicy:
    return SharedMemoryPolicy(part_of_host=parts[ctx.rank])


def of_its_own(ctx: RankContext) -> DeviceMesh:
    """What a group's hosts are is found out once, so each test has groups of its own."""
    group = dist.new_group()
    return DeviceMesh.from_group(group, ctx.device.type) if group is not None else ctx.mesh


def sharded(
    ctx: RankContext, policy: SharedMemoryPolicy | None, **options: object
) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5), nn.Linear(5, 4))
    options = {"mesh": ctx.mesh if policy is None else of_its_own(ctx), **options}
    for layer in (model[0], model[2], model):
        fully_shard(layer, shared_memory=policy, **options)  # type: ignore[call-overload]
    return model


def train(ctx: RankContext, model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """The losses, and the slices at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(steps):
        loss = model(ctx.batch(step, 3, 7)).float().square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return [*seen, *(local(value).clone() for value in model.state_dict().values())]


def local(param: nn.Parameter) -> torch.Tensor:
    assert isinstance(param, DTensor)
    return param.to_local()


def close(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        for one, other in zip(ones, others, strict=True)
    )


def is_hostwise(model: nn.Module) -> bool:
    axes = [group._new_route().shards for group in state(model).groups]
    return all(isinstance(axis, HostwiseCollectives) for axis in axes)


# -- Numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_without_rounding_are_equal_to_the_last_bit(gangs: Gangs, dtype: torch.dtype) -> None:
    gangs(4).run(check_exact, dtype)


def check_exact(ctx: RankContext, dtype: torch.dtype) -> None:
    grads = []
    for policy in (policy_on(ctx, TWO_BY_TWO), None):
        model = nn.Linear(3, 6, bias=False)
        nn.init.constant_(model.weight, 1.0)
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        fully_shard(model, mesh=of_its_own(ctx), mp_policy=mixed, shared_memory=policy)
        x = torch.arange(6.0).view(2, 3) + ctx.rank
        torch.autograd.backward(model(x).float().sum())
        grad = model.weight.grad
        assert isinstance(grad, DTensor)
        grads.append(grad.to_local())
    # The mean over ranks of sums of whole numbers.
    assert torch.equal(grads[0], (torch.tensor([3.0, 5.0, 7.0]) + 3).expand_as(grads[0]))
    assert torch.equal(*grads)


def test_what_else_the_group_does_goes_on(gangs: Gangs) -> None:
    gangs(4).run(check_options)


def check_options(ctx: RankContext) -> None:
    policy = policy_on(ctx, TWO_BY_TWO)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({"mp_policy": bf16}, {"reshard_after_forward": False}):
        models = [sharded(ctx, each, **options) for each in (policy, None)]
        assert close(*(train(ctx, model) for model in models))
    for change in (sums_alone, two_in_flight, own_factor):
        models = [sharded(ctx, each) for each in (policy, None)]
        for model in models:
            change(model)
        assert close(*(train(ctx, model) for model in models))


def sums_alone(model: nn.Sequential) -> None:
    for each in (model[0], model[2], model):
        unit(each).set_force_sum_reduction_for_comms(True)


def two_in_flight(model: nn.Sequential) -> None:
    unit(model).set_reduce_scatter_max_input_buffers(2)


def own_factor(model: nn.Sequential) -> None:
    for each in (model[0], model[2], model):
        unit(each).set_gradient_divide_factor(3.0)


def test_parameters_that_some_ranks_do_not_use(gangs: Gangs) -> None:
    gangs(4).run(check_unused)


def check_unused(ctx: RankContext) -> None:
    traces = []
    for policy in (policy_on(ctx, TWO_BY_TWO), None):
        torch.manual_seed(1)
        model = Choosing()
        fully_shard(model, mesh=of_its_own(ctx), shared_memory=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            chosen = ["first", "other"] if (ctx.rank + step) % 3 else ["other"]
            torch.autograd.backward(model(ctx.batch(step, 2, 4), chosen))
            assert local_grads(model)["twin.weight"] is None
            optimizer.step()
            optimizer.zero_grad()
        traces.append([local(each).clone() for each in model.parameters()])
    assert close(*traces)


def local_grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: each.grad.to_local() if isinstance(each.grad, DTensor) else None
        for name, each in model.named_parameters()
    }


def test_wrong_guesses_of_what_comes_next_and_exceptions_leave_ranks_in_step(gangs: Gangs) -> None:
    gangs(4).run(check_in_step)


def check_in_step(ctx: RankContext) -> None:
    policy = policy_on(ctx, TWO_BY_TWO)
    traces = []
    for each in (policy, None):
        torch.manual_seed(1)
        model = Choosing()
        mesh = of_its_own(ctx)
        for layer in (model.first, model.twin, model.other, model):
            fully_shard(layer, mesh=mesh, shared_memory=each)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        orders = (["first", "twin", "other"], ["other", "first"], ["twin"], ["first", "other"])
        for step, chosen in enumerate(orders):
            torch.autograd.backward(model(ctx.batch(step, 2, 4), chosen))
            optimizer.step()
            optimizer.zero_grad()
        handle = model.twin.register_forward_hook(_raise)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(ctx.batch(9, 2, 4), ["first", "twin", "other"])
        handle.remove()
        torch.autograd.backward(model(ctx.batch(5, 2, 4), ["first", "twin", "other"]))
        optimizer.step()
        traces.append([local(param).clone() for param in model.parameters()])
    assert close(*traces)


def _raise(*_: object) -> None:
    raise RuntimeError("on purpose")


# -- Hosts that are of no use


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ("aaab", "hosts have different numbers of them, or have them not side by side"),
        ("abab", "hosts have different numbers of them, or have them not side by side"),
        ("abcd", "each is on a host, or of a user, of its own"),
    ],
)
def test_other_hosts_leave_it_to_the_process_group(gangs: Gangs, parts: str, reason: str) -> None:
    gangs(4).run(check_of_no_use, parts, reason)


def check_of_no_use(ctx: RankContext, parts: str, reason: str) -> None:
    logger, told = logging.getLogger("fsdp_core"), _Told()
    logger.addHandler(told)
    policy = replace(policy_on(ctx, parts), share_storage=True)
    mesh = of_its_own(ctx)
    traces = [train(ctx, sharded(ctx, each, mesh=mesh)) for each in (policy, None)]
    logger.removeHandler(told)
    assert all(map(torch.equal, *traces))
    assert len([each for each in told.messages if reason in each]) == (ctx.rank == 0)
    assert host_axes_of(mesh.get_group(0)) is None


# -- Faults


def test_a_rank_of_this_host_that_is_killed_is_noticed_and_named() -> None:
    gang = Gang(4, "cpu")
    gang._send((check_killed.__module__, check_killed.__qualname__, (), {}))
    # Of the killed rank there is no answer. Those of the other host wait until ranks that raised end, which
    # those of a gang do not.
    (told, seconds), failure = pickle.loads(gang._pipes[0].recv_bytes())  # noqa: S301 - our own child's
    assert failure is None
    assert re.match(r"Rank 1 of group '.+ \(ranks of one host\)' ended while rank 0 waited", told)
    assert seconds < NOTICED_WITHIN_S
    gang.kill()


def check_killed(ctx: RankContext) -> tuple[str, float]:
    model = sharded(ctx, policy_on(ctx, TWO_BY_TWO), mesh=ctx.mesh)
    train(ctx, model, steps=1)
    if ctx.rank == 1:
        # Before the engine's own hook, which would start the next gather.
        model[0].register_forward_pre_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL), prepend=True
        )
    axes = host_axes_of(ctx.mesh.get_group(0))
    assert axes is not None
    (peer,) = axes.within.peers.others
    died: list[float] = []
    watch = threading.Thread(target=lambda: died.append(_end_of(peer.process)), daemon=True)
    watch.start()
    with pytest.raises(PeerError if ctx.rank == 0 else RuntimeError) as caught:
        model(ctx.batch(0, 3, 7))
    noticed = monotonic()
    if ctx.rank == 0:
        watch.join()
    return str(caught.value), noticed - died[0] if died else 0.0


def _end_of(process: int) -> float:
    select.select([process], [], [])
    return monotonic()


def test_ranks_out_of_step_are_named() -> None:
    gang = Gang(4, "cpu")
    for told in gang.run(check_skipped):
        assert told.startswith("Ranks ran different units: collective number ")
    gang.kill()


def check_skipped(ctx: RankContext) -> str:
    desync.PATIENCE /= 10
    model = Choosing()
    for layer in (model.first, model.twin, model.other, model):
        fully_shard(layer, mesh=ctx.mesh, shared_memory=policy_on(ctx, TWO_BY_TWO))
    with pytest.raises(DesyncError) as caught:
        train_out_of_step(ctx, model, "twin")
    return str(caught.value)


# -- More ranks, for which a gang of its own size is started


@pytest.mark.parametrize("hosts", ["aabb", "aabbcc", "aaabbb"])
def test_losses_are_those_of_the_process_group(gangs: Gangs, hosts: str) -> None:
    gangs(len(hosts)).run(check_losses, hosts)


def check_losses(ctx: RankContext, hosts: str) -> None:
    model = sharded(ctx, policy_on(ctx, hosts))
    assert is_hostwise(model)
    assert close(train(ctx, model), train(ctx, sharded(ctx, None)))
