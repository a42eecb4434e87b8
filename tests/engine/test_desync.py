"""Ranks that fall out of step are told so by name; slow ones are left in peace."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_core import SharedMemoryPolicy, clip_grad_norm_, fully_shard, torch_private
from fsdp_core.comm import DefaultAllGather, desync
from fsdp_core.errors import DesyncError
from tests.engine.gang import Gang, Gangs, RankContext
from tests.engine.test_chunked_loss import WIDTH, Headless
from tests.engine.versus import Engine, engines, ours, theirs
from tests.engine.ways.run import Raising

pytestmark = pytest.mark.ranks

# Newer PyTorch has another name for some.
WRAPPED = (
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
)
PATIENCE = timedelta(seconds=0.5)


class Choosing(nn.Module):
    """Runs the units that it is told to; `twin` has the same shapes as `first`, `other` has not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.twin = nn.Linear(4, 4)
        self.other = nn.Linear(4, 9)

    def forward(self, x: torch.Tensor, chosen: list[str]) -> torch.Tensor:
        total = x.sum()
        for name in chosen:
            total = total + self.get_submodule(name)(x).sum()
        return total


@pytest.mark.parametrize("skipped_for", ["twin", "other"])
def test_a_unit_that_some_ranks_skip_is_named(skipped_for: str) -> None:
    gang = Gang(2, "cpu")  # of its own: its process group is of no use afterwards
    for told in gang.run(check_skipped, skipped_for):
        assert told.startswith("Ranks ran different units: collective number ")
        one, other = re.findall(
            r"all-gather of '(\w+)\.weight' and 1 more \(\d+ elements of float32\) on rank \d", told
        )
        assert one != other
    gang.kill()


def check_skipped(ctx: RankContext, skipped_for: str) -> str:
    desync.PATIENCE = PATIENCE
    model = sharded(ctx)
    train(model, ["first", "twin", "other"])
    with pytest.raises(DesyncError) as caught:
        train_out_of_step(ctx, model, skipped_for)
    return str(caught.value)


def train_out_of_step(ctx: RankContext, model: Choosing, skipped_for: str) -> None:
    for _ in range(3):
        train(model, ["first", "other"] if ctx.rank == 0 else [skipped_for, "other"])
        train(model, ["other"])


@pytest.mark.parametrize(
    ("raises", "replicates"),
    [(False, False), (True, False), (False, True)],
    ids=["sharded", "sharded, one raised", "replicated"],
)
def test_ranks_that_part_in_backward_are_told_so(*, raises: bool, replicates: bool) -> None:
    gang = Gang(2, "cpu")  # of its own: its process group is of no use afterwards
    for told in gang.run(check_parting, raises, replicates):
        assert told.startswith("Ranks ran different units: collective number ")
        assert "all-reduce of" in told if replicates else "reduce-scatter of" in told
    gang.kill()


def check_parting(ctx: RankContext, raises: bool, replicates: bool) -> str:  # noqa: FBT001 - shipped positionally
    """Rank 0 leaves units out of its backward, or does not end it, when the other reduces as ever."""
    desync.PATIENCE = PATIENCE
    torch.manual_seed(5)
    model: Any = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]).to(ctx.device)
    mesh = ctx.mesh
    if replicates:
        mesh = init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)

    def step(times: int = 1) -> None:
        for _ in range(times):
            torch.autograd.backward(model(torch.ones(2, 4, device=ctx.device)).sum())

    step(3)
    if ctx.rank == 0:
        change = Raising.of if raises else torch.Tensor.detach
        hook = model[0].register_forward_hook(lambda _, __, output: change(output))
        if raises:
            with pytest.raises(ZeroDivisionError):
                step()
            hook.remove()
    with pytest.raises(DesyncError) as caught:
        step(3)
    return str(caught.value)


def test_ranks_whose_parameters_have_different_dtypes_are_told_so() -> None:
    """Gloo ends the process that gets a longer message than it expects."""
    gang = Gang(2, "cpu")  # of its own: its process group is of no use afterwards
    for told in gang.run(check_dtypes):
        assert "all-gather of '0.weight' and 1 more (20 elements of float32) on rank 0" in told
        assert "all-gather of '0.weight' and 1 more (20 elements of bfloat16) on rank 1" in told
    gang.kill()


