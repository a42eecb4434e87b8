"""Ranks that share memory wait for each other only where all of them come, whatever lives on each."""

from __future__ import annotations

import copy
import gc
import os
import sys
import threading
import warnings
from collections import OrderedDict
from datetime import timedelta
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_core import (
    FSDPModule,
    Int8Weight,
    Owned,
    SharedMemoryPolicy,
    fully_shard,
    torch_private,
)
from fsdp_core.comm.shared_memory import axis
from fsdp_core.errors import DesyncError
from fsdp_core.runtime.fsdp_state import state_of
from tests.engine.gang import Gang, Gangs, RankContext
from tests.engine.sharded import local
from tests.engine.test_shared_memory import (
    COPIED,
    ONE_COPY,
    POLICIES,
    local_tensor,
    local_values,
    sharded,
    train,
)
from tests.engine.versus import full
from tests.engine.ways.run import Raising

pytestmark = pytest.mark.ranks

UNITS = 12


@pytest.fixture(autouse=True)
def _on_the_host(device: str) -> None:
    if device != "cpu":
        pytest.skip("memory of the host is shared by CPU ranks")


class _ByMasters(torch.optim.SGD):
    """Updates copies in another dtype, and writes them back."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        self.written = params
        super().__init__([p.detach().double() for p in params], lr=lr)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it takes no closure
        del closure
        for param, master in zip(self.written, self.param_groups[0]["params"], strict=True):
            updated = local_tensor(master).sub_(local_tensor(cast("torch.Tensor", param.grad)))
            local_tensor(param).copy_(updated)


class _Watching(nn.Module):
    """Reads its parameter again and again on rank 1, once the other rank is about to write."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(512))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            torch_private.default_store().wait([WRITING], timedelta(seconds=30))
            for _ in range(3000):
                assert torch.equal(self.weight, torch.ones(512)), "written while it was read"
        return x * self.weight.sum()


WRITING = "tests/shared_memory/writing"


WAYS = [
    "step",
    "load",
    "step by copies",
    "step by closure",
    "step by named closure",
    "step after a fork",
]


@pytest.mark.parametrize("way", WAYS)
def test_nobody_writes_what_another_computes_with(way: str) -> None:
    gang = Gang(2, "cpu")
    gang.run(check_guarded, way)
    gang.close()


def check_guarded(ctx: RankContext, way: str) -> None:
    model = _Watching(ctx.rank)
    fully_shard(model, mesh=ctx.mesh, shared_memory=ONE_COPY, reshard_after_forward=True)
    kind = _ByMasters if way == "step by copies" else torch.optim.SGD
    optimizer = kind(list(model.parameters()), lr=1.0)

    def evaluate() -> float:
        with torch.no_grad():
            model(torch.ones(()))  # which ends on rank 0 while rank 1 still computes
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        if ctx.rank == 0:
            torch_private.default_store().set(WRITING, "")
        return 0.0

    if way == "step after a fork":
        if (child := _forked()) == 0:
            del model, optimizer
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    by_closure = {
        "step by closure": lambda: optimizer.step(evaluate),
        "step by named closure": lambda: optimizer.step(closure=evaluate),
    }
    by_closure.get(way, evaluate)()
    if way in {"step", "step by copies", "step after a fork"}:
        optimizer.step()
    elif way == "load":
        model.load_state_dict({name: value * 0 for name, value in model.state_dict().items()})
    with torch.no_grad():
        if ctx.rank == 1:
            model.rank = 0
        assert model(torch.ones(())).item() == 0


def _forked() -> int:
    with warnings.catch_warnings():
        # Of threads, which the child leaves alone.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def test_an_optimizer_steps_after_the_last_shared_model_is_gone(gangs: Gangs) -> None:
    """With the hook of another library, which was registered after ours."""
    gangs(2).run(check_last_one_gone)


def check_last_one_gone(ctx: RankContext) -> None:
    model = sharded(ctx, COPIED)
    train(ctx, model)
    stepped: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_pre_hook(lambda each, *_: stepped.append(each))
    del model
    gc.collect()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step()
    hook.remove()
    assert stepped == [optimizer]


