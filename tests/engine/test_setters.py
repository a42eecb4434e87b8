"""What the setters write, for whom, and what they refuse."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import ShardedState, fully_shard, observe
from fsdp_core.comm import (
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllGather,
    ProcessGroupReduceScatter,
)
from fsdp_core.errors import EngineError
from fsdp_core.options import GroupOptions
from fsdp_core.runtime import NullObserver
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import BLOCKS, Decoder
from tests.engine.sharded import backward_once, local, shard_decoder, state, states, unit

pytestmark = pytest.mark.ranks


def group_options(model: nn.Module) -> list[GroupOptions]:
    return [group.options for each in states(model) for group in each.groups]


def test_setters_write_for_the_tree_or_for_one_unit(gangs: Gangs) -> None:
    gangs(1).run(check_reach)


def check_reach(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    root = unit(model)
    first, *others = group_options(model)

    root.set_requires_gradient_sync(False)
    assert not any(s.options.reduce_grads for s in states(model))
    assert not any(o.all_reduce_grads for o in (first, *others))
    root.set_requires_gradient_sync(True, recurse=False)
    assert [s.options.reduce_grads for s in states(model)] == [True] + [False] * BLOCKS
    root.set_requires_all_reduce(True)
    root.set_requires_all_reduce(False, recurse=False)
    assert [o.all_reduce_grads for o in (first, *others)] == [False] + [True] * BLOCKS
    root.set_reduce_scatter_unused_params(True)
    root.set_reduce_scatter_unused_params(False, recurse=False)
    assert [o.reduce_unused for o in (first, *others)] == [False] + [True] * BLOCKS
    root.set_agree_on_unused_params(False, recurse=False)
    assert [o.agree_on_unused for o in (first, *others)] == [False] + [True] * BLOCKS
    root.set_reduce_scatter_max_input_buffers(3)
    root.set_reduce_scatter_max_input_buffers(2, recurse=False)
    assert [s.options.max_reduces for s in states(model)] == [2] + [3] * BLOCKS
    root._set_unshard_async_op(async_op=True)
    assert all(s.options.unshard_inline for s in states(model))

    # These are for one unit always.
    root.set_gradient_divide_factor(6.0)
    root.set_force_sum_reduction_for_comms(True)
    root.set_unshard_in_backward(False)
    assert (first.divide_factor, first.force_sum) == (6.0, True)
    assert all((o.divide_factor, o.force_sum) == (None, False) for o in others)
    assert [s.options.unshard_in_backward for s in states(model)] == [False] + [True] * BLOCKS
    with pytest.warns(DeprecationWarning, match="Use `set_gradient_divide_factor` instead"):
        root.set_reduce_scatter_divide_factor(4.0)
    assert first.divide_factor == 4.0


def test_collectives_and_hooks_are_written_for_the_unit(gangs: Gangs) -> None:
    gangs(1).run(check_collectives)


def check_collectives(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    first, *others = group_options(model)
    gather, reduce, seen = DefaultAllGather(), DefaultReduceScatter(), list[torch.Tensor]()
    hook = seen.append
    unit(model).set_custom_all_gather(gather)
    unit(model).set_custom_reduce_scatter(reduce)
    unit(model).set_all_reduce_hook(hook)
    assert (first.all_gather, first.reduce_scatter) == (gather, reduce)
    assert first.all_reduce_hook is hook
    assert first.all_reduce_hook_stream is None
    assert others == [GroupOptions()] * BLOCKS


class Custom(DefaultAllGather):
    pass


def test_refusals_have_the_types_and_words_of_the_reference(gangs: Gangs) -> None:
    gangs(1).run(check_refusals)


def check_refusals(ctx: RankContext) -> None:
    root = unit(shard_decoder(ctx))
    for wrong in (True, 1.0, "2"):
        with pytest.raises(TypeError, match="max_input_buffers must be an int, got") as caught:
            root.set_reduce_scatter_max_input_buffers(cast("int", wrong))
        assert isinstance(caught.value, EngineError)
    with pytest.raises(ValueError, match="max_input_buffers must be a positive int, got 0"):
        root.set_reduce_scatter_max_input_buffers(0)
    root.set_custom_all_gather(Custom())
    with pytest.raises(
        AssertionError, match=r"set_allocate_memory_from_process_group\(\) when all gather comm is"
    ):
        root.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(AssertionError, match=r"set_symm_mem\(\) when all gather comm is custom"):
        root.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="supported for 'NCCL', not 'CUDA'"):
        unit(shard_decoder(ctx)).set_symm_mem_for_comm("CUDA")  # type: ignore[arg-type]  # the fault under test


def test_symmetric_memory_is_refused_where_there_is_none(gangs: Gangs) -> None:
    gangs(1).run(check_symmetric_memory)


def check_symmetric_memory(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    if "nccl" in str(dist.get_backend_config()):
        unit(model).set_symm_mem_for_comm()
        assert group_options(model)[0].all_gather is not None
        return
    with pytest.raises(NotImplementedError, match="needs a process group of NCCL, but this one"):
        unit(model).set_symm_mem_for_comm()
    assert group_options(model)[0].all_gather is None


def test_memory_of_the_process_group_is_switched_on_and_off(gangs: Gangs) -> None:
    gangs(2).run(check_process_group_memory)


def check_process_group_memory(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    unit(model).set_allocate_memory_from_process_group_for_comm(True)
    options = group_options(model)[0]
    assert isinstance(options.all_gather, ProcessGroupAllGather)
    assert isinstance(options.reduce_scatter, ProcessGroupReduceScatter)
    buffer = options.all_gather.allocate([4, 3], dtype=torch.bfloat16, device=ctx.device)
    assert (buffer.numel(), buffer.dtype, buffer.device) == (12, torch.bfloat16, ctx.device)
    unit(model).set_allocate_memory_from_process_group_for_comm(False)
    assert options == GroupOptions()


def test_one_separate_group_serves_all_units_of_the_same_ranks(gangs: Gangs) -> None:
    gangs(2).run(check_separate_group)


def check_separate_group(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    unit(model).set_separate_reduce_scatter_group(recurse=False)
    first, *others = group_options(model)
    made = first.reduce_group
    assert made is not None
    assert made is not ctx.mesh.get_group()
    assert dist.get_process_group_ranks(made) == [0, 1]
    assert all(o.reduce_group is None for o in others)
    unit(model).set_separate_reduce_scatter_group()  # used again, not made again
    assert all(o.reduce_group is made for o in (first, *others))
    unit(model).set_separate_reduce_scatter_group(False)
    assert all(o.reduce_group is None for o in (first, *others))


def test_ranks_with_different_numbers_of_groups_make_a_separate_group(gangs: Gangs) -> None:
    """PyTorch names groups that their members alone make by how many groups a rank has."""
    gangs(2).run(check_separate_group_of_uneven_ranks)


def check_separate_group_of_uneven_ranks(ctx: RankContext) -> None:
    own = dist.new_group([0])
    model, plain = shard_decoder(ctx), shard_decoder(ctx)
    unit(model).set_separate_reduce_scatter_group()
    made = group_options(model)[0].reduce_group
    assert made is not None
    assert dist.get_process_group_ranks(made) == [0, 1]
    backward_once(ctx, model)
    backward_once(ctx, plain)
    assert grads(plain)
    assert all(map(torch.equal, grads(model), grads(plain)))
    if ctx.rank == 0:
        dist.destroy_process_group(own)
    # What the ranks wrote when they met stays in the store: a group of the same name would read it.
    dist.destroy_process_group(made)
    unit(model).set_separate_reduce_scatter_group(False)
    unit(model).set_separate_reduce_scatter_group()
    again = group_options(model)[0].reduce_group
    assert again is not None
    assert again.group_name != made.group_name
    model.zero_grad()
    backward_once(ctx, model)
    assert all(map(torch.equal, grads(model), grads(plain)))


def grads(model: nn.Module) -> list[torch.Tensor]:
    """This rank's parts of the gradients."""
    return [local(p.grad) for p in model.parameters() if p.grad is not None]