def check_dtypes(ctx: RankContext) -> str:
    desync.PATIENCE = PATIENCE
    model: Any = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)]).to(ctx.device)
    for unit in (*model, model):
        fully_shard(unit, mesh=ctx.mesh)
    for _ in range(3):
        torch.autograd.backward(model(torch.ones(2, 4, device=ctx.device)).sum())
    dtype = torch.float32 if ctx.rank == 0 else torch.bfloat16
    model.to(dtype)
    with pytest.raises(DesyncError) as caught:
        model(torch.ones(2, 4, device=ctx.device, dtype=dtype))
    return str(caught.value)


@pytest.mark.parametrize("shares", [False, True], ids=["process group", "shared memory"])
def test_ranks_that_froze_different_parameters_of_one_size_are_told_so(*, shares: bool) -> None:
    gang = Gang(2, "cpu")  # of its own: its process group is of no use afterwards
    for told in gang.run(check_frozen, shares):
        assert "reduce-scatter of '0.weight', '0.bias' (" in told
        assert "reduce-scatter of '0.bias', '1.weight' (" in told
    gang.kill()


def check_frozen(ctx: RankContext, shares: bool) -> str:  # noqa: FBT001 - shipped positionally
    """As where each rank chooses by a seed of its own which layers to train."""
    desync.PATIENCE = PATIENCE
    model = nn.Sequential(*[nn.Linear(4, 4, bias=index == 0) for index in range(2)])
    fully_shard(model, mesh=ctx.mesh, shared_memory=SharedMemoryPolicy() if shares else None)
    model.get_submodule(str(1 - ctx.rank)).requires_grad_(requires_grad=False)
    model.get_parameter("0.bias").requires_grad_()
    with pytest.raises(DesyncError) as caught:
        torch.autograd.backward(model(torch.ones(2, 4)).sum())
    return str(caught.value)


def test_a_rank_that_clips_while_others_go_backward_is_told_so() -> None:
    gang = Gang(2, "cpu")  # of its own: its process group is of no use afterwards
    for told in gang.run(check_clipping):
        assert "all-reduce of the gradients' norms" in told
    gang.kill()


def check_clipping(ctx: RankContext) -> str:
    """Rank 0 leaves its last backward out, as it may for a loss that is not finite."""
    desync.PATIENCE = PATIENCE
    model = sharded(ctx)
    for _ in range(3):
        train(model, ["first", "twin"])
        clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(DesyncError) as caught:
        train_or_clip(ctx, model)
    return str(caught.value)


def train_or_clip(ctx: RankContext, model: Choosing) -> None:
    loss = model(torch.ones(2, 4, device=ctx.device), ["first", "twin"])
    if ctx.rank == 1:
        torch.autograd.backward(loss)
    clip_grad_norm_(model.parameters(), 1.0)


def test_a_rank_whose_collective_raised_before_it_started_is_named() -> None:
    gang = Gang(2, "cpu")  # of its own: its process group is of no use afterwards
    for told in gang.run(check_unstarted):
        assert (
            "all-gather of 'first.weight' and 1 more (20 elements of float32), which raised before it started"
            in told
        )
    gang.kill()


class WithoutMemory(DefaultAllGather):
    def __call__(self, *_: object, **__: object) -> None:
        raise torch.OutOfMemoryError


def check_unstarted(ctx: RankContext) -> str:
    """Rank 0 catches it and trains on; the other waits in the collective."""
    desync.PATIENCE = PATIENCE
    model: Any = sharded(ctx)
    train(model, ["first", "twin"])
    if ctx.rank == 0:
        model.first.set_custom_all_gather(WithoutMemory())
        with pytest.raises(torch.OutOfMemoryError):
            train(model, ["first", "twin"])
        model.first.set_custom_all_gather(DefaultAllGather())
    with pytest.raises(DesyncError) as caught:
        train(model, ["first", "twin"])
    return str(caught.value)


def test_a_rank_may_run_a_unit_that_it_has_whole_alone(gangs: Gangs) -> None:
    """What is gathered ahead afterwards is the same on all ranks, also if it turns out to be of no use."""
    gangs(2).run(check_one_alone)


