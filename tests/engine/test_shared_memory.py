"""Ranks of one host that share memory: faults, refusals and guards; the grid has the numbers."""

from __future__ import annotations

import logging
import os
import pickle
import re
import resource
import select
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_core import (
    FSDPModule,
    MixedPrecisionPolicy,
    Owned,
    SharedMemoryPolicy,
    fully_shard,
    torch_private,
)
from fsdp_core.comm.shared_memory import Counters, axis, host_axes_of
from fsdp_core.comm.shared_memory.peers import Meeting, meet
from fsdp_core.comm.strategies import DefaultAllGather
from fsdp_core.errors import DesyncError, PeerError
from tests.engine.gang import Gang, Gangs, RankContext
from tests.engine.test_desync import Choosing, train_out_of_step
from tests.engine.test_desync import train as train_choosing
from tests.waiting import until

pytestmark = pytest.mark.ranks

COPIED = SharedMemoryPolicy()
ONE_COPY = SharedMemoryPolicy(share_storage=True)
POLICIES = pytest.mark.parametrize("policy", [COPIED, ONE_COPY], ids=["copied", "one copy"])
NOTICED_WITHIN_S = 1.0


@pytest.fixture(autouse=True)
def _on_the_host(device: str) -> None:
    if device != "cpu":
        pytest.skip("memory of the host is shared by CPU ranks")


def sharded(
    ctx: RankContext, policy: SharedMemoryPolicy | None, **options: object
) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5), nn.Linear(5, 4))
    for unit in (model[0], model[2], model):
        fully_shard(unit, mesh=ctx.mesh, shared_memory=policy, **options)  # type: ignore[call-overload]
    return model


