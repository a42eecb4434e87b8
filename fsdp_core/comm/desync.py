"""Ranks that fall out of step say so by name, before their data gets mixed up.

All ranks of a process group must start the same collectives in the same order. A rank that skips
a unit which others run breaks that, and backends answer by waiting forever, by ending the
process, or by mixing up what belongs to different units.

So each rank predicts its next collective from those before it: what came last time after the same
three. As long as ranks are in step they predict alike; the first difference between them is
therefore a surprise to at least one. A surprised rank starts nothing before all others turn out
to be about to start the same, which takes a small reduction and a broadcast. A rank that is not surprised
starts at once; gloo keeps different kinds of collectives apart, so the two wait for each other.
Whoever has waited for `PATIENCE` tells in the store of the default process group what it has
started, and looks what others have told; the second time it logs whom it waits for. Training that repeats itself thus costs a dictionary
look-up per collective; the first step, and each change of course that all ranks make together,
costs 16 bytes to the first rank and back per collective.

Only collectives of gloo are watched: on an accelerator the host runs ahead of them.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from time import monotonic
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_core import torch_private
from fsdp_core.comm.waiter import TimedWork, Waiter
from fsdp_core.errors import DesyncError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store  # type: ignore[attr-defined]  # PyTorch does not list it

PATIENCE = timedelta(seconds=10)
"""How long a rank waits before it tells what it has started, and between two looks at others."""

_LOGGER = logging.getLogger("fsdp_core")
_CONTEXT = 3
_REMEMBERED = 64
_TOO_OLD = 4 * _REMEMBERED
_MOST_PREDICTIONS = 10_000
_LOOKS_BEFORE_LOGGING = 2  # by then all who wait for the same have told so


@dataclass
class _Log:
    """What this rank has started in one process group.

    Attributes:
        generation: Tells groups apart that have had the same name.
        count: Collectives so far.
        last: The youngest of them, by number.
        predictions: What followed three collectives the last time.
        surprises: Collectives that were not predicted.
        told: Numbers of those that this rank has told of.
        waiter: For works that take no time-out.
    """

    generation: int
    count: int = 0
    last: dict[int, str] = field(default_factory=dict)
    context: deque[int] = field(default_factory=lambda: deque(maxlen=_CONTEXT))
    predictions: dict[tuple[int, ...], int] = field(default_factory=dict)
    surprises: int = 0
    told: set[int] = field(default_factory=set)
    waiter: Waiter = field(default_factory=Waiter)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> _Log:
        """An empty one."""
        return cls(_store().add(f"{_PREFIX}/{group.group_name}/{dist.get_rank()}", 1))

    def add(self, what: str) -> bool:
        """Adds a collective; returns whether it was predicted."""
        self.count += 1
        self.last[self.count] = what
        self.last.pop(self.count - _REMEMBERED, None)
        if len(self.predictions) > _MOST_PREDICTIONS:
            self.predictions.clear()  # on all ranks at once, for they know the same
        # Of the words their hash: thousands of them may each name all parameters of a unit.
        known, context = hash(what), tuple(self.context)
        predicted = self.predictions.get(context) == known
        self.predictions[context] = known
        self.context.append(known)
        self.surprises += not predicted
        return predicted


_logs: WeakKeyDictionary[dist.ProcessGroup, _Log | None] = WeakKeyDictionary()
_UNKNOWN = _Log(0)


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
    if (log := _logs.get(group, _UNKNOWN)) is _UNKNOWN:
        # Asked once: PyTorch takes its time to tell.
        is_watched = "gloo" in dist.get_backend(group)
        log = _logs[group] = _Log.of(group) if is_watched else None
    if log is not None and not log.add(what):
        _agree(group, log)


@contextmanager
def in_step(group: dist.ProcessGroup | None, device: torch.device, what: str) -> Iterator[None]:
    """Within, this rank starts `what`, after `keep_step`.

    Where that raises, for want of memory for example, the others may have started it, and wait: they
    and this rank are to learn the difference.
    """
    keep_step(group, device, what)
    try:
        yield
    except BaseException:
        if group is not None and (log := _logs.get(group)) is not None:
            log.last[log.count] += ", which raised before it started"
            log.told.discard(log.count)
        raise


def amount(elements: int, dtype: torch.dtype) -> str:
    """What travels, for the words of a collective: gloo ends the process where ranks send messages of different lengths."""
    return f"{elements} elements of {str(dtype).removeprefix('torch.')}"


def with_time_out(work: dist.Work, group: dist.ProcessGroup, device: torch.device) -> dist.Work:
    """Has the work of a reduce-scatter of gloo, started after `keep_step`, take a time-out.

    Without, a rank that waits for one that others never start would neither tell nor learn of it.
    """
    log = _logs.get(group) if device.type == "cpu" else None
    # Another class, of the user's strategy for example, need not like another thread.
    return work if log is None or type(work) is not dist.Work else TimedWork(work, log.waiter)


def wait_in_step(work: dist.Work, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Waits for a collective that was started after `keep_step`.

    Raises:
        DesyncError: Another rank wants to start something else.
    """
    log = None if group is None or device.type != "cpu" else _logs.get(group)
    if group is None or log is None:
        work.wait()
        return
    _wait(work, group, log)