def check_one_alone(ctx: RankContext) -> None:
    traces = []
    for engine in engines():
        torch.manual_seed(5)
        model: Any = Choosing().to(ctx.device)
        for unit in (model.first, model.twin, model.other, model):
            engine.shard(unit, mesh=ctx.mesh, reshard_after_forward=unit is not model.other)
        model.other.set_reshard_after_backward(False)
        losses = []
        for step, chosen in enumerate((["first", "twin", "other"], ["first", "other"])):
            if step == 1 and ctx.rank == 0:
                with torch.no_grad():
                    model.other(ctx.batch(9, 2, 4))
            loss = model(ctx.batch(step, 2, 4), chosen)
            loss.backward()
            losses.append(loss.detach())
        grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        traces.append([*losses, *grads])
    assert len(traces[0]) == len(traces[1])
    assert all(map(torch.equal, *traces))


def test_ranks_may_call_a_root_without_parameters_unlike_each_other(gangs: Gangs) -> None:
    """What is gathered ahead in backward follows from the units that are gathered."""
    gangs(2).run(check_calls_of_a_container)


def check_calls_of_a_container(ctx: RankContext) -> None:
    traces = []
    for engine in engines():
        torch.manual_seed(5)
        model: Any = Choosing().to(ctx.device)
        for unit in (model.first, model.twin, model.other, model):
            engine.shard(unit, mesh=ctx.mesh)
        model(ctx.batch(0, 2, 4), ["first"]).backward()
        # So that each unit reduces as it goes backward.
        inputs = ctx.batch(1, 2, 4).requires_grad_()
        calls = [["first", "twin", "other"]] if ctx.rank == 0 else [["first", "twin"], ["other"]]
        loss = torch.stack([model(inputs, chosen) for chosen in calls]).sum()
        torch.autograd.backward(loss)
        grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        traces.append([loss.detach(), *grads])
    assert len(traces[0]) == len(traces[1])
    assert all(map(torch.equal, *traces))


@pytest.mark.parametrize("by", ["pairs", "what is whole"])
def test_ranks_may_run_a_unit_more_often_than_others_within_a_pass(gangs: Gangs, by: str) -> None:
    """As chunks of what a rank has, or experts: what is gathered ahead is the same on all ranks."""
    gangs(4).run(check_more_often, by)


def check_more_often(ctx: RankContext, by: str) -> None:
    traces = []
    pairs = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("between", "within"))
    for engine in engines():
        torch.manual_seed(5)
        model: Any = Choosing().to(ctx.device)
        is_whole = by == "what is whole"
        engine.shard(
            model.other,
            mesh=ctx.mesh if is_whole else pairs["within"],
            reshard_after_forward=not is_whole,
        )
        for unit in (model.first, model.twin, model):
            engine.shard(unit, mesh=ctx.mesh)
        often = 2 if ctx.rank < 2 else 1
        losses: list[torch.Tensor] = []
        for chosen in (
            ["first", *["other"] * often, "twin"],
            ["first", "other"],
            ["first", *["other"] * often, "twin"],
        ):
            loss = model(ctx.batch(len(losses), 2, 4), chosen)
            loss.backward()
            losses.append(loss.detach())
        grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        traces.append([*losses, *grads])
    assert len(traces[0]) == len(traces[1])
    assert all(map(torch.equal, *traces))


@pytest.mark.parametrize(
    ("world", "reshard_after_forward", "twin_reshards"),
    [(2, False, False), (2, False, True), (4, 2, 2)],
    ids=["whole", "partly whole", "smaller mesh"],
)
def test_some_ranks_may_run_the_root_alone_with_what_they_have(
    gangs: Gangs, world: int, reshard_after_forward: int, twin_reshards: int
) -> None:
    """Their own pass, through other units, does not change what they gather ahead in the next of all ranks."""
    gangs(world).run(check_root_alone, reshard_after_forward, twin_reshards)


def check_root_alone(ctx: RankContext, reshard_after_forward: int, twin_reshards: int) -> None:
    traces = []
    for engine in engines():
        torch.manual_seed(5)
        model: Any = Choosing().to(ctx.device)
        engine.shard(model.twin, mesh=ctx.mesh, reshard_after_forward=twin_reshards)
        for unit in (model.first, model.other, model):
            engine.shard(unit, mesh=ctx.mesh, reshard_after_forward=reshard_after_forward)
        model.first.set_reshard_after_backward(False)
        params = list(model.parameters())
        losses = []
        for step in range(3):
            loss = model(ctx.batch(step, 2, 4), ["first", "twin", "other"])
            if ctx.rank < ctx.world // 2:
                with torch.no_grad():
                    model(ctx.batch(9, 2, 4), ["first", "other"])
            loss.backward()
            losses.append(loss.detach())
        traces.append([*losses, *(param.grad.to_local() for param in params)])
    assert len(traces[0]) == len(traces[1])
    assert all(map(torch.equal, *traces))