def train(ctx: RankContext, model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x = ctx.batch(step, 3, 7).to(next(model.parameters()).dtype)
        torch.autograd.backward(model(x).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return local_values(model)


def local_values(model: nn.Module) -> list[torch.Tensor]:
    return [local_tensor(value).clone() for value in model.state_dict().values()]


# -- Numbers beyond the grid's


@POLICIES
def test_no_collective_of_the_process_group_is_started(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    gangs(2).run(check_no_collectives, policy)


def check_no_collectives(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    model = sharded(ctx, policy)
    with torch.profiler.profile() as profile:
        train(ctx, model)
    assert not [event.name for event in profile.events() if "gloo:" in event.name]


@POLICIES
def test_another_dtype_and_loaded_values_are_taken_over(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    gangs(2).run(check_replaced, policy)


def check_replaced(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    traces = []
    for each in (None, policy):
        model = sharded(ctx, each)
        first = train(ctx, model)
        model.load_state_dict(
            {name: value.detach() * 2 for name, value in model.state_dict().items()}
        )
        second = train(ctx, model)
        model.to(torch.bfloat16)
        third = train(ctx, model)
        model.load_state_dict(
            {name: value.detach().float() for name, value in model.state_dict().items()},
            assign=True,
        )
        traces.append([*first, *second, *third, *train(ctx, model)])
    assert all(map(torch.equal, *traces))


@POLICIES
def test_groups_that_cannot_share_slices_still_train(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    gangs(2).run(check_owned, policy)


def check_owned(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    def owned(param: nn.Parameter) -> Owned | None:
        return Owned() if param.shape == (13, 7) else None

    traces = [train(ctx, sharded(ctx, each, shard_placement_fn=owned)) for each in (None, policy)]
    assert all(map(torch.equal, *traces))


@POLICIES
def test_parameters_without_elements_take_part(gangs: Gangs, policy: SharedMemoryPolicy) -> None:
    gangs(2).run(check_without_elements, policy)


def check_without_elements(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    model = nn.Linear(4, 4)
    model.extra = nn.Parameter(torch.empty(0, 4))
    fully_shard(model, mesh=ctx.mesh, shared_memory=policy)
    torch.autograd.backward(model(torch.ones(1, 4)).sum() + model.extra.sum())
    assert model.extra.grad is not None
    assert model.extra.grad.shape == (0, 4)


class Extra(nn.Module):
    """Computes with a parameter that has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + (x @ self.extra.t()).sum()
        return result


@pytest.mark.parametrize("policy", [None, COPIED, ONE_COPY], ids=["none", "copied", "one copy"])
def test_a_unit_without_elements_goes_forward_and_backward_at_every_step(
    gangs: Gangs, policy: SharedMemoryPolicy | None
) -> None:
    """Autograd saves what has no elements too, and would refuse it as modified."""
    gangs(2).run(check_unit_without_elements, policy)


def check_unit_without_elements(ctx: RankContext, policy: SharedMemoryPolicy | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Extra(), nn.Linear(4, 4))
    for unit in (model[1], model):
        fully_shard(unit, mesh=ctx.mesh, shared_memory=policy)
    assert isinstance(model, FSDPModule)
    model.set_agree_on_unused_params(False)
    for step in range(3):
        torch.autograd.backward(model(ctx.batch(step, 2, 4)).sum())
        grad = model.get_parameter("1.extra").grad
        assert grad is not None
        assert grad.shape == (0, 4)


@POLICIES
def test_what_one_rank_has_alone_is_divided_before_the_sum(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    """Then the other rank has nothing to be given."""
    gangs(2).run(check_one_row, policy)


def check_one_row(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    grads = []
    for each in (None, policy):
        torch.manual_seed(0)
        model = nn.Linear(6, 1, bias=False)
        fully_shard(model, mesh=ctx.mesh, shared_memory=each)
        assert isinstance(model, FSDPModule)
        model.set_agree_on_unused_params(False)
        model.set_gradient_divide_factor(3.0)
        torch.autograd.backward(model(ctx.batch(0, 2, 6)).sum())
        grads.append(torch_private.local_tensor(cast("DTensor", model.weight.grad)))
    assert torch.equal(*grads)


@POLICIES
def test_a_dtype_that_inference_sees_first_can_be_trained(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    gangs(2).run(check_inference_first, policy)


def check_inference_first(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    traces = []
    for each in (None, policy):
        model = sharded(ctx, each)
        for module in model:
            for name, param in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(param.detach().double()))
        with torch.inference_mode():
            model(ctx.batch(0, 3, 7).double())
        traces.append(train(ctx, model))
    assert all(map(torch.equal, *traces))


@POLICIES
def test_a_gather_of_the_users_fills_what_autograd_has_saved(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    gangs(2).run(check_custom_gather, policy)


def check_custom_gather(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    traces = []
    for each in (None, policy):
        model = sharded(ctx, each)
        for unit in (model[0], model[2], model):
            cast("FSDPModule", unit).set_custom_all_gather(DefaultAllGather())
        traces.append(train(ctx, model))
    assert all(map(torch.equal, *traces))


@POLICIES
def test_a_slice_may_have_the_methods_of_an_extension_for_a_while(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    gangs(2).run(check_methods_for_a_while, policy)


def check_methods_for_a_while(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    model = sharded(ctx, policy)
    assert isinstance(model, FSDPModule)

    def outputs() -> torch.Tensor:
        model.load_state_dict(model.state_dict())  # methods are looked for at a load
        with torch.no_grad():
            result: torch.Tensor = model(ctx.batch(0, 3, 7)).clone()
        model.reshard()
        return result

    before = outputs()
    local = torch_private.local_tensor(cast("DTensor", model[3].bias))
    methods: dict[str, Callable[..., object]] = {
        "fsdp_pre_all_gather": pre_gather,
        "fsdp_post_all_gather": post_gather,
    }
    for name, method in methods.items():
        setattr(local, name, partial(method, local))
    assert torch.equal(outputs(), before)
    for name in methods:
        delattr(local, name)
    assert torch.equal(outputs(), before)
    assert torch.equal(outputs(), before)


def pre_gather(self: torch.Tensor, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor], None]:
    del mesh
    return (self,), None


def post_gather(
    self: torch.Tensor,
    outputs: tuple[torch.Tensor],
    sent: None,
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor]] | None:
    del self, sent, dtype
    return (outputs[0], outputs) if out is None else None


def test_parameters_that_are_cast_are_not_one_copy_but_train_alike(gangs: Gangs) -> None:
    gangs(2).run(check_cast)


def check_cast(ctx: RankContext) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    traces = [train(ctx, sharded(ctx, each, mp_policy=policy)) for each in (None, ONE_COPY)]
    assert all(map(torch.equal, *traces))


def test_ranks_compute_with_one_copy(gangs: Gangs) -> None:
    """What one rank writes into its slice is in the whole parameter of the other."""
    gangs(2).run(check_one_copy)


def check_one_copy(ctx: RankContext) -> None:
    model = sharded(ctx, ONE_COPY)
    train(ctx, model)
    unit = cast("FSDPModule", model[0])
    mine = local_tensor(model[0].get_parameter("weight")).data_ptr()
    unit.unshard()
    whole = model[0].get_parameter("weight")
    assert whole.shape == (13, 7)
    assert whole.data_ptr() <= mine < whole.data_ptr() + whole.untyped_storage().nbytes()
    dist.barrier()
    with torch.no_grad():
        whole[0 if ctx.rank == 0 else -1] = 1 + ctx.rank
    dist.barrier()
    assert torch.equal(whole[0], torch.ones(7))
    assert torch.equal(whole[-1], torch.full((7,), 2.0))
    unit.reshard()


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    assert isinstance(param, DTensor)
    return param.to_local()


# -- Faults


@POLICIES
def test_a_peer_that_is_killed_is_noticed_and_named(
    policy: SharedMemoryPolicy,
) -> None:
    gang = Gang(2, "cpu")
    gang._send((check_killed.__module__, check_killed.__qualname__, (policy,), {}))
    # Of the other rank there is no answer.
    (told, seconds, mapped), failure = pickle.loads(gang._pipes[0].recv_bytes())  # noqa: S301 - our own child's
    assert failure is None
    assert re.fullmatch(
        r"Rank 1 of group '\w+' ended while rank 0 waited for it in the all-gather of "
        r"'2\.weight' and 1 more\. Look at its log for why\.",
        told,
    )
    assert seconds < NOTICED_WITHIN_S
    # Files without a name: they end with the last process that maps them.
    assert mapped == {"/memfd:fsdp_core (deleted)"}
    gang.kill()


def check_killed(ctx: RankContext, policy: SharedMemoryPolicy) -> tuple[str, float, set[str]]:
    model = sharded(ctx, policy)
    train(ctx, model, steps=1)
    if ctx.rank == 1:
        # Before the engine's own hook, which would announce the next gather.
        model[0].register_forward_pre_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL), prepend=True
        )
    axes = host_axes_of(ctx.mesh.get_group(0))
    assert axes is not None
    (peer,) = axes.within.peers.others
    died: list[float] = []
    watch = threading.Thread(target=lambda: died.append(_end_of(peer.process)))
    watch.start()
    with pytest.raises(PeerError) as caught:
        model(ctx.batch(0, 3, 7))
    noticed = monotonic()
    watch.join()
    return str(caught.value), noticed - died[0], shared_files()


def shared_files() -> set[str]:
    """What this process writes together with others."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {line[5] for line in lines if line[1] == "rw-s" and len(line) > 5}


def _end_of(process: int) -> float:
    select.select([process], [], [])
    return monotonic()


@POLICIES
@pytest.mark.parametrize("skipped_for", ["twin", "other"])
def test_a_unit_that_some_ranks_skip_is_named(policy: SharedMemoryPolicy, skipped_for: str) -> None:
    gang = Gang(2, "cpu")
    for told in gang.run(check_skipped, policy, skipped_for):
        assert told.startswith("Ranks ran different units: collective number ")
        one, other = re.findall(r"all-gather of '(\w+)\.weight' and 1 more on rank \d", told)
        assert one != other
    gang.kill()


def check_skipped(ctx: RankContext, policy: SharedMemoryPolicy, skipped_for: str) -> str:
    model = Choosing()
    for unit in (model.first, model.twin, model.other, model):
        fully_shard(unit, mesh=ctx.mesh, shared_memory=policy)
    train_choosing(model, ["first", "twin", "other"])
    with pytest.raises(DesyncError) as caught:
        train_out_of_step(ctx, model, skipped_for)
    return str(caught.value)


def test_without_address_space_all_ranks_use_their_process_group() -> None:
    gang = Gang(2, "cpu")
    told = gang.run(check_no_address_space)
    assert "share no memory, and communicate by its process group: " in told[0]
    assert "rank 1: [Errno 12] Cannot allocate memory" in told[0]
    assert told[1] == ""
    gang.kill()


def check_no_address_space(ctx: RankContext) -> str:
    logger, told = logging.getLogger("fsdp_core"), _Told()
    logger.addHandler(told)
    if ctx.rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 38, resource.RLIM_INFINITY))
    traces = [train(ctx, sharded(ctx, policy)) for policy in (COPIED, None)]
    logger.removeHandler(told)
    assert all(map(torch.equal, *traces))
    assert host_axes_of(ctx.mesh.get_group(0)) is None
    assert len(told.messages) == (ctx.rank == 0)
    return "".join(told.messages)


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_ranks_that_shard_different_units_are_told_so() -> None:
    gang = Gang(2, "cpu")
    for told in gang.run(check_different_sizes):
        assert re.search(r"shares \d+ bytes, but rank \d shares \d+\. Shard the same units", told)
    gang.kill()


def check_different_sizes(ctx: RankContext) -> str:
    with pytest.raises(PeerError) as caught:
        fully_shard(nn.Linear(7, 1000 * (1 + 9 * ctx.rank)), mesh=ctx.mesh, shared_memory=COPIED)
    return str(caught.value)


@POLICIES
def test_training_goes_on_after_an_exception(gangs: Gangs, policy: SharedMemoryPolicy) -> None:
    gangs(2).run(check_exception, policy)


def check_exception(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    model = sharded(ctx, policy)
    handle = model[1].register_forward_hook(_raise)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(ctx.batch(0, 3, 7))
    handle.remove()
    assert all(map(torch.equal, train(ctx, model), train(ctx, sharded(ctx, None))))


def _raise(*_: object) -> None:
    raise RuntimeError("on purpose")


# -- The parts


def test_a_waiting_thread_sleeps_until_the_word_is_set(gangs: Gangs) -> None:
    gangs(2).run(check_counters)


def check_counters(ctx: RankContext) -> None:
    group = dist.new_group([0, 1])
    meeting = meet(group, "")
    assert isinstance(meeting, Meeting)
    peers = meeting.peers
    segments = peers.exchange(4096)
    mine, theirs = (Counters(segments[rank], 0, 1) for rank in (ctx.rank, 1 - ctx.rank))
    # Past the largest number that a word holds, too.
    for value in (1, 2, 2**31, 2**32 - 1, 2**32, 2**32 + 5):
        mine.publish(0, value)
        until(partial(theirs.wait, 0, value, 0.1))
        assert theirs.has_reached(0, value)
        assert not theirs.has_reached(0, value + 1)
        dist.barrier(group)
    peers.close()


def test_a_stranger_that_knows_the_address_is_not_taken_for_a_rank() -> None:
    gang = Gang(2, "cpu")
    gang.run(check_stranger)
    gang.close()


def check_stranger(ctx: RankContext) -> None:
    """A process of the host sees the names of abstract sockets, and may connect."""
    found = threading.Event()
    if ctx.rank == 0:
        thread = threading.Thread(target=_knock, args=(found,), daemon=True)
        thread.start()
        found.wait(30)
    meeting = meet(ctx.mesh.get_group(0), "")
    assert isinstance(meeting, Meeting), meeting
    peers = meeting.peers
    assert peers.exchange(4096)
    peers.close()


def _knock(found: threading.Event) -> None:
    import socket  # noqa: PLC0415 - of this thread alone

    found.set()
    deadline = monotonic() + 30
    while monotonic() < deadline:
        names = re.findall(r"@(fsdp_core/[0-9a-f]{32})", Path("/proc/net/unix").read_text())
        for name in names:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                try:
                    stranger.connect(f"\0{name}")
                    stranger.sendall(b"\1\0\0\0" + bytes(16))
                except OSError:
                    continue
                return


def test_patience_is_that_of_a_process_group() -> None:
    assert timedelta(minutes=30).total_seconds() == axis.GIVEN_UP_AFTER_S
