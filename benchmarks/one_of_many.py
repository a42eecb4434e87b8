"""What one rank of many holds and launches: the engine itself, on tensors without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.plan import fakes
from fsdp_core.plan.apply import apply_plan
from fsdp_core.plan.live_storage import LiveStorage
from fsdp_core.plan.model import MeshPlan, ShardingPlan
from fsdp_core.runtime import observe
from fsdp_core.states import TrainingState


@dataclass(frozen=True)
class Step:
    """The second step of rank 0.

    Attributes:
        peak: Most bytes of tensors that were alive at once.
        collectives: Collectives that it started, by mesh axis; those within tp not included.
        operators: Tensor operators that it launched.
        seconds: That the host took.
    """

    peak: int
    collectives: dict[str, int]
    operators: int
    seconds: float


def step_of_one(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], torch.Tensor],
    plan: ShardingPlan,
    micro_batch: int = 1,
) -> Step:
    """Trains two steps with fused AdamW as rank 0 of as many as the plan has.

    There must be no default process group: one whose collectives do nothing is made.
    """
    launched = Counter[str]()

    def note(operator: str, _: torch.Tensor) -> None:
        launched[operator] += 1

    with fakes.fake_ranks(plan.mesh.ranks):
        with torch.device("meta"):
            model = make()
        apply_plan(model, plan, _mesh(plan.mesh))
        with fakes.without_memory(), LiveStorage(also=note, of_fakes=True) as live:
            model.to_empty(device="cpu")
            counting = Counting()
            observe(model, counting)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            began = perf_counter()
            for _ in range(2):
                began = perf_counter()
                live.forget_peak()
                launched.clear()
                counting.started.clear()
                torch.autograd.backward(loss(model, micro_batch))
                optimizer.step()
                optimizer.zero_grad()
            seconds = perf_counter() - began
            return Step(live.peak, dict(counting.started), launched.total(), seconds)


class Counting:
    """Counts collectives as the engine starts them."""

    def __init__(self) -> None:
        self.started = Counter[str]()

    def on_state(self, state: TrainingState, unit_index: int, unit_fqn: str) -> None:
        """Not counted."""

    def on_issue(self, group: str, sequence: int) -> None:
        """One more."""
        del sequence
        self.started[group] += 1

    def on_complete(self, group: str, sequence: int) -> None:
        """Not counted."""


def _mesh(sizes: MeshPlan) -> DeviceMesh:
    axes = {"dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard, "tp": sizes.tp}
    axes = {axis: size for axis, size in axes.items() if size > 1 or axis == "dp_shard"}
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