def _wait(work: dist.Work, group: dist.ProcessGroup, log: _Log) -> None:
    patience_lost = 0
    while True:
        started = monotonic()
        try:
            work.wait(PATIENCE)
        except RuntimeError as error:
            # A time-out leaves the collective running, which may end right now; anything else has
            # ended it, and then the next wait fails at once. The work object itself does not
            # always know.
            if monotonic() - started < PATIENCE.total_seconds() / 2:
                _look_after_failure(group, log, error)
                raise
            _tell(group, log)
            _look(group, log, error)
            patience_lost += 1
            if patience_lost == _LOOKS_BEFORE_LOGGING:
                _log_wait(group, log)
        else:
            return


def _look_after_failure(group: dist.ProcessGroup, log: _Log, error: RuntimeError) -> None:
    """A rank that ends for a difference that it has seen closes its connections, and this one may not have looked yet."""
    try:
        _tell(group, log)
        _look(group, log, error)
    except dist.DistError:
        return  # who keeps the store may be the one that has ended


def _log_wait(group: dist.ProcessGroup, log: _Log) -> None:
    behind = [r for r in _others(group) if not _store().check([_key(group, log, r, log.count)])]
    if behind:
        _LOGGER.warning(
            "Rank %d waits at collective number %d, the %s: ranks %s have not started it. A rank "
            "that raised, or took another branch, never will: see its log.",
            dist.get_rank(),
            log.count,
            log.last[log.count],
            behind,
        )


_PREFIX = "fsdp_core/collectives"


def _store() -> Store:
    return torch_private.default_store()


def _key(group: dist.ProcessGroup, log: _Log, rank: int, number: int) -> str:
    return f"{_PREFIX}/{group.group_name}/{log.generation}/{rank}/{number}"


def _agree(group: dist.ProcessGroup, log: _Log) -> None:
    """Returns when all ranks are about to start the youngest collective."""
    digest = int.from_bytes(sha256(log.last[log.count].encode()).digest()[:7], "big")
    # The largest and the smallest digest are the same exactly if all are.
    extremes = torch.tensor([digest, -digest])
    # By two kinds of collectives that the engine starts nowhere else. Gloo mixes up those of one kind, and a
    # rank that is not surprised may have started a reduce-scatter, which gloo does by an all-reduce.
    _wait(torch_private.uncounted_reduce(extremes, dist.ReduceOp.MAX, group), group, log)
    _wait(torch_private.uncounted_broadcast(extremes, group), group, log)
    largest, smallest = extremes.tolist()
    if largest != -smallest:
        _tell(group, log)
        others = [_key(group, log, rank, log.count) for rank in _others(group)]
        _store().wait(others, PATIENCE)  # all ranks have seen the same, and tell
        _look(group, log)


def _others(group: dist.ProcessGroup) -> list[int]:
    return [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]


def _tell(group: dist.ProcessGroup, log: _Log) -> None:
    me = dist.get_rank()
    for number in log.last.keys() - log.told:
        _store().set(_key(group, log, me, number), log.last[number])
        log.told.add(number)
    # Nobody can be so far behind that it still looks at these.
    for number in [n for n in log.told if n <= log.count - _TOO_OLD]:
        _store().delete_key(_key(group, log, me, number))
        log.told.discard(number)


def _look(group: dist.ProcessGroup, log: _Log, cause: RuntimeError | None = None) -> None:
    for rank in _others(group):
        for number, mine in log.last.items():
            key = _key(group, log, rank, number)
            if not _store().check([key]):
                continue
            if mine != (theirs := _store().get(key).decode()):
                raise DesyncError(
                    f"Ranks ran different units: collective number {number} is the {mine} on rank "
                    f"{dist.get_rank()}, but the {theirs} on rank {rank}. Run every unit on every "
                    "rank, if necessary on a part of the batch that does not count."
                ) from cause
