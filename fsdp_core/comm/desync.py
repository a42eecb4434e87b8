"""Ranks that have fallen out of step say so by name instead of waiting for ever.

All ranks of a process group must start the same collectives in the same order. A rank that skips
a unit which others run breaks that: the backend then waits, or mixes up what belongs to different
units, or raises something about sizes. So each rank remembers what it started last. One that has
waited for `PATIENCE`, or whose collective failed, publishes that in the store of the default
process group and compares it with what the others published; only a difference is an error, a
slow rank is none. Ranks that are in step pay a list entry per collective.

Only backends whose `wait` blocks the host can be watched so; on an accelerator the host runs ahead.
"""

from __future__ import annotations

import json
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

PATIENCE = timedelta(seconds=10)
"""How long a rank waits before it asks what the others are doing, and between two questions."""

_REMEMBERED = 256


@dataclass
class _Log:
    count: int = 0
    last: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


_logs: WeakKeyDictionary[dist.ProcessGroup, _Log] = WeakKeyDictionary()


def note(group: dist.ProcessGroup | None, what: str) -> None:
    """Remembers that this rank starts `what` as the next collective of `group`.

    Args:
        group: None for an axis of one rank, where nobody can be out of step.
        what: The same words on all ranks that are in step.
    """
    if group is not None:
        log = _logs.setdefault(group, _Log())
        log.count += 1
        log.last.append((log.count, what))


def wait_in_step(
    work: dist.Work,
    group: dist.ProcessGroup | None,
    device: torch.device,
    patience: timedelta | None = None,
) -> None:
    """Waits for a collective of `group` that this rank has noted.

    Args:
        work: Returned by the backend.
        group: In which it runs.
        device: Of its buffers.
        patience: Instead of `PATIENCE`.

    Raises:
        DesyncError: Another rank has started something else as the same number.
    """
    if group is None or device.type != "cpu":
        work.wait()
        return
    patience = PATIENCE if patience is None else patience
    while True:
        try:
            work.wait(patience)
        except RuntimeError as error:
            # A time-out leaves the collective running; anything else has ended it.
            has_failed = work.is_completed()
            _publish(group)
            _compare(group, patience if has_failed else timedelta(), error)
            if has_failed:
                raise
        else:
            return


def _key(group: dist.ProcessGroup, rank: int) -> str:
    return f"fsdp_core/last_collectives/{group.group_name}/{rank}"


def _publish(group: dist.ProcessGroup) -> None:
    last = list(_logs[group].last) if group in _logs else []
    torch_private.default_store().set(_key(group, dist.get_rank()), json.dumps(last))


def _compare(group: dist.ProcessGroup, patience: timedelta, error: RuntimeError) -> None:
    """Compares with every rank that has published, after giving them `patience` to do so."""
    store = torch_private.default_store()
    mine = dict(_logs[group].last) if group in _logs else {}
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    deadline = monotonic() + patience.total_seconds()
    for rank in others:
        key = _key(group, rank)
        left = timedelta(seconds=max(0.0, deadline - monotonic()))
        if not store.check([key]):
            if not left:
                continue
            try:
                store.wait([key], left)
            except dist.DistStoreError:
                continue
        theirs = dict(json.loads(store.get(key)))
        for number in sorted(mine.keys() & theirs.keys()):
            if mine[number] != theirs[number]:
                raise DesyncError(
                    f"Ranks ran different units: collective number {number} is the "
                    f"{mine[number]} on rank {dist.get_rank()}, but the {theirs[number]} on rank "
                    f"{rank}. Run every unit on every rank, on a part of the batch that counts "
                    "nothing if need be."
                ) from error
