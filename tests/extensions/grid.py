"""Two meshes of four ranks, tensors on them, and the reference beside ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_core.torch_private.sharded_tensor import ShardedTensor
from tests.engine.gang import RankContext


@dataclass(frozen=True)
class Reference:
    """The modules that are compared with; only ranks may load them."""

    extensions: ModuleType
    tensor_parallel: ModuleType
    shard: ModuleType
    flatten: ModuleType


def reference() -> Reference:
    from torch.distributed.fsdp import _fsdp_extensions, _shard_utils  # noqa: PLC0415 - as above
    from torch.distributed.tensor.parallel import _data_parallel_utils  # noqa: PLC0415 - as above
    from torch.distributed.tensor.parallel import fsdp as tensor_parallel  # noqa: PLC0415 - as above

    return Reference(_fsdp_extensions, tensor_parallel, _shard_utils, _data_parallel_utils)


def grid(ctx: RankContext, shape: Sequence[int] = (2, 2)) -> DeviceMesh:
    """Data-parallel rows, tensor-parallel columns; with three axes replication comes first."""
    names = ("dp_replicate", "dp_shard", "tp")[-len(shape) :]
    return init_device_mesh(ctx.device.type, tuple(shape), mesh_dim_names=names)


def numbered(ctx: RankContext, *shape: int) -> torch.Tensor:
    """A tensor whose every element is another."""
    count = int(torch.Size(shape).numel())
    return torch.arange(float(count), device=ctx.device).view(*shape)


@contextmanager
def outdated_words() -> Iterator[None]:
    """PyTorch's ShardedTensor and its group's default device tell that they are outdated."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`_get_pg_default_device` will be deprecated", UserWarning
        )
        warnings.filterwarnings("ignore", "Multiple backends are registered", UserWarning)
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        yield


@dataclass(frozen=True)
class Raised:
    """What a call ended in, if not in a value."""

    kind: type[BaseException]
    message: str


def outcome(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - a value of any kind, or Raised
    try:
        return call()
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:
        return Raised(type(error), " ".join(str(each) for each in error.args))


def assert_same(ours: Any, theirs: Any) -> None:  # noqa: ANN401 - of any kind
    """Equal values, metadata and classes, through ShardedTensors and DTensors."""
    if isinstance(theirs, Raised):
        assert isinstance(ours, Raised), f"{theirs} was expected, got {ours}"
        assert issubclass(ours.kind, theirs.kind)
    elif isinstance(theirs, ShardedTensor):
        assert type(ours) is type(theirs)
        assert ours.metadata() == theirs.metadata()
        assert ours.sharding_spec() == theirs.sharding_spec()
        mine, expected = ours.local_shards(), theirs.local_shards()
        for one, other in zip(mine, expected, strict=True):
            assert one.metadata == other.metadata
            assert_same(one.tensor, other.tensor)
    elif isinstance(theirs, DTensor):
        assert isinstance(ours, DTensor)
        assert ours.device_mesh == theirs.device_mesh
        assert ours.placements == theirs.placements
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
        assert ours.requires_grad == theirs.requires_grad
        assert_same(ours.to_local(), theirs.to_local())
    elif isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs
