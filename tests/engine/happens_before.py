"""An accelerator that is not there: streams as clocks, and every tensor's memory watched.

Kernels run at once on the host, so results are right whatever the order. What is checked is the
order that the device would have been *told*. Each stream counts its kernels and knows how far
every other stream must have come (a vector clock); events and waits carry that knowledge. Of
each storage the reads and writes are kept, as (stream, count).

Reported as a race:

- a read that does not come after a write of the same storage, or a write after a use of it;
- memory of a stream's pool that the stream may hand out again although another stream's use of
  it need not have ended. The caching allocator does so as soon as the last reference is gone or
  a storage is resized to nothing, without asking the device. Whatever the stream allocates next
  is taken to be that memory.

Besides, every look of the host at a tensor's values is noted: there the host would wait for the
device.

A collective of `async_op=True` runs on a stream of its group's own, as NCCL's do, which starts after the
current stream; waiting for its work makes the current stream wait. Any other runs on the current stream.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_core.comm import DeviceStreams, Stream
from tests.engine.sharded import states

_STREAM_NAMES = [stream.name for stream in Stream if stream is not Stream.COMPUTE]
_NOT_ASKING = ("happens_before.py", "streams.py", "contextlib.py")


@dataclass(frozen=True)
class Event:
    of: str
    clock: dict[str, int]
    device: SimulatedDevice

    def synchronize(self) -> None:
        """The host waits."""
        self.device.host_waits.append(_asker())

    def query(self) -> bool:
        return self.device.is_idle


class Timeline:
    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.name = name
        self.clock: dict[str, int] = {}
        self._device = device

    def record_event(self) -> Event:
        return Event(self.name, dict(self.clock), self._device)

    def wait_event(self, event: Event) -> None:
        if self._device.hears(f"{_asker()}: {self.name} after {event.of}"):
            self.join(event)

    def wait_stream(self, stream: Timeline) -> None:
        self.wait_event(stream.record_event())

    def join(self, event: Event) -> None:
        for name, count in event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), count)

    def tick(self) -> int:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def has_seen(self, uses: Mapping[str, int]) -> bool:
        return all(self.clock.get(name, 0) >= count for name, count in uses.items())

    def __enter__(self) -> Self:
        self._device.stack.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._device.stack.pop()


def _asker() -> str:
    """The engine's function that orders a stream: the name of the edge."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.endswith(_NOT_ASKING) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_qualname


class Collective(NamedTuple):
    """One that was started.

    Attributes:
        name: Of the function.
        stream: On which it runs.
        result_bytes: Of what it writes.
        after: How many kernels of COMPUTE it runs after.
    """

    name: str
    stream: str
    result_bytes: int
    after: int


class SimulatedDevice:
    """Stands in for `torch.cuda` where the engine asks for streams.

    Args:
        deaf_to: An edge that is asked for in vain.

    Attributes:
        collectives: In the order in which they were started.
        copies_out: Of gathers: which kernels of COMPUTE they were.
        host_waits: Who had the host wait for the device.
        is_idle: Whether it has done all that it was told.
    """

    def __init__(self, deaf_to: str | None = None) -> None:
        self.stack: list[Timeline] = [Timeline(self, "COMPUTE")]
        self.edges: dict[str, None] = {}
        self.collectives: list[Collective] = []
        self.copies_out: list[int] = []
        self.host_waits: list[str] = []
        self.is_idle = True
        self._deaf_to = deaf_to
        self._names = iter(_STREAM_NAMES)
        self._of_groups: dict[str, Timeline] = {}

    @property
    def current(self) -> Timeline:
        return self.stack[-1]

    def hears(self, edge: str) -> bool:
        self.edges[edge] = None
        return edge != self._deaf_to

    def Stream(self, device: torch.device, *, priority: int) -> torch.Stream:  # noqa: N802 - a class there
        del device, priority
        return cast("torch.Stream", Timeline(self, next(self._names)))

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream

    def current_stream(self, device: torch.device) -> torch.Stream:
        del device
        return cast("torch.Stream", self.current)

    def of_group(self, group: dist.ProcessGroup) -> Timeline:
        name = f"NCCL {group.group_name}"
        return self._of_groups.setdefault(name, Timeline(self, name))


@dataclass
class Block:
    """Memory of one storage, from when it is got until it is given back."""

    pool: str
    made_by: str
    reads: dict[str, int] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)


