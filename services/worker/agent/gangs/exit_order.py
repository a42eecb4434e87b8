"""How the ranks of an ended gang ended, and which of them failed first.

What reaches an agent first is partly luck: when a rank dies, its peers see their connections
break before the kernel tells the parent. So failures are ordered by kind, then by arrival.
"""

import contextlib
import os
import re
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from services.contract.messages.facts import ExitStanding, RankExit
from services.contract.system.durable import open_plain
from services.contract.words.bounds import shortened, within_room
from services.worker.agent.gangs.state import GangState, RankState
from services.worker.agent.telemetry.gang_telemetry import LastPhase

_WORDS_BYTES: Final = 2 << 20
_BRIEF_CHARACTERS: Final = 256
# Before what the signal's handler writes of all threads.
_LAST_WORDS: Final = 1 << 18
# What C++ and libraries in C write before they abort for it.
_LACKED_MEMORY: Final = re.compile(rb"std::bad_alloc|[Cc]annot allocate memory|MemoryError")
_HELD: Final = (
    "the kernel does not let it end, and it keeps its memory and its device: does a storage or a device "
    "that it used not answer?"
)
# As Python tells of a thread that ends by an exception: the name, the traceback, the last line.
_LOST_THREAD: Final = re.compile(
    rb"^Exception in thread .*\n(?:[ \t].*\n|Traceback .*\n)*"
    rb"(?:MemoryError|.*(?:an(?:no|\')t allocate memory|not enough memory|an't start new thread|std::bad_alloc))",
    re.MULTILINE,
)


def exits(
    state: GangState,
    boards: Mapping[int, LastPhase],
    oom_kills: int = 0,
    lacked_memory: Collection[int] = (),
) -> tuple[RankExit, ...]:
    """How every rank of an ended gang ended, in the order of failure.

    Of those behind the first megabytes of words the error alone is told: a fact that is too long is not taken,
    and its gang would never end.

    ``oom_kills``: how many processes the kernel killed for want of memory meanwhile.
    ``lacked_memory``: the ranks that aborted because they were refused memory.
    """
    ordered = sorted(state.ranks.values(), key=lambda rank: (standing(rank), rank.arrived or 0))
    ended = (
        _exit(state, rank, boards[rank.rank], order, (oom_kills, rank.rank in lacked_memory))
        for order, rank in enumerate(ordered)
    )
    return within_room(ended, _WORDS_BYTES, _in_brief)


def _in_brief(ended: RankExit) -> RankExit:
    error = None if ended.error is None else shortened(ended.error, _BRIEF_CHARACTERS)
    return ended.model_copy(update={"error": error, "error_types": (), "traceback": None})


def aborted_for_memory(rank: RankState, log: Path) -> bool:
    """Whether the last words of a rank that aborted are that it was refused memory.

    Args:
        rank: One that has ended.
        log: What it wrote to stderr; its user code may have put anything in that place.
    """
    if rank.signal != signal.SIGABRT or rank.failed is not None:
        return False
    return _LACKED_MEMORY.search(_last_words(log)) is not None


def lost_thread(log: Path) -> bool:
    """Whether the last words of a rank that lives tell of a thread that was refused memory.

    Args:
        log: See ``aborted_for_memory``.
    """
    return _LOST_THREAD.search(_last_words(log)) is not None


def _last_words(log: Path) -> bytes:
    with contextlib.suppress(OSError), open(open_plain(log), "rb") as file:  # noqa: PTH123 a descriptor
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), _LAST_WORDS, max(size - _LAST_WORDS, 0))
    return b""


def standing(rank: RankState) -> ExitStanding:
    """How the exit of an ended rank stands."""
    if rank.finished is not None:
        return ExitStanding.FINISHED
    if rank.failed is None and rank.killed and rank.signal == signal.SIGKILL:
        return ExitStanding.VICTIM
    return ExitStanding.ECHO if rank.echoes else ExitStanding.OWN_FAILURE


def _exit(
    state: GangState, rank: RankState, seen: LastPhase, order: int, want: tuple[int, bool]
) -> RankExit:
    failed, finished = rank.failed, rank.finished
    return RankExit(
        rank=rank.rank,
        pid=rank.pid,
        exit_code=rank.exit_code,
        signal=rank.signal,
        order=order,
        standing=standing(rank),
        step=max(seen.step, 0),
        phase=seen.phase,
        finished=finished is not None,
        drained=finished is not None and finished.drained,
        early=None if finished is None else finished.early,
        error=failed.error if failed is not None else _explanation(state, rank, *want),
        error_types=failed.error_types if failed is not None else (),
        traceback=failed.traceback if failed is not None else None,
    )


def _explanation(
    state: GangState,
    rank: RankState,
    oom_kills: int,
    lacked_memory: bool,  # noqa: FBT001 a fact about that rank
) -> str | None:
    match standing(rank):
        case ExitStanding.FINISHED:
            return None
        case ExitStanding.VICTIM:
            held = f"; {_HELD}" if rank.held else ""
            return f"killed: {state.stopped or 'another rank of the gang failed'}{held}"
        case _ if rank.signal == signal.SIGKILL and oom_kills:
            return (
                "ended by SIGKILL: the kernel killed it, because the node was out of memory; lower "
                "train.micro_batch, shard over more ranks, or limit jobs by resources.memory_gib"
            )
        case _ if lacked_memory:
            return (
                "ended by SIGABRT: the system refused memory, and native code aborted; lower "
                "train.micro_batch, shard over more ranks, or raise resources.memory_gib"
            )
        case _ if rank.signal is not None:
            return f"ended by {_signal_name(rank.signal)}"
        case _:
            early = " before it had finished" if rank.exit_code == 0 else ""
            return f"exited with code {rank.exit_code}{early}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
