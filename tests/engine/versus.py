"""The same training by both engines, and everything that must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp_core.comm import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from fsdp_core.param import FSDPParamGroup
from fsdp_core.policy import DataParallelMeshDims
from fsdp_core.runtime.fsdp_state import states_in


@dataclass(frozen=True)
class Engine:
    """`fully_shard` of one of the two, and the classes that go with it."""

    name: str
    shard: Callable[..., Any]
    precision: Callable[..., Any]
    offload: Callable[..., Any]
    mesh_dims: Callable[..., Any]
    placement_result: Callable[..., Any]
    fsdp_mesh_info: Callable[..., Any]
    hsdp_mesh_info: Callable[..., Any]
    ddp_mesh_info: Callable[..., Any]

    @property
    def is_ours(self) -> bool:
        """Whether it is the one under test."""
        return self.name == "ours"


def ours(*, agree: bool = True) -> Engine:
    """The engine under test.

    Args:
        agree: Whether ranks agree on unused parameters. The flags that travel for it shift what
            is packed, so that from three ranks on gloo sums in another order than it does for
            the reference.
    """

    def shard(*args: object, **kwargs: object) -> object:
        sharded: object = fully_shard(*args, **kwargs)  # type: ignore[call-overload]  # passed on
        for module in sharded if isinstance(sharded, list) else [sharded]:
            assert isinstance(module, nn.Module)
            for group in groups_of(module, recurse=False):
                group.options.agree_on_unused = agree
        return sharded

    return Engine(
        "ours",
        shard,
        MixedPrecisionPolicy,
        CPUOffloadPolicy,
        DataParallelMeshDims,
        ShardPlacementResult,
        FSDPMeshInfo,
        HSDPMeshInfo,
        DDPMeshInfo,
    )


def theirs() -> Engine:
    """The reference."""
    from torch.distributed import fsdp  # noqa: PLC0415 - only the oracle may load it
    from torch.distributed.fsdp._fully_shard import (  # noqa: PLC0415 - only the oracle may load it
        _fsdp_api,
        _fsdp_common,
    )

    return Engine(
        "theirs",
        fsdp.fully_shard,
        fsdp.MixedPrecisionPolicy,
        fsdp.CPUOffloadPolicy,
        getattr(_fsdp_api, "DataParallelMeshDims", cast("Any", None)),  # new in PyTorch 2.13
        getattr(_fsdp_common, "ShardPlacementResult", cast("Any", None)),  # not in PyTorch 2.11
        _fsdp_common.FSDPMeshInfo,
        _fsdp_common.HSDPMeshInfo,
        _fsdp_common.DDPMeshInfo,
    )


def engines() -> tuple[Engine, Engine]:
    """Ours, packing as the reference does, and the reference."""
    return ours(agree=False), theirs()


@dataclass
class Trace:
    """What a training leaves behind, step by step, and at its end."""

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    params: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    model: Any,  # noqa: ANN401 - a class of either engine
    loss_of_step: Callable[[nn.Module, int], torch.Tensor],
    *,
    steps: int = 3,
    microbatches: int = 1,
    before_backward: Callable[[Any, int], None] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Trace:
    """Trains, and notes losses, this rank's slices of gradients, and of parameters at the end.

    Args:
        model: Sharded.
        loss_of_step: Given the model and a number, different for each microbatch.
        steps: Of the optimizer.
        microbatches: Backwards for each of them.
        before_backward: Given the model and the number of the microbatch, before its forward.
        optimizer: Its class.
    """
    chosen = optimizer(model.parameters(), lr=1e-2)
    trace = Trace()
    for step in range(steps):
        for micro in range(microbatches):
            if before_backward is not None:
                before_backward(model, micro)
            loss = loss_of_step(model, step * microbatches + micro)
            torch.autograd.backward(loss)
            trace.losses.append(local(loss.detach()).item())
        trace.grads.append(
            {
                name: None if param.grad is None else local(param.grad).clone()
                for name, param in model.named_parameters()
            }
        )
        chosen.step()
        chosen.zero_grad()
    trace.params = {name: local(param).clone() for name, param in model.state_dict().items()}
    return trace


def reduce_at(last: int, *, every: bool = False) -> Callable[[Any, int], None]:
    """For `train`: microbatches reduce only from number `last` on, unless `every` does."""

    def set_sync(model: Any, micro: int) -> None:  # noqa: ANN401 - a class of either engine
        model.set_requires_gradient_sync(every or micro >= last)

    return set_sync


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local().detach()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor; any other tensor as it is."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def assert_equal(mine: Trace, reference: Trace) -> None:
    """Bit for bit; gradients that are None are None in both."""
    assert_close(mine, reference, rtol=0.0, atol=0.0)


def assert_close(mine: Trace, reference: Trace, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Within tolerances, dtypes and shapes included."""
    torch.testing.assert_close(mine.losses, reference.losses, rtol=rtol, atol=atol)
    assert len(mine.grads) == len(reference.grads)
    for step, (ours_, theirs_) in enumerate(zip(mine.grads, reference.grads, strict=True)):
        assert ours_.keys() == theirs_.keys()
        for name, grad in ours_.items():
            assert_same_tensor(f"step {step}: {name}", grad, theirs_[name], rtol, atol)
    assert mine.params.keys() == reference.params.keys()
    for name, param in mine.params.items():
        assert_same_tensor(name, param, reference.params[name], rtol, atol)


def assert_same_tensor(
    what: str, mine: torch.Tensor | None, other: torch.Tensor | None, rtol: float, atol: float
) -> None:
    """Within tolerances; None is the same as None alone. `what` names it."""
    if mine is None or other is None:
        assert mine is other, f"{what}: {mine} against {other}"
        return
    torch.testing.assert_close(
        mine, other, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def groups_of(module: nn.Module, *, recurse: bool = True) -> Iterator[FSDPParamGroup]:
    """The groups of the module's units, or of its own unit alone."""
    if recurse:
        for state in states_in(module):
            yield from state.groups
    else:
        found = fully_shard.state(module)
        assert found is not None
        yield from found.groups


def assert_same_full(mine: nn.Module, plain: nn.Module, *, rtol: float, atol: float) -> None:
    """Parameters and gradients of a sharded model and a plain one."""
    for (name, param), expected in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert_same_tensor(name, full(param), full(expected), rtol, atol)
        grad, whole = (None if p.grad is None else full(p.grad) for p in (param, expected))
        assert_same_tensor(f"gradient of {name}", grad, whole, rtol, atol)
