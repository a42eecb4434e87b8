"""Ranks that fall out of step say so by name, before their data gets mixed up.

All ranks of a process group must start the same collectives in the same order. A rank that skips
a unit which others run breaks that, and backends answer by waiting for ever, by ending the
process, or by mixing up what belongs to different units.

So each rank predicts its next collective from those before it: what came last time after the same
three. As long as ranks are in step they predict alike; the first difference between them is
therefore a surprise to at least one. A surprised rank starts nothing before all others have
announced the same in the store of the default process group. A rank that is not surprised starts
at once, and announces what it waits for only after `PATIENCE`. Training that repeats itself thus
costs a dictionary look-up per collective; the first step, and each change of course that all
ranks make together, costs one exchange through the store.

Only ranks without an accelerator are watched: elsewhere the host runs ahead of its collectives.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_core import torch_private
from fsdp_core.errors import DesyncError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]  # PyTorch does not list it

PATIENCE = timedelta(seconds=10)
"""How long a rank waits before it tells what it waits for, and between two looks at the others."""

_CONTEXT = 3
_REMEMBERED = 64
_MOST_PREDICTIONS = 10_000


@dataclass
class _Log:
    """What this rank has started in one process group.

    Attributes:
        generation: Tells groups apart that have had the same name.
        count: Collectives so far.
        last: The youngest of them, by number.
        predictions: What followed three collectives the last time.
        announced: Number of the youngest announcement that a surprise led to.
        told: Numbers of what was told for want of patience.
    """

    generation: int
    count: int = 0
    last: dict[int, str] = field(default_factory=dict)
    context: deque[str] = field(default_factory=lambda: deque(maxlen=_CONTEXT))
    predictions: dict[tuple[str, ...], str] = field(default_factory=dict)
    announced: int | None = None
    told: set[int] = field(default_factory=set)

    def add(self, what: str) -> bool:
        """Adds a collective; returns whether it was foreseen."""
        self.count += 1
        self.last[self.count] = what
        self.last.pop(self.count - _REMEMBERED, None)
        if len(self.predictions) > _MOST_PREDICTIONS:
            self.predictions.clear()  # on all ranks at once, for they know the same
        context = tuple(self.context)
        foreseen = self.predictions.get(context) == what
        self.predictions[context] = what
        self.context.append(what)
        return foreseen


_logs: WeakKeyDictionary[dist.ProcessGroup, _Log] = WeakKeyDictionary()


def keep_step(group: dist.ProcessGroup | None, device: torch.device, what: str) -> None:
    """Returns when this rank may start `what` as the next collective of `group`.

    Args:
        group: None for an axis of one rank, where nobody can be out of step.
        device: Of the collective's buffers.
        what: The same words on all ranks that are in step.

    Raises:
        DesyncError: Another rank starts something else.
    """
    if group is None or device.type != "cpu":
        return
    if group not in _logs:
        _logs[group] = _Log(_store().add(f"{_PREFIX}/{group.group_name}/{dist.get_rank()}", 1))
    log = _logs[group]
    if not log.add(what):
        _agree(group, log)


def wait_in_step(work: dist.Work, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Waits for a collective that was started after `keep_step`.

    Raises:
        DesyncError: Another rank wants to start something else.
    """
    if group is None or group not in _logs or device.type != "cpu":
        work.wait()
        return
    log = _logs[group]
    while True:
        began = monotonic()
        try:
            work.wait(PATIENCE)
        except RuntimeError as error:
            # A time-out leaves the collective running. Anything else has ended it, which not all
            # work objects know of themselves; but it does not take this long.
            if work.is_completed() or monotonic() - began < PATIENCE.total_seconds() / 2:
                raise
            _tell_and_look(group, log, error)
        else:
            _take_back(group, log)
            return


_PREFIX = "fsdp_core/collectives"


def _store() -> Store:
    return torch_private.default_store()


def _key(group: dist.ProcessGroup, log: _Log, rank: int, number: int) -> str:
    return f"{_PREFIX}/{group.group_name}/{log.generation}/{rank}/{number}"


def _others(group: dist.ProcessGroup) -> list[int]:
    return [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]


def _agree(group: dist.ProcessGroup, log: _Log) -> None:
    """Announces the youngest collective, and waits until all others have announced the same."""
    store, number, me = _store(), log.count, dist.get_rank()
    timeout = torch_private.timeout_of(store)
    store.set(_key(group, log, me, number), log.last[number])
    for rank in _others(group):
        key = _key(group, log, rank, number)
        try:
            store.wait([key], timeout)
        except dist.DistStoreError as error:
            raise DesyncError(
                f"Rank {rank} did not come to collective number {number}, the {log.last[number]}, "
                f"within {timeout}. See what it does, or whether it lives."
            ) from error
        _compare(log, number, rank, store.get(key).decode())
    if log.announced is not None:
        # Whoever announced this one has read that one.
        store.delete_key(_key(group, log, me, log.announced))
    log.announced = number


def _tell_and_look(group: dist.ProcessGroup, log: _Log, error: RuntimeError) -> None:
    """Tells what this rank has started, and looks whether some rank has announced otherwise."""
    store, me = _store(), dist.get_rank()
    for number, what in log.last.items():
        store.set(_key(group, log, me, number), what)
        log.told.add(number)
    for rank in _others(group):
        for number in log.last:
            key = _key(group, log, rank, number)
            if store.check([key]):
                _compare(log, number, rank, store.get(key).decode(), error)


def _take_back(group: dist.ProcessGroup, log: _Log) -> None:
    # Otherwise each wait for a slow rank would fill the store a little more. Who has not read it
    # yet waits until it is told again.
    for number in log.told - {log.announced}:
        _store().delete_key(_key(group, log, dist.get_rank(), number))
    log.told.clear()


def _compare(
    log: _Log, number: int, rank: int, theirs: str, cause: RuntimeError | None = None
) -> None:
    if (mine := log.last[number]) != theirs:
        raise DesyncError(
            f"Ranks ran different units: collective number {number} is the {mine} on rank "
            f"{dist.get_rank()}, but the {theirs} on rank {rank}. Run every unit on every rank, "
            "if need be on a part of the batch that counts nothing."
        ) from cause