def test_a_slow_rank_is_waited_for_and_named() -> None:
    gang = Gang(2, "cpu")
    gang.run(check_slow)
    gang.close()


def test_ranks_may_change_course_together() -> None:
    gang = Gang(2, "cpu")
    gang.run(check_together)
    gang.close()


def check_together(ctx: RankContext) -> None:
    model = sharded(ctx)
    courses = [["first"], ["twin", "first"], ["other"], ["first", "other", "twin"], ["first"]]
    for chosen in courses:
        train(model, chosen)
        for name in chosen:
            assert all(param.grad is not None for param in model.get_submodule(name).parameters())
    for _ in range(2):
        train(model, ["first"])
    log = desync._logs[ctx.mesh.get_group(0)]
    assert log is not None
    surprises = log.surprises
    train(model, ["first"])
    assert log.surprises == surprises


def check_slow(ctx: RankContext) -> None:
    desync.PATIENCE = timedelta(milliseconds=20)
    model = sharded(ctx)
    for _ in range(3):
        train(model, ["first", "twin"])
    store, told = torch_private.default_store(), _Told()
    logger = logging.getLogger("fsdp_core")
    logger.addHandler(told)
    if ctx.rank == 1:
        # Until the other has lost patience and told what it waits for.
        group = ctx.mesh.get_group(0)
        log = desync._logs[group]
        assert log is not None
        late = desync._key(group, log, 0, log.count + 1)
        store.wait([late, _Told.KEY], timedelta(seconds=30))
    train(model, ["first", "twin"])
    logger.removeHandler(told)
    if ctx.rank == 0:
        said = store.get(_Told.KEY).decode()
        assert (
            "the all-gather of 'first.weight' and 1 more (20 elements of float32): ranks [1] have not"
            in said
        )
    assert all(param.grad is not None for param in model.first.parameters())


class _Told(logging.Handler):
    """Passes what is logged on to the other rank."""

    KEY = "what rank 0 logged"

    def emit(self, record: logging.LogRecord) -> None:
        torch_private.default_store().set(self.KEY, record.getMessage())


def test_a_collective_that_fails_is_not_waited_for_again(cpu_gangs: Gangs) -> None:
    cpu_gangs(1).run(check_failing)


class Failing(dist.Work):
    """As a strategy may write one: it does not know that it has ended."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        raise RuntimeError(f"The peer is gone, not late ({timeout}).")


def check_failing(ctx: RankContext) -> None:
    group = ctx.mesh.get_group(0)
    desync.keep_step(group, ctx.device, "all-gather of 'x'")
    with pytest.raises(RuntimeError, match="The peer is gone"):
        desync.wait_in_step(Failing(), group, ctx.device)


def test_a_rank_whose_peer_has_left_over_a_difference_is_told_it(cpu_gangs: Gangs) -> None:
    cpu_gangs(2).run(check_peer_left)


def check_peer_left(ctx: RankContext) -> None:
    """The peer saw the difference first, told, and ended: this one's collective fails before it has lost patience."""
    group = dist.new_group()
    desync.keep_step(group, ctx.device, "all-gather of 'x'")
    log = desync._logs[group]
    assert log is not None
    log.add(f"reduce-scatter of rank {ctx.rank}")
    if ctx.rank == 1:
        desync._tell(group, log)
    dist.barrier()
    if ctx.rank == 0:
        with pytest.raises(
            DesyncError, match=r"of rank 0 on rank 0, but the .* of rank 1 on rank 1"
        ):
            desync.wait_in_step(Failing(), group, ctx.device)
    dist.barrier()


def test_a_collective_may_end_right_after_patience_was_lost(cpu_gangs: Gangs) -> None:
    cpu_gangs(1).run(check_late)