@POLICIES
def test_a_gather_in_flight_does_not_outlive_an_update(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    """What it announced are the values from before; a rank that lands it late would mix both."""
    gangs(2).run(check_early_gather, policy)


def check_early_gather(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    model, plain = sharded(ctx, policy), sharded(ctx, None)
    for each in (model, plain):
        torch.autograd.backward(each(ctx.batch(0, 3, 7)).square().mean())
    handle = cast("FSDPModule", model[0]).unshard(async_op=True)
    state = state_of(model[0])
    assert state is not None
    assert state.groups[0].is_gathering
    for each in (model, plain):
        torch.optim.SGD(each.parameters(), lr=0.5).step()
    assert not state.groups[0].is_gathering
    assert handle is not None
    handle.wait()
    with torch.no_grad():
        assert torch.equal(model(ctx.batch(1, 3, 7)), plain(ctx.batch(1, 3, 7)))


def test_a_gather_ends_when_all_others_have_copied(gangs: Gangs) -> None:
    """Or an optimizer that is fast could change a slice that another rank is copying."""
    gangs(2).run(check_copied)


def check_copied(ctx: RankContext) -> None:
    model = sharded(ctx, COPIED)
    train(ctx, model)
    state = state_of(model)
    assert state is not None
    comm = state.context.comm
    with torch.no_grad():
        model(ctx.batch(0, 3, 7))
    assert not comm.uncopied
    unit = cast("FSDPModule", model[0])
    handle = unit.unshard(async_op=True)
    assert handle is not None
    handle.wait()
    assert not comm.uncopied
    unit.reshard()


def test_ranks_end_their_uses_in_any_order(gangs: Gangs) -> None:
    """Before an update a rank ends all its uses, and only then waits for those of others."""
    gangs(2).run(check_many_uses)


def check_many_uses(ctx: RankContext) -> None:
    traces = []
    for policy in (None, ONE_COPY):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(UNITS)))
        # Objects lie elsewhere on each rank, and sets of them have another order.
        kept = [nn.Linear(5, 5) for _ in range(100 * ctx.rank)]
        for unit in (*model, model):
            fully_shard(unit, mesh=ctx.mesh, shared_memory=policy)
            kept.extend(nn.Linear(5, 5) for _ in range(7 * ctx.rank))
        cast("FSDPModule", model).set_reshard_after_backward(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            torch.autograd.backward(model(ctx.batch(step, 3, 5)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            for unit in (*model, model):
                cast("FSDPModule", unit).reshard()  # or a copy of what was updated would stay
        traces.append(local_values(model))
    assert all(map(torch.equal, *traces))


@POLICIES
def test_nobody_waits_for_a_rank_whose_model_is_gone(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    """Ranks collect garbage at different times: one may hold a model that the other has let go."""
    gangs(2).run(check_gone, policy)


def check_gone(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    earlier = sharded(ctx, policy)
    with torch.no_grad():
        earlier(ctx.batch(0, 3, 7))  # after which the root stays unsharded, and in use
    if ctx.rank == 0:
        del earlier
        gc.collect()
    dist.barrier()
    train(ctx, sharded(ctx, policy))


@pytest.mark.parametrize("kind", ["plain", "sharded"])
@POLICIES
def test_an_optimizer_of_one_rank_alone_waits_for_nobody(
    gangs: Gangs, policy: SharedMemoryPolicy, kind: str
) -> None:
    gangs(2).run(check_local_optimizer, policy, kind)


def check_local_optimizer(ctx: RankContext, policy: SharedMemoryPolicy, kind: str) -> None:
    model, plain = sharded(ctx, policy), sharded(ctx, None)
    for each in (model, plain):
        with torch.no_grad():
            each(ctx.batch(0, 3, 7))  # after which the root stays unsharded
    group = dist.new_group([0])
    if ctx.rank == 0:
        probe = nn.Linear(3, 3)
        if kind == "sharded":
            fully_shard(probe, mesh=DeviceMesh.from_group(group, "cpu"))
        optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
        torch.autograd.backward(probe(torch.ones(1, 3)).sum())
        optimizer.step()
    assert all(map(torch.equal, train(ctx, model), train(ctx, plain)))


def test_an_optimizer_may_have_slices_without_memory_of_their_own(gangs: Gangs) -> None:
    """A tensor subclass wraps others; units beside it share memory."""
    gangs(2).run(check_wrapped)


def check_wrapped(ctx: RankContext) -> None:
    traces = []
    for policy in (None, ONE_COPY):
        torch.manual_seed(0)
        first = nn.Linear(8, 8)
        first.weight = nn.Parameter(Int8Weight(first.weight.detach()))
        model = nn.Sequential(first, nn.Linear(8, 8))
        for unit in (first, model):
            fully_shard(unit, mesh=ctx.mesh, shared_memory=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            torch.autograd.backward(model(ctx.batch(step, 3, 8)).square().mean())
            with torch.no_grad():
                model(ctx.batch(step, 3, 8))  # after which the root stays unsharded
            optimizer.step()
            optimizer.zero_grad()
            cast("FSDPModule", model).reshard()
        traces.append(model(ctx.batch(2, 3, 8)).detach())
    assert torch.equal(*traces)


@POLICIES
def test_an_optimizer_may_have_owned_matrices_beside_shared_slices(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    """Their owners' mesh has no process group; an evaluation has left the other unit unsharded."""
    gangs(2).run(check_owned_beside, policy)


def check_owned_beside(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    traces = []
    for memory in (None, policy):
        torch.manual_seed(0)
        first = nn.Linear(8, 8, bias=False)
        model = nn.Sequential(first, nn.Linear(8, 8))
        fully_shard(
            first, mesh=ctx.mesh, shared_memory=memory, shard_placement_fn=lambda _: Owned()
        )
        fully_shard(model, mesh=ctx.mesh, shared_memory=memory)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            torch.autograd.backward(model(ctx.batch(step, 3, 8)).square().mean())
            with torch.no_grad():
                model(ctx.batch(step, 3, 8))  # after which the root stays unsharded
            optimizer.step()
            optimizer.zero_grad()
            cast("FSDPModule", model).reshard()
        traces.append(model(ctx.batch(2, 3, 8)).detach())
    assert torch.equal(*traces)


@POLICIES
def test_a_gather_of_a_model_that_is_gone_is_not_in_flight(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    gangs(2).run(check_lost_gather, policy)


def check_lost_gather(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    lost = sharded(ctx, policy)
    unit = lost[0]
    assert isinstance(unit, FSDPModule)
    unit.unshard(async_op=True)
    del lost, unit
    gc.collect()
    model = sharded(ctx, policy)
    unit = model[0]
    assert isinstance(unit, FSDPModule)
    for _ in range(axis._ENTRIES):
        unit.unshard()
        unit.reshard()
    assert all(map(torch.equal, train(ctx, model), train(ctx, sharded(ctx, None))))


@POLICIES
def test_reductions_of_a_model_that_is_gone_have_ended(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    """One rank lets a model go whose backward raised, the other goes on with it."""
    gangs(2).run(check_lost_reductions, policy)


def check_lost_reductions(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    for _ in range(5):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(7, 7) for _ in range(6)))
        for unit in (*model, model):
            fully_shard(unit, mesh=ctx.mesh, shared_memory=policy)
        cast("FSDPModule", model).set_reduce_scatter_max_input_buffers(4)
        x = Raising.of(ctx.batch(0, 3, 7).requires_grad_())
        with pytest.raises(ZeroDivisionError):
            torch.autograd.backward(model(x).sum())
        if ctx.rank == 1:
            cast("FSDPModule", model).reset_iter_state()
        del model, x
        gc.collect()
    dist.barrier()
    assert all(map(torch.equal, train(ctx, sharded(ctx, policy)), train(ctx, sharded(ctx, None))))


def test_an_optimizer_steps_while_another_thread_shards(gangs: Gangs) -> None:
    gangs(2).run(check_step_while_sharding)


def check_step_while_sharding(ctx: RankContext) -> None:
    """The optimizer looks through all groups in shared memory, to which the main thread adds."""
    plain = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    is_over = threading.Event()
    failed: list[RuntimeError] = []

    def step_on() -> None:
        try:
            while not is_over.is_set():
                optimizer.step()
        except RuntimeError as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=step_on)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        kept = [
            fully_shard(nn.Linear(2, 2), mesh=ctx.mesh, shared_memory=COPIED) for _ in range(100)
        ]
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failed
    assert all(isinstance(each, FSDPModule) for each in kept)


def test_threads_without_an_order_are_told_so(gangs: Gangs) -> None:
    """Each rank starts the same two threads, each with a model on the one mesh, in another order."""
    told = gangs(2).run(check_threads)
    assert [each.startswith("Ranks ran different units") for each in told[0] + told[1]] == [
        True
    ] * 4


def check_threads(ctx: RankContext) -> list[str]:
    # A group of its own, for it is of no use afterwards.
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    models = []
    for name in ("first", "other"):
        model = nn.Sequential(OrderedDict([(name, nn.Linear(3, 3))]))
        fully_shard(model, mesh=mesh, shared_memory=COPIED)
        models.append(model)
    told: list[str] = []
    threads = []
    for model in models if ctx.rank == 0 else models[::-1]:
        begun = threading.Event()
        threads.append(threading.Thread(target=_run_out_of_step, args=(model, begun, told)))
        threads[-1].start()
        assert begun.wait(60)
    for thread in threads:
        thread.join()
    return told


def test_threads_with_process_groups_of_their_own_train_at_once(gangs: Gangs) -> None:
    """Each rank starts the same two threads in another order; units of both models have the same names."""
    assert gangs(2).run(check_threads_apart) == [[1.0, 2.0]] * 2


def check_threads_apart(ctx: RankContext) -> list[float]:
    models: list[nn.Linear] = []
    for _ in range(2):
        mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
        models.append(nn.Linear(3, 4, bias=False))
        fully_shard(models[-1], mesh=mesh)
    threads = [
        threading.Thread(target=_go_backward, args=(model, float(index + 1)))
        for index, model in enumerate(models)
    ]
    for thread in threads if ctx.rank == 0 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    grads = [model.weight.grad for model in models]
    return [float(local(grad).mean()) for grad in grads if grad is not None]


def test_threads_with_process_groups_of_their_own_may_cut_for_a_smaller_mesh(gangs: Gangs) -> None:
    """All ranks have built both models in the same order, before the threads begin."""
    assert all(all(alike) for alike in gangs(4).run(check_threads_after_building))


def check_threads_after_building(ctx: RankContext) -> list[bool]:
    meshes = [DeviceMesh.from_group(dist.new_group(range(4)), "cpu") for _ in range(2)]
    wholes = [[nn.Linear(4, 4, bias=False) for _ in range(3)] for _ in meshes]
    models = [nn.Sequential(*copy.deepcopy(whole)) for whole in wholes]
    torch.manual_seed(7)
    for whole, model in zip(wholes, models, strict=True):
        for one, other in zip(whole, model, strict=True):
            nn.init.normal_(one.weight)
            other.load_state_dict(one.state_dict())
    for model, mesh in zip(models, meshes, strict=True):
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=2)
        cast("FSDPModule", model).set_separate_reduce_scatter_group()
    threads = [
        threading.Thread(target=_go_backward, args=(model, float(index + 1), 4))
        for index, model in enumerate(models)
    ]
    for thread in threads if ctx.rank % 2 == 0 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    alike = []
    for index, (whole, model) in enumerate(zip(wholes, models, strict=True)):
        _go_backward(nn.Sequential(*whole), float(index + 1), 4)
        for one, other in zip(whole, model, strict=True):
            assert one.weight.grad is not None
            grad = cast("nn.Linear", other).weight.grad
            assert grad is not None
            alike.append(torch.equal(full(grad), one.weight.grad))
    return alike


def _go_backward(model: nn.Module, value: float, width: int = 3) -> None:
    model(torch.full((1, width), value)).sum().backward()


def _run_out_of_step(model: nn.Module, begun: threading.Event, told: list[str]) -> None:
    unit = cast("FSDPModule", model)
    handle = unit.unshard(async_op=True)
    begun.set()
    assert handle is not None
    try:
        handle.wait()
    except DesyncError as error:
        told.append(str(error))
