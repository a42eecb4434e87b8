"""The order that device work is given, as a script: what CUDA needs, checked without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import nn

from fsdp_core import fully_shard
from fsdp_core.comm import CollectiveLedger, CommLink, HostLanes, Lane, Mark, lanes_for
from fsdp_core.runtime import NullObserver
from tests.engine.gang import Gangs, RankContext
from tests.engine.sharded import state


class LoggedLanes(HostLanes):
    """Writes down what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def enter(self, lane: Lane) -> AbstractContextManager[object]:
        return self._entered(lane)

    @contextmanager
    def _entered(self, lane: Lane) -> Iterator[None]:
        self.log.append(f"on {lane.name}")
        yield
        self.log.append(f"off {lane.name}")

    def mark(self, lane: Lane) -> Mark:
        self.log.append(f"mark {lane.name}")
        return super().mark(lane)

    def follow_mark(self, lane: Lane, mark: Mark) -> None:
        del mark
        self.log.append(f"{lane.name} after mark")

    def follow(self, lane: Lane, earlier: Lane) -> None:
        self.log.append(f"{lane.name} after {earlier.name}")


GATHER = ["on PACK", "off PACK", "GATHER after PACK", "on GATHER", "off GATHER", "mark GATHER"]
# The gather buffer came from PACK's memory: PACK may reuse it only after the copy out.
COPY_OUT = ["COMPUTE after mark", "mark COMPUTE", "PACK after mark", "GATHER after mark"]
REDUCE = ["REDUCE after COMPUTE", "on REDUCE", "off REDUCE"]
# The packed gradients came from COMPUTE's memory: COMPUTE may reuse it after the collective.
LAND = ["on REDUCE", "mark REDUCE", "off REDUCE", "COMPUTE after mark", "on REDUCE", "off REDUCE"]


@pytest.mark.ranks
def test_lanes_are_ordered_wherever_memory_changes_hands(gangs: Gangs) -> None:
    gangs(1).run(check_script)


def check_script(ctx: RankContext) -> None:
    model = nn.Linear(2, 2).to(ctx.device)
    fully_shard(model, mesh=ctx.mesh)
    group = state(model).groups[0]
    lanes = LoggedLanes()
    link = CommLink(lanes, CollectiveLedger(NullObserver()))
    group.issue_unshard(link, after_compute=True)
    group.finish_unshard()
    assert lanes.log == ["PACK after COMPUTE", "GATHER after COMPUTE", *GATHER, *COPY_OUT]
    lanes.log.clear()
    for param in group.params:
        param.unsharded().parameter.grad = torch.ones_like(param.unsharded().parameter)
    (batch,) = group.take_grads(was_reached=True)
    pending = group.issue_reduce(batch, link)
    group.reshard()
    assert lanes.log == REDUCE
    lanes.log.clear()
    pending.land(link)
    assert lanes.log == LAND
    assert all(param.grad is not None for param in model.parameters())
    lanes.log.clear()
    group.issue_unshard(link, after_compute=False)
    group.drop_gather()
    assert lanes.log == [*GATHER, *COPY_OUT]


def test_the_host_needs_no_streams() -> None:
    assert isinstance(lanes_for(torch.device("cpu")), HostLanes)
