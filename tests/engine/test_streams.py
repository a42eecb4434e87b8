"""The order that device work is given, as a script: what CUDA needs, checked without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import nn

from fsdp_core import fully_shard
from fsdp_core.comm import CommContext, Event, HostStreams, Stream, streams_for
from tests.engine.gang import Gangs, RankContext
from tests.engine.sharded import state


class LoggedStreams(HostStreams):
    """Writes down what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def enter(self, stream: Stream) -> AbstractContextManager[object]:
        return self._entered(stream)

    @contextmanager
    def _entered(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        yield
        self.log.append(f"off {stream.name}")

    def record_event(self, stream: Stream) -> Event:
        self.log.append(f"event {stream.name}")
        return super().record_event(stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        del event
        self.log.append(f"{stream.name} after event")

    def wait_stream(self, stream: Stream, earlier: Stream) -> None:
        self.log.append(f"{stream.name} after {earlier.name}")


GATHER = ["on PACK", "off PACK", "GATHER after PACK", "on GATHER", "off GATHER", "event GATHER"]
# The gather buffer came from PACK's memory: PACK may reuse it only after the copy out.
COPY_OUT = ["COMPUTE after event", "event COMPUTE", "PACK after event", "GATHER after event"]
REDUCE = ["REDUCE after COMPUTE", "on REDUCE", "off REDUCE"]
# The packed gradients came from COMPUTE's memory: COMPUTE may reuse it after the collective.
LAND = ["on REDUCE", "event REDUCE", "off REDUCE", "COMPUTE after event", "on REDUCE", "off REDUCE"]


@pytest.mark.ranks
def test_streams_are_ordered_wherever_memory_changes_hands(cpu_gangs: Gangs) -> None:
    cpu_gangs(2).run(check_script)


def check_script(ctx: RankContext) -> None:
    model = nn.Linear(2, 2).to(ctx.device)
    fully_shard(model, mesh=ctx.mesh)
    group = state(model).groups[0]
    streams = LoggedStreams()
    comm = CommContext(lambda: streams)
    group.issue_unshard(comm, after_compute=True)
    group.finish_unshard()
    assert streams.log == ["PACK after COMPUTE", "GATHER after COMPUTE", *GATHER, *COPY_OUT]
    streams.log.clear()
    for param in group.params:
        param.unsharded().parameter.grad = torch.ones_like(param.unsharded().parameter)
    (batch,) = group.take_grads(was_reached=True)
    pending = group.issue_reduce(batch, comm)
    group.reshard()
    assert streams.log == REDUCE
    streams.log.clear()
    pending.land(comm)
    assert streams.log == LAND
    assert all(param.grad is not None for param in model.parameters())
    streams.log.clear()
    group.issue_unshard(comm, after_compute=False)
    group.drop_gather()
    assert streams.log == [*GATHER, *COPY_OUT]


def test_the_host_needs_no_streams() -> None:
    assert isinstance(streams_for(torch.device("cpu")), HostStreams)
