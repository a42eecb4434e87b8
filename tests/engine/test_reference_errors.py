"""What the reference refuses, ours refuses too: as the same type, naming the same fact.

Each row gives one bad input to both engines. A row that ours `may_serve` is a limit of the
reference only; there ours refuses with the same type or does what was asked.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp_core
from fsdp_core.errors import EngineError
from tests.engine.gang import Gangs, RankContext

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Attempt:
    """What a row may use.

    Attributes:
        api: `fsdp_core` or `torch.distributed.fsdp`.
        ctx: The rank.
    """

    api: ModuleType
    ctx: RankContext

    def shard(self, module: Any, **options: Any) -> Any:  # noqa: ANN401 - a class of either engine
        """`fully_shard` over all ranks, unless the options say otherwise."""
        return self.api.fully_shard(module, **{"mesh": self.ctx.mesh} | options)

    def linear(self, **options: Any) -> Any:  # noqa: ANN401 - a class of either engine
        """One unit."""
        return self.shard(nn.Linear(4, 4), **options)

    def mesh(self, *axes: str) -> DeviceMesh:
        """All its axes have one rank, so that their number is all that matters."""
        return mesh_of_ones(self.ctx.device.type, axes)

    def input(self) -> torch.Tensor:
        """For a linear."""
        return torch.ones(2, 4, device=self.ctx.device)


@cache
def mesh_of_ones(device_type: str, axes: tuple[str, ...]) -> DeviceMesh:
    # Made once: DTensor takes an equal mesh for the same and may hand out the older one.
    return init_device_mesh(device_type, (1,) * len(axes), mesh_dim_names=axes)


@dataclass(frozen=True)
class Row:
    """One bad input.

    Attributes:
        attempt: Gives it to an engine.
        error: Base type of what both raise.
        fact: Regular expression found in both messages.
        ours: Found in ours besides: the parameter or module at fault.
        world: Ranks.
        may_serve: Whether ours may do it instead.
        only_on_last: Whether only the last rank can see the fault.
        only_on_cpu: Whether it is no fault where there is an accelerator.
    """

    attempt: Callable[[Attempt], object]
    error: type[Exception]
    fact: str
    ours: str = ""
    world: int = 1
    may_serve: bool = False
    only_on_last: bool = False
    only_on_cpu: bool = False


def twice(a: Attempt) -> None:
    a.shard(a.linear())


def container(a: Attempt) -> None:
    a.shard(nn.ModuleList([nn.Linear(4, 4)]))


def container_dict(a: Attempt) -> None:
    a.shard(nn.ModuleDict({"only": nn.Linear(4, 4)}))


def deepcopy(a: Attempt) -> None:
    copy.deepcopy(a.linear())


def three_axes(a: Attempt) -> None:
    a.linear(mesh=a.mesh("a", "b", "c"))


def unnamed_axes(a: Attempt) -> None:
    a.linear(mesh=init_device_mesh(a.ctx.device.type, (1, 1)))


def reshard_to_no_factor(a: Attempt) -> None:
    a.linear(reshard_after_forward=3)


def reshard_to_nothing(a: Attempt) -> None:
    a.linear(reshard_after_forward=0)


def reshard_to_a_word(a: Attempt) -> None:
    a.linear(reshard_after_forward="half")


def no_dims(a: Attempt) -> None:
    a.linear(mesh=a.mesh("dp", "tp"), dp_mesh_dims=a.api.DataParallelMeshDims())


def absent_dim(a: Attempt) -> None:
    a.linear(mesh=a.mesh("dp", "tp"), dp_mesh_dims=a.api.DataParallelMeshDims(shard="absent"))


def dims_of_unnamed_mesh(a: Attempt) -> None:
    a.linear(dp_mesh_dims=a.api.DataParallelMeshDims(shard="dp"))


def dims_and_plain_parameters(a: Attempt) -> None:
    a.linear(mesh=a.mesh("dp", "tp"), dp_mesh_dims=a.api.DataParallelMeshDims(shard="dp"))


def dims_and_another_mesh(a: Attempt) -> None:
    mesh, other = a.mesh("dp_here", "tp_here"), a.mesh("dp_there", "tp_there")
    module = distributed(other, Replicate(), Replicate())
    a.shard(module, mesh=mesh, dp_mesh_dims=a.api.DataParallelMeshDims(shard="dp_here"))


def dims_and_sharded_parameters(a: Attempt) -> None:
    mesh = a.mesh("dp_here", "tp_here")
    module = distributed(mesh, Shard(0), Replicate())
    a.shard(module, mesh=mesh, dp_mesh_dims=a.api.DataParallelMeshDims(shard="dp_here"))


def dims_and_reshard_size(a: Attempt) -> None:
    mesh = a.mesh("dp_here", "tp_here")
    module = distributed(mesh, Replicate(), Replicate())
    dims = a.api.DataParallelMeshDims(shard="dp_here")
    a.shard(module, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=1)


def many_model_parallel_axes(a: Attempt) -> None:
    mesh = a.mesh("dp", "x", "y", "z")
    module = distributed(mesh["x", "y", "z"], Shard(0), Shard(1), Replicate())
    a.shard(module, mesh=mesh["dp"])


def distributed(mesh: DeviceMesh, *placements: Any) -> nn.Linear:  # noqa: ANN401 - PyTorch's placements
    """A linear whose parameters are DTensors already."""
    module = nn.Linear(4, 4, bias=False)
    weight = distribute_tensor(module.weight.detach(), mesh, list(placements))
    module.weight = nn.Parameter(weight)
    return module


def placed_by_a_word(a: Attempt) -> None:
    a.linear(shard_placement_fn=lambda _: "dim 0")


def placed_past_the_last_dim(a: Attempt) -> None:
    a.linear(shard_placement_fn=lambda _: Shard(1))


def placed_unevenly(a: Attempt) -> None:
    module = nn.Linear(5, 4, bias=False)
    a.shard(module, shard_placement_fn=lambda _: Shard(1))


def scalar(a: Attempt) -> None:
    module = nn.Module()
    module.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    a.shard(module)


def transposed(a: Attempt) -> None:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.randn(4, 6).t()))
    a.shard(module)


def tied_across_units(a: Attempt) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = (module for module in model if isinstance(module, nn.Linear))
    second.weight = first.weight
    a.shard(first)
    a.shard(model)(a.input())


def still_on_meta(a: Attempt) -> None:
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    a.shard(module)(a.input())


def nested_ran_first(a: Attempt) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    a.shard(model[1])
    a.shard(model)
    model[1](a.input())
    model(a.input())


def list_as_root(a: Attempt) -> None:
    pair = [nn.Linear(4, 4), nn.Linear(4, 4)]
    a.shard(pair)
    pair[0](a.input())


def mixed_dtypes(a: Attempt) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.float64))
    a.shard(model)
    with suppress(RuntimeError):  # the two layers cannot be chained, whatever shards them
        model(a.input())


class TwoDtypes(nn.Module):
    """Both parameters are used, each in its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(4))
        self.second = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (self.first * x).sum() + (self.second * x).sum()
        return result