def test_the_largest_window_of_the_units_counts(cpu_gangs: Gangs) -> None:
    """Where the host waits for collectives; a device may not have said yet that one has ended."""
    cpu_gangs(2).run(check_window)


class InFlight(NullObserver):
    """Counts collectives, in all and between issue and completion."""

    def __init__(self) -> None:
        self.issued = 0
        self.now = 0
        self.peak = 0

    def on_issue(self, group: str, sequence: int) -> None:
        super().on_issue(group, sequence)
        self.issued += 1
        self.now += 1
        self.peak = max(self.peak, self.now)

    def on_complete(self, group: str, sequence: int) -> None:
        super().on_complete(group, sequence)
        self.now -= 1


def check_window(ctx: RankContext) -> None:
    peaks, grads = [], []
    for buffers in (1, 3):
        model = shard_decoder(ctx, reshard=False)
        unit(model.blocks[1]).set_reduce_scatter_max_input_buffers(buffers)
        loss = loss_and_watch(ctx, model)
        peaks.append(loss.peak)
        assert loss.now == 0
        grads.append({n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    # Parameters are kept whole, so in backward only reductions are in flight.
    assert peaks == [1, 3]
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name])


def loss_and_watch(ctx: RankContext, model: Decoder) -> InFlight:
    with torch.no_grad():
        backward_free = model(torch.zeros(1, 2, dtype=torch.long, device=ctx.device))
    assert backward_free.grad_fn is None
    watch = InFlight()
    observe(model, watch)
    backward_once(ctx, model)
    return watch