class Late(dist.Work):
    """Ends just when the first wait has given up."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.ended.wait(timeout.total_seconds()):
            self.ended.set()
            raise RuntimeError("Operation timed out!")
        return True


def check_late(ctx: RankContext) -> None:
    group = ctx.mesh.get_group(0)
    patience = desync.PATIENCE
    desync.PATIENCE = timedelta(milliseconds=20)
    desync.keep_step(group, ctx.device, "all-gather of 'x'")
    desync.wait_in_step(Late(), group, ctx.device)
    desync.PATIENCE = patience


def sharded(ctx: RankContext) -> Choosing:
    torch.manual_seed(5)
    model = Choosing().to(ctx.device)
    for child in model.children():
        fully_shard(child, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    return model


def train(model: Choosing, chosen: list[str]) -> None:
    device = next(model.parameters()).device
    torch.autograd.backward(model(torch.ones(2, 4, device=device), chosen))


def test_the_check_adds_no_collective_that_is_counted(gangs: Gangs) -> None:
    gangs(2).run(compare_counts)


def compare_counts(ctx: RankContext) -> None:
    for count in (of_chunks, of_resharding, of_accumulation):
        mine, reference = ([*count(ctx, engine)] for engine in (ours(), theirs()))
        assert mine == reference, count.__name__
        assert mine[0].total() > 0


def test_the_check_calls_no_collective_that_a_user_has_wrapped(gangs: Gangs) -> None:
    gangs(2).run(compare_wrapped)


def compare_wrapped(ctx: RankContext) -> None:
    for train in (of_resharding, of_accumulation):
        mine, reference = (calls_of_wrappers(train, ctx, engine) for engine in (ours(), theirs()))
        assert mine == reference, train.__name__
        assert mine.total() > 0, "the wrappers see what is called"


def calls_of_wrappers(
    train: Callable[[RankContext, Engine], Iterator[object]], ctx: RankContext, engine: Engine
) -> Counter[str]:
    """How often `train` calls each collective of `torch.distributed`, by what stands there in its place."""
    calls: Counter[str] = Counter()

    def counted(name: str, wrapped: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            calls[name] += 1
            return wrapped(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in WRAPPED:
            if hasattr(dist, name):
                patch.setattr(dist, name, counted(name, getattr(dist, name)))
        deque(train(ctx, engine), maxlen=0)
    return calls


def of_chunks(ctx: RankContext, engine: Engine) -> Iterator[Counter[object]]:
    """Of forward, of each chunk of the head, and of the body's backward."""
    model: Any = Headless().to(ctx.device)
    for unit in (model.body, [model.norm, model.head], model):
        engine.shard(unit, mesh=ctx.mesh)
    for step in range(3):
        with counting() as mode:
            hidden = model(ctx.batch(step, 4, WIDTH))
        yield counts_of(mode)
        for chunk in hidden.detach().requires_grad_().chunk(2):
            with counting() as mode:
                torch.autograd.backward(model.head(chunk).sum())
            yield counts_of(mode)
        with counting() as mode:
            torch.autograd.backward(hidden.sum())
        yield counts_of(mode)


def of_resharding(ctx: RankContext, engine: Engine) -> Iterator[Counter[object]]:
    """Of forward and backward, kept whole after forward, resharded by hand, and by forward."""
    model = layers(ctx, engine)
    for step in range(6):
        model.set_reshard_after_forward(step % 3 == 2)
        with counting() as mode:
            loss = model(ctx.batch(step, 4, WIDTH)).square().sum()
        yield counts_of(mode)
        if step % 3 == 1:
            for layer in model:
                layer.reshard()
        with counting() as mode:
            torch.autograd.backward(loss)
        yield counts_of(mode)


def of_accumulation(ctx: RankContext, engine: Engine) -> Iterator[Counter[object]]:
    """Of each of three microbatches, of which the last reduces."""
    model = layers(ctx, engine)
    for micro in range(6):
        model.set_requires_gradient_sync(micro % 3 == 2)
        with counting() as mode:
            torch.autograd.backward(model(ctx.batch(micro, 4, WIDTH)).square().sum())
        yield counts_of(mode)


def layers(ctx: RankContext, engine: Engine) -> Any:  # noqa: ANN401 - a class of either engine
    torch.manual_seed(5)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]).to(ctx.device)
    for unit in (*model, model):
        engine.shard(unit, mesh=ctx.mesh)
    return model


def counts_of(mode: CommDebugMode) -> Counter[object]:
    return Counter(mode.get_comm_counts())


@contextmanager
def counting() -> Iterator[CommDebugMode]:
    with CommDebugMode() as mode, warnings.catch_warnings():  # type: ignore[no-untyped-call]  # PyTorch's
        warnings.simplefilter("ignore")  # the mode's own hooks and views give rise to some
        yield mode