def thawed_in_another_dtype(a: Attempt) -> None:
    model = a.shard(TwoDtypes())
    torch.autograd.backward(model(a.input()))
    model.second.requires_grad_(requires_grad=True)
    torch.autograd.backward(model(a.input()))


def absent_method(a: Attempt) -> None:
    a.api.register_fsdp_forward_method(a.linear(), "absent")


def shared_context_of_unsharded(a: Attempt) -> None:
    a.api.share_comm_ctx([a.linear(), nn.Linear(4, 4)])


def reset_below_the_root(a: Attempt) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    below = a.shard(model[0])
    a.shard(model)(a.input())
    below.reset_iter_state()


def set_reshard_to_size(a: Attempt) -> None:
    a.linear().set_reshard_after_forward(2)


def prefetch_of_unsharded_in_forward(a: Attempt) -> None:
    a.linear().set_modules_to_forward_prefetch([nn.Linear(4, 4)])


def prefetch_of_unsharded_in_backward(a: Attempt) -> None:
    a.linear().set_modules_to_backward_prefetch([nn.Linear(4, 4)])


def true_input_buffers(a: Attempt) -> None:
    a.linear().set_reduce_scatter_max_input_buffers(True)


def half_an_input_buffer(a: Attempt) -> None:
    a.linear().set_reduce_scatter_max_input_buffers(0.5)


def no_input_buffer(a: Attempt) -> None:
    a.linear().set_reduce_scatter_max_input_buffers(0)


