# ruff: noqa: SLF001 - private names are what this module is for
"""The one door to names that PyTorch keeps private.

Whoever upgrades PyTorch reads this file. Each function says why the public way does not do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.autograd import Variable, profiler
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from types import ModuleType

    from torch.distributed import Store  # type: ignore[attr-defined]  # PyTorch does not list it
    from torch.distributed.tensor.placement_types import Placement

AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)
Leaf = TypeVar("Leaf")
Tree = TypeVar("Tree")

Spec: TypeAlias = DTensorSpec
"""How a DTensor lies on its mesh, with its global shape, strides and dtype."""

P = ParamSpec("P")
R = TypeVar("R")


def new_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor of global `shape` whose local tensor is `local` itself, not a view of it.

    `DTensor.from_local` returns a view under autograd's eyes; a parameter must own its slice.
    """
    strides = tuple(stride or torch.empty(tuple(shape), device="meta").stride())
    spec = DTensorSpec(
        mesh,
        tuple(placements),
        tensor_meta=TensorMeta(torch.Size(shape), strides, local.dtype),
    )
    return _dtensor(local, spec)


def _dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    # DTensor.__new__ is a C function that the type checker reads with the wrong signature.
    make = cast("Callable[..., DTensor]", DTensor)
    return make(local, spec, requires_grad=False)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The local tensor itself; `to_local` returns a differentiable view."""
    return tensor._local_tensor


def replace_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Puts another local tensor of the same shape under a DTensor that others hold."""
    tensor._local_tensor = local


def local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, shape) of this rank's elements in the global tensor, padding excluded."""
    if tensor.device_mesh.get_coordinate() is None:
        return (0,) * tensor.ndim, (0,) * tensor.ndim
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offsets), tuple(shape)


def preserve_version(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Writes within do not count as modifications of what autograd saved.

    The unsharded parameter is refilled with the same values between forward and backward.
    Inference tensors have no version.
    """
    versioned = tuple(tensor for tensor in tensors if not tensor.is_inference())
    guard = torch.autograd.grad_mode._unsafe_preserve_version_counter(versioned)
    return cast("AbstractContextManager[None]", guard)


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` once, when the running backward has finished all its work."""
    Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread executes a backward; true in activation recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd treats the tensor as a view of another."""
    return tensor._base is not None


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """Hooks that `register_post_accumulate_grad_hook` put on a leaf.

    Autograd never accumulates into a sharded parameter, so the engine calls them.
    """
    hooks = tensor._post_accumulate_grad_hooks
    return list(hooks.values()) if hooks else []


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each source into its target, casting on the way, in as few kernels as possible."""
    torch._foreach_copy_(targets, sources)


def foreach_norm(
    tensors: list[torch.Tensor], order: float, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """The norm of each tensor, accumulated in `dtype`, in as few kernels as possible.

    The public `torch.nn.utils.get_total_norm` accumulates in the tensors' own dtype.
    """
    return tuple(torch._foreach_norm(tensors, order, dtype=dtype))


def foreach_scale(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies each tensor in place by the one number, in as few kernels as possible."""
    torch._foreach_mul_(tensors, factor)


def chunk_cat(tensors: list[torch.Tensor], parts: int, out: torch.Tensor) -> None:
    """Pads dim 0 of each tensor to `parts` chunks and lays chunk i of all into row i of `out`."""
    torch._chunk_cat(tensors, 0, parts, out=out)


def composable_state(module: nn.Module, key: str) -> object | None:
    """What `set_composable` put on the module under `key`."""
    states: dict[object, object] = module.__dict__.get(STATE_KEY, {})
    return states.get(key)


def composable_names(module: nn.Module) -> frozenset[str]:
    """Names of the composable functions, PyTorch's and ours, applied to the module."""
    return frozenset(module.__dict__.get(REGISTRY_KEY, ()))


def set_composable(module: nn.Module, key: str, state: object, *, name: str) -> None:
    """Notes in the tables of PyTorch's composable functions that `name` was applied.

    So PyTorch's own functions refuse what does not go together with it.
    """
    module.__dict__.setdefault(STATE_KEY, {})[key] = state
    module.__dict__.setdefault(REGISTRY_KEY, {})[name] = RegistryItem()


def register_load_pre_hook(module: nn.Module, hook: Callable[..., None]) -> None:
    """Runs `hook` before the module's own entries are loaded from a state dict."""
    module._register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]  # PyTorch's


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Tensors made within are ordinary ones, usable by a later training step."""
    with torch.inference_mode(mode=False):
        yield


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Registers `parameter` as `name`, past the checks of `nn.Module.__setattr__`.

    They cost tens of microseconds and twice per parameter and step. A module that overrides
    `__setattr__` gets the ordinary assignment.
    """
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The module's direct parameters with every name, tied ones repeated."""
    return [(name, param) for name, param in module._parameters.items() if param is not None]


def mark_for_dynamo(module: nn.Module) -> None:
    """Tells Dynamo that parameters of this module change identity between calls."""
    module.__dict__["_is_fsdp_managed_module"] = True
    module.__dict__["_fsdp_use_orig_params"] = True


def new_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], tensor: torch.Tensor, stride: Sequence[int]
) -> Spec:
    """The spec of a DTensor with `tensor`'s shape and dtype, and global strides `stride`."""
    meta = TensorMeta(tensor.shape, tuple(stride), tensor.dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def spec_of(tensor: DTensor) -> Spec:
    """The spec itself; rebuilding it from public attributes costs tens of microseconds."""
    return tensor._spec


def respec(spec: Spec, mesh: DeviceMesh, placements: Sequence[Placement]) -> Spec:
    """The spec of the same global tensor on another mesh."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def dtensor_of(local: torch.Tensor, spec: Spec) -> DTensor:
    """A DTensor whose local tensor is `local` itself; its dtype is that of `local`."""
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=meta._replace(dtype=local.dtype))
    return _dtensor(local, spec)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Sharded on `dim` after axes further right cut the same dim into `split_factor` parts.

    Placements are otherwise read from left to right; no public one says this.
    """
    return _StridedShard(dim, split_factor=split_factor)


def shards_dim(placement: Placement, dim: int) -> bool:
    """Whether the placement cuts tensor dim `dim`; a strided one may be no `Shard`."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def joined_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes and groups of several parts of one mesh; no new group is made.

    Publicly a mesh can only be cut, not joined.
    """
    return DeviceMesh._concatenate(list(meshes))


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Several axes as one named axis.

    Makes a group, so every rank of the root mesh must call it; the root mesh remembers it under
    its name, so only once.
    """
    return mesh._flatten(name)


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The values themselves where a functional collective left a promise of them.

    Dispatched operators wait by themselves; a collective or a raw view of the storage does not.
    """
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a subclass whose data lies in tensors that it wraps."""
    return bool(is_traceable_wrapper_subclass(tensor))


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges what two tensor objects are; whoever holds one holds the other then."""
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]  # PyTorch's