class Watch(TorchDispatchMode):
    """Notes which stream uses which memory, and what may go wrong."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        self.races: dict[str, None] = {}
        self.host_reads: list[str] = []
        self._device = device
        self._blocks: dict[int, tuple[StorageWeakRef, Block]] = {}
        self._given_back: list[Block] = []
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._is_paused, before = True, self._is_paused
        yield
        self._is_paused = before

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        del types
        given = dict(kwargs or {})
        if self._is_paused:
            return func(*args, **given)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note_host_read(_asker())
        reads, writes = _reads_and_writes(func, args, given)
        result = func(*args, **given)
        # A view reads and writes nothing.
        if not func.is_view:
            stream = self._device.current
            self.use(stream, reads, writes, name := str(func))
            for tensor in _tensors(result):
                self._block(tensor.untyped_storage(), stream, made_by=name)
        return result

    def note_host_read(self, asker: str) -> None:
        # Ranks look at each other's plans only where there is no accelerator.
        if asker != "_agree":
            self.host_reads.append(asker)

    def use(
        self,
        stream: Timeline,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        name: str,
    ) -> None:
        """One kernel on `stream`."""
        self._collect()
        now = stream.tick()
        if name.startswith("aten.split_with_sizes_copy"):
            self._device.copies_out.append(now)
        for tensor in reads:
            if (block := self._block(tensor.untyped_storage(), None, made_by="earlier")) is None:
                continue
            if not stream.has_seen(block.writes):
                self._report(f"{stream.name}: {name} reads too early", block)
            block.reads[stream.name] = now
        for tensor in writes:
            if (block := self._block(tensor.untyped_storage(), None, made_by="earlier")) is None:
                continue
            if not stream.has_seen(block.writes) or not stream.has_seen(block.reads):
                self._report(f"{stream.name}: {name} writes too early", block)
            block.writes[stream.name] = now

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """The storage's memory goes, or comes."""
        self._collect()
        known = self._blocks.pop(storage._cdata, None)
        if size == 0 and known is not None:
            self._given_back.append(known[1])
        elif size > 0:
            self._make(storage, self._device.current, "resize_")

    def _block(
        self, storage: torch.UntypedStorage, stream: Timeline | None, *, made_by: str
    ) -> Block | None:
        if storage.size() == 0:
            return None
        known = self._blocks.get(storage._cdata)
        return known[1] if known else self._make(storage, stream, made_by)

    def _make(self, storage: torch.UntypedStorage, stream: Timeline | None, made_by: str) -> Block:
        # What was there before the watch began belongs to COMPUTE and is at rest.
        block = Block(stream.name if stream else "COMPUTE", made_by)
        if stream is not None:
            block.writes[stream.name] = stream.clock.get(stream.name, 0)
            self._check_reuse(stream)
        ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # PyTorch's
        self._blocks[storage._cdata] = (ref, block)
        return block

    def _check_reuse(self, stream: Timeline) -> None:
        for block in [each for each in self._given_back if each.pool == stream.name]:
            self._given_back.remove(block)
            if not stream.has_seen(block.reads) or not stream.has_seen(block.writes):
                self._report(f"{stream.name} may reuse it too early", block)

    def _collect(self) -> None:
        gone = [
            key
            for key, (ref, _) in self._blocks.items()
            if ref.expired()  # type: ignore[no-untyped-call]  # PyTorch's
        ]
        for key in gone:
            self._given_back.append(self._blocks.pop(key)[1])

    def _report(self, what: str, block: Block) -> None:
        self.races[
            f"{what}: memory of {block.pool} made by {block.made_by}, "
            f"read by {sorted(block.reads)}, written by {sorted(block.writes)}"
        ] = None


def _tensors(tree: object) -> list[torch.Tensor]:
    found = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    flat: list[torch.Tensor] = []
    for tensor in found:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        full = getattr(local, "full", local)  # of a weight that travels in low precision
        if full.device.type != "meta":
            flat.append(full)
    return flat


def _reads_and_writes(
    func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(_tensors(value))
    return reads, writes


class Work:
    """Of a collective that NCCL would do."""

    def __init__(self, device: SimulatedDevice, end: Event) -> None:
        self._device = device
        self._end = end

    def wait(self, timeout: object = None) -> bool:
        del timeout
        self._device.current.join(self._end)
        return True


@dataclass(frozen=True)
class Simulation:
    device: SimulatedDevice
    watch: Watch

    @property
    def races(self) -> list[str]:
        return list(self.watch.races)

    @property
    def edges(self) -> set[str]:
        return set(self.device.edges)

    def own_stream(self, name: str) -> torch.Stream:
        """A stream of the user's."""
        return cast("torch.Stream", Timeline(self.device, name))

    def takes(self, model: nn.Module) -> None:
        """Has the model's units communicate on simulated streams."""
        for state in states(model):
            state.context.shared._make_streams = self._streams
        self.watch.host_reads.clear()  # making it may look at ranks

    def _streams(self) -> DeviceStreams:
        return DeviceStreams(torch.device("cpu"), self.device)


@contextmanager
def simulated(deaf_to: str | None = None) -> Iterator[Simulation]:
    """Everything within is watched."""
    device = SimulatedDevice(deaf_to)
    watch = Watch(device)
    resize = torch.UntypedStorage.resize_

    def watched_resize(storage: torch.UntypedStorage, size: int) -> object:
        watch.resize(storage, size)
        return resize(storage, size)

    tolist = torch.Tensor.tolist

    def watched_tolist(tensor: torch.Tensor) -> object:
        watch.note_host_read(_asker())
        return tolist(tensor)

    def collective(real: Callable[..., object], operands: int) -> Callable[..., Work | None]:
        def call(*tensors: torch.Tensor, async_op: bool = False, **kwargs: object) -> Work | None:
            stream = device.current
            if async_op:
                stream = device.of_group(cast("dist.ProcessGroup", kwargs["group"]))
                stream.join(device.current.record_event())
            with watch.paused():
                real(*tensors, **kwargs)
            watch.use(stream, tensors[1:operands], tensors[:1], real.__name__)
            row_bytes = tensors[0].numel() * tensors[0].itemsize
            after = stream.clock.get("COMPUTE", 0)
            device.collectives.append(Collective(real.__name__, stream.name, row_bytes, after))
            return Work(device, stream.record_event()) if async_op else None

        return call

    names = {"all_reduce": 1, "all_to_all_single": 2, "all_gather_single": 2}
    names |= {"reduce_scatter_single": 2, "all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    with ExitStack() as patches:
        for name, operands in names.items():
            if hasattr(dist, name):
                real = getattr(dist, name)
                patches.enter_context(mock.patch.object(dist, name, collective(real, operands)))
        patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", watched_resize))
        patches.enter_context(mock.patch.object(torch.Tensor, "tolist", watched_tolist))
        patches.enter_context(watch)
        yield Simulation(device, watch)