def hook_stream_with_replicas(a: Attempt) -> None:
    module = a.linear(mesh=a.mesh("dp_replicate", "dp_shard"))
    module.set_all_reduce_hook(lambda _: None, stream=torch.cpu.Stream())


class OwnGather:
    """A custom all-gather that is never called."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:  # noqa: ANN401 - a size of either kind
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *_: object, **__: object) -> None:
        raise AssertionError


def group_memory_with_own_gather(a: Attempt) -> None:
    module = a.linear()
    module.set_custom_all_gather(OwnGather())
    module.set_allocate_memory_from_process_group_for_comm(True)


def divided_on_gloo(a: Attempt) -> None:
    module = a.linear()
    module.set_gradient_divide_factor(3.0)
    torch.autograd.backward(module(a.input()).sum())


def pinned_without_accelerator(a: Attempt) -> None:
    module = a.linear(offload_policy=a.api.CPUOffloadPolicy())
    torch.autograd.backward(module(a.input()).sum())


def hooked_linear(a: Attempt, **hooks: Callable[..., object]) -> Any:  # noqa: ANN401 - a class of either engine
    """One unit, whose weight's slice got these methods after it was sharded."""
    model = a.shard(nn.Linear(4, 1, bias=False))
    piece = model.weight._local_tensor  # `to_local` gives an alias, whose methods nobody sees
    for name, hook in hooks.items():
        setattr(piece, name, MethodType(hook, piece))
    return model


def as_it_is(self: torch.Tensor, _: object) -> object:
    """A hook of the old signature, which knows the mesh alone."""
    return (self,), None


def of_two_arguments(_: torch.Tensor, __: object, ___: object) -> object:
    raise AssertionError


def too_small(
    self: torch.Tensor, _1: object, _2: object, _3: object, _4: object, _5: object
) -> object:
    return (self.new_zeros(0),), None


def never_called(*_: object, **__: object) -> object:
    raise AssertionError


def only_a_hook_before_the_gather(a: Attempt) -> None:
    hooked_linear(a, fsdp_pre_all_gather=as_it_is)(a.input())


def only_a_hook_after_the_gather(a: Attempt) -> None:
    hooked_linear(a, fsdp_post_all_gather=never_called)(a.input())


def hook_of_two_arguments(a: Attempt) -> None:
    hooks = {"fsdp_pre_all_gather": of_two_arguments, "fsdp_post_all_gather": never_called}
    hooked_linear(a, **hooks)(a.input())


def hook_without_padding(a: Attempt) -> None:
    hooks = {"fsdp_pre_all_gather": too_small, "fsdp_post_all_gather": never_called}
    hooked_linear(a, **hooks)(a.input())