def default_store() -> Store:
    """The store through which the default process group met; there is no public way to it."""
    return dist.distributed_c10d._get_default_store()


def is_profiling() -> bool:
    """Whether a profiler records; a flag that PyTorch keeps for cheap questions (0.02 us)."""
    return profiler._is_profiler_enabled


_NO_TRANSFORMS: AbstractContextManager[object] = nullcontext()


def transforms_active() -> bool:
    """Whether a transform of `torch.func` is being computed."""
    return bool(torch._C._are_functorch_transforms_active())


def outside_transforms() -> AbstractContextManager[object]:
    """Tensors made and collectives done within are no part of a `torch.func` transform."""
    if not transforms_active():
        return _NO_TRANSFORMS
    return cast("AbstractContextManager[object]", torch._C._DisableFuncTorch())


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was cut from; itself if from none.

    A slice knows its root, but publicly does not tell it.
    """
    return mesh._get_root_mesh()


def group_device_types(group: dist.ProcessGroup) -> list[str]:
    """Device types that the group has a backend for; `DeviceMesh` tells one, a group none."""
    return [device.type for device in group._device_types]


def opaque_to_dynamo(function: Callable[P, R]) -> Callable[P, R]:
    """Dynamo breaks its graph at `function` and does not look inside.

    `torch.compiler.disable` would load Dynamo, a second's work, when the module is imported;
    this loads it at the first call.
    """
    return torch._compile._disable_dynamo(function)


def allocator_of(
    group: dist.ProcessGroup, device: torch.device
) -> Callable[[int, torch.dtype], torch.Tensor] | None:
    """The process group's own allocator of 1D tensors for `device`, if it has one.

    Only the backend behind the group knows it, and PyTorch hands that out under a private name.
    """
    backend = cast("Any", group._get_backend(device))
    if not backend.supports_tensor_alloc(device):
        return None
    return lambda size, dtype: backend.allocate_tensor(size, dtype=dtype, device=device)


def set_symmetric_backend(name: str) -> None:
    """Chooses who allocates symmetric memory; PyTorch has no public module for it yet."""
    _symmetric_memory().set_backend(name)


def symmetric_pool(device: torch.device) -> torch.cuda.MemPool:
    """Pool of symmetric memory of a device."""
    return cast("torch.cuda.MemPool", _symmetric_memory().get_mem_pool(device))


def meet_in_memory(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Maps the tensor's symmetric memory into all ranks of the group; collective."""
    _symmetric_memory().rendezvous(tensor, group=group.group_name)


def _symmetric_memory() -> ModuleType:
    # Only where it is used: the module asks the driver when it is imported.
    return importlib.import_module("torch.distributed._symmetric_memory")


def box_of(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`local_box` of a DTensor that would lie so."""
    local, offsets = compute_local_shape_and_global_offset(tuple(shape), mesh, placements)
    return tuple(offsets), tuple(local)


no_torch_function = torch._C._disabled_torch_function_impl
"""For a wrapper's `__torch_function__`: otherwise every result is made one of its class again."""


def wrapper_of(cls: type[AnyTensor], like: torch.Tensor) -> AnyTensor:
    """A tensor of `cls` without memory, with the shape, strides, dtype and device of `like`."""
    make = cast("Callable[..., AnyTensor]", torch.Tensor._make_wrapper_subclass)
    # As an inference tensor or not as `like` is, since one can be no view of the other.
    with torch.inference_mode(mode=like.is_inference()):
        return make(cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device)


def tree_map_only(kind: type[Leaf], function: Callable[[Leaf], object], tree: Tree) -> Tree:
    """`tree` with `function` applied to its leaves of `kind`."""
    return cast("Tree", pytree.tree_map_only(kind, function, tree))


def writes_first_argument(op: torch._ops.OpOverload) -> bool:
    """Whether the operator works in place, so that its result is its first argument itself."""
    first = op._schema.arguments[:1]
    return any(each.alias_info is not None and each.alias_info.is_write for each in first)


def mesh_ranks(mesh: DeviceMesh) -> torch.Tensor:
    """The mesh's global ranks, of its shape."""
    return mesh.mesh


def mesh_without_groups(device_type: str, ranks: list[int]) -> DeviceMesh:
    """A mesh of one axis that never communicates, so that no process group need be made for it.

    Publicly a mesh makes its groups, in which all ranks of the world must take part.
    """
    return DeviceMesh(device_type, ranks, _init_backend=False)
