"""The verb: shard a module's parameters in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core import torch_private
from fsdp_core.comm import MeshRoles
from fsdp_core.errors import AlreadyShardedError, ArgumentError, ContainerError, UnsupportedError
from fsdp_core.param import FSDPParam, FSDPParamGroup, find_slots
from fsdp_core.policy import MixedPrecisionPolicy, OffloadPolicy
from fsdp_core.runtime.fsdp_module import FSDPModule, fsdp_class_of
from fsdp_core.runtime.fsdp_state import COMPOSABLE_NAME, FSDPState, state_of
from fsdp_core.runtime.managed import managed_modules, managed_params, move_to, root_modules
from fsdp_core.runtime.unit_options import UnitOptions

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard

_DEFAULT_PRECISION = MixedPrecisionPolicy()
_DEFAULT_OFFLOAD = OffloadPolicy()

PlacementFn = Callable[[nn.Parameter], "Shard | None"]


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
    ) -> FSDPModule | list[FSDPModule]:
        """Makes `module` one unit: its parameters become slices that are whole only while used.

        Apply it bottom-up: the unit takes every parameter below `module` that no earlier call
        took. On return the parameters are DTensors with `Shard(0)` over the mesh, so an
        optimizer can be built on them.

        Args:
            module: One module, or several that communicate as one group.
            mesh: One axis, over which parameters are sharded; by default all ranks.
            reshard_after_forward: Whether forward ends with the parameters sliced again, at the
                price of one more gather in backward. None: yes, except for the root.
            shard_placement_fn: Not supported yet.
            mp_policy: Dtypes.
            offload_policy: `OffloadPolicy()`; offloading is not supported yet.
            ignored_params: Left alone entirely: neither sharded, moved nor reduced.

        Returns:
            The same module or modules, now also `FSDPModule`.

        Raises:
            AlreadyShardedError: A module was given to `fully_shard` before.
            ContainerError: A `ModuleList` or `ModuleDict` without a forward.
            ArgumentError: A bad mesh, reshard size, or parameter.
            ScalarParameterError: A zero-dimensional parameter.
            UnsupportedError: A feature that is not there yet, by name.
        """
        _refuse_unsupported(shard_placement_fn, offload_policy)
        _check_container(module)
        modules = [module] if isinstance(module, nn.Module) else root_modules(module)
        for each in modules:
            _check_unsharded(each)
        roles = MeshRoles.of(mesh if mesh is not None else _default_mesh())
        options = UnitOptions(
            reshard_after_forward=_as_bool(reshard_after_forward, roles.shard.size)
        )

        managed = managed_modules(modules)
        originals = managed_params(managed, ignored_params or set())
        move_to(roles.device, originals, managed)
        slots = find_slots(originals, modules)
        params = [
            FSDPParam(param, slot, roles, mp_policy)
            for param, slot in zip(originals, slots, strict=True)
        ]
        groups = [FSDPParamGroup(params, roles, mp_policy)] if params else []
        FSDPState(modules, groups, roles.device, mp_policy, options).install()

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


def _refuse_unsupported(placement_fn: PlacementFn | None, offload: OffloadPolicy) -> None:
    if placement_fn is not None:
        raise UnsupportedError(
            "shard_placement_fn is not supported yet: every parameter is sharded on dim 0 of "
            "the given mesh. Leave it out."
        )
    if type(offload) is not OffloadPolicy:
        raise UnsupportedError(
            f"{type(offload).__name__} is not supported yet: slices stay on the mesh's device. "
            "Pass OffloadPolicy() or leave it out."
        )


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


def _as_bool(reshard_after_forward: bool | int | None, size: int) -> bool | None:  # noqa: FBT001 - the user's argument as it came
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if not isinstance(reshard_after_forward, int):
        raise ArgumentError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {reshard_after_forward}"
        )
    if reshard_after_forward < 1 or size % reshard_after_forward != 0:
        raise ArgumentError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{size}, not {reshard_after_forward}"
        )
    if reshard_after_forward == size:
        return True
    if reshard_after_forward == 1:
        warnings.warn(
            "reshard_after_forward=1 (int) means keeping parameters whole after forward, "
            "instead of reshard_after_forward=True (bool)",
            UserWarning,
            stacklevel=3,
        )
        return False
    raise UnsupportedError(
        f"Resharding to {reshard_after_forward} of {size} ranks after forward is not supported "
        "yet. Pass True, False or None."
    )


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator()
    device_type = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))