ROWS = {
    "twice": Row(twice, AssertionError, "can only be applied to a module once"),
    "container": Row(container, ValueError, "does not support containers that do not implement f"),
    "dict": Row(container_dict, ValueError, "does not support containers that do not implement f"),
    "deepcopy": Row(deepcopy, AssertionError, "does not support deepcopy. Please use state dict"),
    "three axes": Row(three_axes, ValueError, "expects a 1D or 2D DeviceMesh but got"),
    "unnamed axes": Row(unnamed_axes, AssertionError, "with mesh_dim_names specified"),
    "reshard to 3": Row(reshard_to_no_factor, ValueError, "factor of 1, not 3"),
    "reshard to 0": Row(reshard_to_nothing, ValueError, "factor of 1, not 0"),
    "reshard to a word": Row(reshard_to_a_word, ValueError, "a bool or an int .*not half"),
    "no dims": Row(no_dims, ValueError, "At least one of shard or replicate must be set"),
    "absent dim": Row(absent_dim, ValueError, "'absent' not found in mesh.mesh_dim_names"),
    "dims, unnamed mesh": Row(dims_of_unnamed_mesh, ValueError, "must have mesh_dim_names"),
    "dims, plain": Row(dims_and_plain_parameters, ValueError, "must be DTensors", ours="weight"),
    "dims, other mesh": Row(dims_and_another_mesh, ValueError, "same mesh", ours="weight"),
    "dims, sharded": Row(
        dims_and_sharded_parameters, ValueError, r"Expected Replicate\(\) on DP shard dim"
    ),
    "dims, reshard to 1": Row(dims_and_reshard_size, NotImplementedError, "as int"),
    "three model axes": Row(many_model_parallel_axes, NotImplementedError, r"1D TP/EP or 2D"),
    "placed by a word": Row(placed_by_a_word, ValueError, "Invalid shard_placement_fn result"),
    "placed past the last dim": Row(
        placed_past_the_last_dim, AssertionError, "Shard dim 1 is invalid for 1D tensor"
    ),
    "placed unevenly": Row(
        placed_unevenly, NotImplementedError, "uneven sharding on dim 1", world=2, may_serve=True
    ),
    "scalar": Row(scalar, ValueError, "Change scale to a 1D tensor with numel", may_serve=True),
    "transposed": Row(
        transposed, NotImplementedError, "non-contiguous parameters yet", may_serve=True
    ),
    "tied across units": Row(
        tied_across_units, ValueError, "is shared with a parameter already", may_serve=True
    ),
    "still on meta": Row(
        still_on_meta, RuntimeError, "materialized from meta device .*'weight', 'bias'"
    ),
    "nested ran first": Row(
        nested_ran_first, RuntimeError, "already been lazily initialized for 1\n"
    ),
    "list as root": Row(list_as_root, RuntimeError, "requires a single root module but got"),
    "mixed dtypes": Row(
        mixed_dtypes, AssertionError, "expects uniform original parameter dtype", may_serve=True
    ),
    "thawed in another dtype": Row(
        thawed_in_another_dtype, AssertionError, "uniform gradient dtype but got", may_serve=True
    ),
    "absent method": Row(absent_method, ValueError, "does not have a method absent"),
    "shared context": Row(shared_context_of_unsharded, ValueError, "FSDPModules? but got"),
    "reset below the root": Row(
        reset_below_the_root, RuntimeError, "must be called on the root FSDP module"
    ),
    "set reshard to 2": Row(set_reshard_to_size, ValueError, "should be a bool, got"),
    "forward prefetch": Row(
        prefetch_of_unsharded_in_forward, ValueError, "Expects FSDPModule but got"
    ),
    "backward prefetch": Row(
        prefetch_of_unsharded_in_backward, ValueError, "Expects FSDPModule but got"
    ),
    "True input buffers": Row(true_input_buffers, TypeError, "must be an int, got bool"),
    "0.5 input buffers": Row(half_an_input_buffer, TypeError, "must be an int, got float"),
    "0 input buffers": Row(no_input_buffer, ValueError, "positive int, got 0"),
    "hook stream": Row(hook_stream_with_replicas, ValueError, "when using native HSDP"),
    "group memory": Row(group_memory_with_own_gather, AssertionError, "OwnGather"),
    "divided on gloo": Row(
        divided_on_gloo,
        RuntimeError,
        "PREMUL_SUM with Gloo",
        world=2,
        may_serve=True,
        only_on_cpu=True,
    ),
    "pinned": Row(
        pinned_without_accelerator,
        RuntimeError,
        "accelerator device when none",
        may_serve=True,
        only_on_cpu=True,
    ),
    "pre hook alone": Row(only_a_hook_before_the_gather, AssertionError, "fsdp_post_all_gather"),
    "post hook alone": Row(only_a_hook_after_the_gather, AssertionError, "fsdp_pre_all_gather"),
    "hook of two arguments": Row(
        hook_of_two_arguments, AssertionError, "Invalid fsdp_pre_all_gather"
    ),
    "hook without padding": Row(
        hook_without_padding, AssertionError, "padded", world=2, only_on_last=True
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_refused_as_the_reference_refuses(gangs: Gangs, row: str) -> None:
    gangs(ROWS[row].world).run(check_row, row)


def check_row(ctx: RankContext, name: str) -> None:
    row = ROWS[name]
    sees_fault = not row.only_on_last or ctx.rank == ctx.world - 1
    if not sees_fault or (row.only_on_cpu and ctx.device.type != "cpu"):
        return
    reference = importlib.import_module("torch.distributed.fsdp")
    with pytest.raises(row.error, match=re.compile(row.fact, re.DOTALL)):
        row.attempt(Attempt(reference, ctx))
    ours = Attempt(fsdp_core, ctx)
    if row.may_serve:
        with suppress(row.error):
            row.attempt(ours)
        return
    with pytest.raises(row.error, match=re.compile(row.fact, re.DOTALL)) as caught:
        row.attempt(ours)
    assert isinstance(caught.value, EngineError)
    assert row.ours in str(caught.value)