def test_no_sync_nests_and_restores_what_each_unit_had(gangs: Gangs) -> None:
    gangs(2).run(check_no_sync)


def check_no_sync(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    unit(model.blocks[1]).set_requires_gradient_sync(False)
    unit(model.blocks[2]).set_requires_all_reduce(False)

    def settings() -> list[tuple[bool, list[bool]]]:
        return [
            (s.options.reduce_grads, [g.options.all_reduce_grads for g in s.groups])
            for s in states(model)
        ]

    before = settings()
    with unit(model).no_sync():
        assert not any(reduces for reduces, _ in settings())
        with unit(model).no_sync(), unit(model.blocks[0]).no_sync():
            assert not any(reduces for reduces, _ in settings())
        assert not any(reduces for reduces, _ in settings())
    assert settings() == before
    with pytest.raises(ZeroDivisionError), unit(model).no_sync():
        raise ZeroDivisionError
    assert settings() == before


def test_accumulation_under_no_sync_is_the_sum_of_microbatches(gangs: Gangs) -> None:
    gangs(2).run(check_accumulation)


def check_accumulation(ctx: RankContext) -> None:
    model, synced = shard_decoder(ctx), shard_decoder(ctx)
    with unit(model).no_sync():
        backward_once(ctx, model, 0)
        assert model.embed.weight.grad is None
    backward_once(ctx, model, 1)
    for step in (0, 1):
        backward_once(ctx, synced, step)
    for mine, theirs in zip(model.parameters(), synced.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(local(mine.grad), local(theirs.grad))


def test_the_event_after_the_optimizer_is_used_once(gangs: Gangs) -> None:
    gangs(2).run(check_event)


def check_event(ctx: RankContext) -> None:
    model, plain = shard_decoder(ctx), shard_decoder(ctx)
    event = torch.Event(ctx.device)
    if ctx.device.type != "cpu":
        event.record()
    unit(model).set_post_optim_event(event)
    assert state(model).options.post_optim_event is event
    assert torch.equal(backward_once(ctx, model), backward_once(ctx, plain))
    assert state(model).options.post_optim_event is None


def test_gathers_on_the_current_stream_compute_the_same(gangs: Gangs) -> None:
    gangs(2).run(check_inline)


def check_inline(ctx: RankContext) -> None:
    model, plain = shard_decoder(ctx), shard_decoder(ctx)
    unit(model)._set_unshard_async_op(async_op=True)
    for step in range(2):
        assert torch.equal(backward_once(ctx, model, step), backward_once(ctx, plain, step))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if isinstance(mine.grad, DTensor) and theirs.grad is not None:
            assert torch.equal(local(mine.grad), local(theirs.grad))


def test_an_embedding_is_not_gathered_in_backward_if_it_need_not(gangs: Gangs) -> None:
    gangs(2).run(check_unshard_in_backward)


def check_unshard_in_backward(ctx: RankContext) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)).to(ctx.device)
    for layer in model:
        fully_shard(layer, mesh=ctx.mesh, reshard_after_forward=True)
    fully_shard(model, mesh=ctx.mesh)
    embedding = model[0]
    unit(embedding).set_unshard_in_backward(False)
    loss = model(torch.arange(3, device=ctx.device)).sum()
    seen: list[ShardedState] = []
    embedding.get_parameter("weight").register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # PyTorch's
        lambda _: seen.append(state(embedding).groups[0].sharded_state)
    )
    watch = InFlight()
    observe(model, watch)
    torch.autograd.backward(loss)
    assert seen == [ShardedState.SHARDED]
    assert watch.issued == 3  # a gather of the linear layer, and two reductions
    assert embedding.weight.grad is not None
