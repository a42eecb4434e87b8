"""`fully_shard`: shards a module's parameters in place."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.comm import DataParallelMeshInfo, mesh_info_of
from fsdp_core.errors import AlreadyShardedError, ArgumentError, ContainerError, UnsupportedError
from fsdp_core.options import PlacementFn, ShardingOptions, UnitOptions
from fsdp_core.param import group_params
from fsdp_core.policy import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    SharedMemoryPolicy,
    offload_policy_of,
)
from fsdp_core.runtime.fsdp_module import FSDPModule, fsdp_class_of
from fsdp_core.runtime.fsdp_state import COMPOSABLE_NAME, FSDPState, state_of

_DEFAULT_PRECISION = MixedPrecisionPolicy()
_DEFAULT_OFFLOAD = OffloadPolicy()


class FullyShard:
    """`fully_shard(module)` shards in place; `fully_shard.state(module)` finds the unit."""

    __name__ = "fully_shard"

    @overload
    def __call__(
        self,
        module: nn.Module,
        *,
        mesh: DeviceMesh | None = ...,
        reshard_after_forward: bool | int | None = ...,
        shard_placement_fn: PlacementFn | None = ...,
        mp_policy: MixedPrecisionPolicy = ...,
        offload_policy: OffloadPolicy = ...,
        ignored_params: set[nn.Parameter] | None = ...,
        dp_mesh_dims: DataParallelMeshDims | None = ...,
        shared_memory: SharedMemoryPolicy | None = ...,
    ) -> FSDPModule: ...

    @overload
    def __call__(
        self,
        module: Sequence[nn.Module],
        *,
        mesh: DeviceMesh | None = ...,
        reshard_after_forward: bool | int | None = ...,
        shard_placement_fn: PlacementFn | None = ...,
        mp_policy: MixedPrecisionPolicy = ...,
        offload_policy: OffloadPolicy = ...,
        ignored_params: set[nn.Parameter] | None = ...,
        dp_mesh_dims: DataParallelMeshDims | None = ...,
        shared_memory: SharedMemoryPolicy | None = ...,
    ) -> list[FSDPModule]: ...

    def __call__(  # noqa: PLR0913 - the reference's signature
        self,
        module: nn.Module | Sequence[nn.Module],
        *,
        mesh: DeviceMesh | None = None,
        reshard_after_forward: bool | int | None = None,
        shard_placement_fn: PlacementFn | None = None,
        mp_policy: MixedPrecisionPolicy = _DEFAULT_PRECISION,
        offload_policy: OffloadPolicy = _DEFAULT_OFFLOAD,
        ignored_params: set[nn.Parameter] | None = None,
        dp_mesh_dims: DataParallelMeshDims | None = None,
        shared_memory: SharedMemoryPolicy | None = None,
    ) -> FSDPModule | list[FSDPModule]:
        """Makes `module` one unit: its parameters become slices that are whole only while used.

        Apply it bottom-up: the unit takes every parameter below `module` that no earlier call
        took. On return the parameters are DTensors, so an optimizer can be built on them.

        Args:
            module: One module, or several that communicate as one group.
            mesh: One axis, over which parameters are sharded; two named axes, of which the first
                replicates (HSDP); with `dp_mesh_dims` the full mesh that the parameters, DTensors
                already, lie on. By default one axis of all ranks.
            reshard_after_forward: Whether forward ends by resharding the parameters, at the
                price of one more gather in backward. None: yes, except for the root. A number k:
                sharded over k ranks only, so that backward gathers from few and near ones. What
                stays whole after an evaluation does not see an update of the slices: call
                `reshard` between the two.
            shard_placement_fn: Called with each parameter; returns the `Shard` to use, a
                `ShardPlacementResult` that also names another mesh, or None for dim 0. Any dim
                may be uneven. `Owned()`: not cut; one rank holds the whole parameter.
            mp_policy: Dtypes.
            offload_policy: `CPUOffloadPolicy()` keeps slices, gradients and optimizer state on
                the host.
            ignored_params: Left alone entirely: neither sharded, moved nor reduced.
            dp_mesh_dims: Which named axes of `mesh` shard and replicate.
            shared_memory: Whether ranks of one host exchange CPU tensors through memory that they
                share; None: by the process group. All ranks pass the same, and call together.

        Returns:
            The same module or modules, now also `FSDPModule`.

        Raises:
            ArgumentTypeError: `offload_policy` is no such policy.
            AlreadyShardedError: A module was given to `fully_shard` before.
            ContainerError: A `ModuleList` or `ModuleDict` without a forward.
            ArgumentError: A bad mesh, reshard size, placement or parameter.
            PlacementError: A parameter does not have the dim to shard.
            UnsupportedError: Resharding DTensor parameters to a smaller mesh, or to one that is
                part of an SPMD mesh.
        """
        _check_container(module)
        modules = [module] if isinstance(module, nn.Module) else _root_modules(module)
        for each in modules:
            _check_unsharded(each)
        info = mesh_info_of(mesh if mesh is not None else _default_mesh(), dp_mesh_dims)
        reshard = _Reshard.of(reshard_after_forward, info)
        offload = offload_policy_of(offload_policy)

        ignored = ignored_params or set()
        managed = _without_ignored(_managed_modules(modules), ignored)
        originals = _managed_params(managed, ignored)
        _move_to(info.device, originals, managed)
        options = ShardingOptions(
            mp_policy, offload, reshard.ranks, shard_placement_fn, shared_memory
        )
        groups = group_params(originals, modules, info, options)
        unit_options = UnitOptions(reshard_after_forward=reshard.at_all)
        FSDPState(modules, groups, info.device, mp_policy, unit_options).install()

        for each in managed:
            torch_private.mark_for_dynamo(each)
        for each in modules:
            each.__class__ = fsdp_class_of(type(each))
        # The class was swapped above, which no type checker can follow.
        return cast("FSDPModule | list[FSDPModule]", module)

    def state(self, module: nn.Module) -> FSDPState | None:
        """The unit's state if `module` was given to `fully_shard`, else None."""
        return state_of(module)


