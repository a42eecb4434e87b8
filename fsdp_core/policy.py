"""Policies that users set once: precision, offload, owned parameters, shared memory, mesh axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_core.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of one unit. Sharded parameters, gradients and optimizer state keep the original.

    Attributes:
        param_dtype: Of the unsharded parameter, so of the all-gather and the computation.
            None, or the original dtype, means no cast.
        reduce_dtype: Of the reduce-scatter, and of gradients accumulated without a reduction.
            None, or `param_dtype`, means the dtype in which autograd produced them.
        output_dtype: To which floating-point forward outputs are cast. None leaves them.
        cast_forward_inputs: Whether floating-point forward inputs are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """Slices stay on the mesh's device. Base class of the policies that move them."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Slices, their gradients and optimizer state are in host memory.

    Attributes:
        pin_memory: Whether that memory is page-locked, which lets copies overlap computation.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class SharedMemoryPolicy:
    """Ranks of one host exchange CPU tensors through shared memory instead of sockets.

    Ranks that cannot share memory use their process group, and log that once. So do groups with
    tensor subclasses, `Owned` parameters or a smaller mesh, for these. If a group is on several
    hosts, with equally many contiguous ranks on each, ranks of a host exchange through memory, and
    hosts by a process group.

    Sums of three and more ranks are made in the order of ranks, on several hosts first within each,
    so they differ in the last bit from gloo's.

    Attributes:
        share_storage: Whether all ranks of the host compute with one copy of the parameters: a
            gather then copies nothing and only waits. It applies to parameters that are sharded on
            dim 0 and computed with in their own dtype; others are copied. Slices may be written by
            `torch.optim.Optimizer.step` and `load_state_dict`, which wait until no rank computes
            with them; other code that writes them must wait for all ranks first. On several hosts
            it has no effect.
        part_of_host: Ranks of one host with different values count as ranks of different hosts, for
            example one value for each NUMA node.
    """

    share_storage: bool = False
    part_of_host: str = ""


@dataclass(frozen=True)
class Owned:
    """What `shard_placement_fn` returns for a parameter that one rank owns whole.

    For optimizers that need whole matrices, such as Muon and Shampoo: one rank holds the parameter,
    only that rank gets its whole gradient and updates it. During computation every rank has it
    whole, like any other.

    Attributes:
        rank: Place of the owner on the shard axis. None: owners of the unit's parameters are chosen
            so that each owns about the same amount. With fewer of them than ranks the first ranks
            own them, in every unit: then name the owners, to spread the units.

    Clip with `fsdp_core.clip_grad_norm_`; PyTorch's function raises. `torch.amp.GradScaler` sees an
    overflow in an owned gradient on its owner only: with it, shard the parameter instead.
    """

    rank: int | None = None


def offload_policy_of(policy: object) -> OffloadPolicy:
    """`policy` as a class of this module; PyTorch's own classes are recognised by their names.

    Raises:
        ArgumentTypeError: It is neither.
    """
    if isinstance(policy, OffloadPolicy):
        return policy
    reference = "torch.distributed."
    names = {c.__name__ for c in type(policy).__mro__ if c.__module__.startswith(reference)}
    if CPUOffloadPolicy.__name__ in names:
        return CPUOffloadPolicy(bool(getattr(policy, "pin_memory", True)))
    if OffloadPolicy.__name__ in names:
        return OffloadPolicy()
    raise ArgumentTypeError(
        f"offload_policy is a {type(policy).__name__}; pass OffloadPolicy() or CPUOffloadPolicy()."
    )


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a full SPMD mesh are data parallel, by name.

    For parameters that are already DTensors on the whole mesh. Several names are flattened, in the
    order of the mesh, into one axis.

    Attributes:
        shard: Axes that parameters are sharded over.
        replicate: Axes that parameters are replicated over; gradients are averaged over both.

    Raises:
        ArgumentError: Neither is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard and not self.replicate:
            raise ArgumentError(
                "At least one of shard or replicate must be set in DataParallelMeshDims: "
                "name the mesh axes, for example DataParallelMeshDims(shard='dp_shard')."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of `shard`, none to several."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names of `replicate`, none to several."""
        return _names(self.replicate)


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)