fully_shard = FullyShard()


def _check_container(module: nn.Module | Sequence[nn.Module]) -> None:
    if (
        isinstance(module, nn.ModuleList | nn.ModuleDict)
        and type(module).forward is nn.Module.forward
    ):
        raise ContainerError(
            f"fully_shard does not support containers that do not implement forward: {module}"
        )


def _check_unsharded(module: nn.Module) -> None:
    if COMPOSABLE_NAME in torch_private.composable_names(module):
        raise AlreadyShardedError(
            "Each distinct composable distributed API can only be applied to a module once. "
            f"fully_shard has already been applied to the following module:\n{module}"
        )


@dataclass(frozen=True)
class _Reshard:
    """What `reshard_after_forward` means.

    Attributes:
        at_all: Whether forward ends with slices; None: except for the root.
        ranks: How many ranks then share a parameter; None: all.
    """

    at_all: bool | None
    ranks: int | None = None

    @classmethod
    def of(cls, wanted: bool | int | None, info: DataParallelMeshInfo) -> Self:  # noqa: FBT001 - the user's argument as it came
        if wanted is None or isinstance(wanted, bool):
            return cls(wanted)
        if not isinstance(wanted, int):
            raise ArgumentError(
                "reshard_after_forward should be a bool or an int representing the group size to "
                f"reshard to, not {wanted}"
            )
        if info.is_spmd:
            raise UnsupportedError(
                "reshard_after_forward as int is not yet supported with an SPMD mesh "
                "(dp_mesh_dims). Pass True, False or None."
            )
        size = info.shard.size
        if wanted < 1 or size % wanted != 0:
            raise ArgumentError(
                "If passing reshard_after_forward as an int, it should be a factor of "
                f"{size}, not {wanted}"
            )
        if wanted == size:
            return cls(at_all=True)
        if wanted == 1:
            warnings.warn(
                "reshard_after_forward=1 (int) means keeping parameters whole after forward, "
                "instead of reshard_after_forward=True (bool)",
                UserWarning,
                stacklevel=3,
            )
            return cls(at_all=False)
        return cls(at_all=True, ranks=wanted)


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator()
    device_type = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _root_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of `modules` that are not below another of them, in order, each once."""
    distinct = list(dict.fromkeys(modules))
    below = {child for module in distinct for child in module.modules() if child is not module}
    return [module for module in distinct if module not in below]


def _managed_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules below `modules`, themselves included, that no nested unit has taken.

    In post-order, children first: it decides the packing order, which must equal the
    reference's for equal sums.
    """
    visited: set[nn.Module] = set()
    found: list[nn.Module] = []

    def walk(module: nn.Module, *, is_root: bool) -> None:
        taken = not is_root and state_of(module) is not None
        if taken or "replicate" in torch_private.composable_names(module):
            return
        visited.add(module)
        for child in module.children():
            if child not in visited:
                walk(child, is_root=child in modules)
        found.append(module)

    for module in modules:
        walk(module, is_root=True)
    return found


def _managed_params(
    modules: Sequence[nn.Module], ignored: Collection[nn.Parameter]
) -> list[nn.Parameter]:
    """The parameters registered directly on `modules`, each once, without the ignored."""
    params: dict[nn.Parameter, None] = {}
    for module in modules:
        for param in module.parameters(recurse=False):
            if param not in ignored:
                params[param] = None
    return list(params)


def _without_ignored(
    modules: Sequence[nn.Module], ignored: Collection[nn.Parameter]
) -> list[nn.Module]:
    """`modules` without those that hold only ignored parameters, throughout, and no buffers."""

    def is_ignored(module: nn.Module) -> bool:
        if any(True for _ in module.buffers()):
            return False
        params = list(module.parameters())
        return all(param in ignored for param in params)

    return [module for module in modules if not is_ignored(module)]


def _move_to(
    device: torch.device, params: Sequence[nn.Parameter], modules: Sequence[nn.Module]
) -> None:
    """Moves parameters and the modules' buffers to `device`; those on meta stay there.

    Raises:
        ArgumentError: A DTensor lies on a mesh of another kind of device.
    """
    buffers = (buffer for module in modules for buffer in module.buffers(recurse=False))
    for tensor in dict.fromkeys(itertools.chain(params, buffers)):
        if tensor.device in (device, torch.device("meta")):
            continue
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.get_coordinate() is None:
                continue  # empty, and PyTorch makes it on the host whatever the mesh's device is
            raise ArgumentError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                f"{tensor.device_mesh.device_type} for DTensor and {device.type} for FSDP. "
                "Distribute the tensor over a mesh of the same devices."
            )
        if torch_private.is_wrapper(tensor):
            # Its data lies in inner tensors, which `.data` does not reach.
            with torch.no_grad():
                moved = nn.Parameter(tensor.to(device), requires_grad=tensor.requires_grad)
            torch_private.swap(tensor, moved)
        else:
            tensor.data = tensor.to(device)
