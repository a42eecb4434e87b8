"""How the ranks of an ended gang ended, and which of them failed first.

What reaches an agent first is partly luck: when a rank dies, its peers see their connections
break before the kernel tells the parent. So failures are ordered by kind, then by arrival.
"""

import signal
from collections.abc import Mapping

from services.contract.messages.facts import ExitStanding, RankExit
from services.worker.agent.gangs.decisions import GangState, RankState
from services.worker.agent.telemetry.gang_telemetry import LastPhase


def exits(
    state: GangState, boards: Mapping[int, LastPhase], oom_kills: int = 0
) -> tuple[RankExit, ...]:
    """How every rank of an ended gang ended, in the order of failure.

    ``oom_kills``: how many processes the kernel killed for want of memory meanwhile.
    """
    ordered = sorted(state.ranks.values(), key=lambda rank: (standing(rank), rank.arrived or 0))
    return tuple(
        _exit(state, rank, boards[rank.rank], order, oom_kills)
        for order, rank in enumerate(ordered)
    )


def standing(rank: RankState) -> ExitStanding:
    """How the exit of an ended rank stands."""
    if rank.finished is not None:
        return ExitStanding.FINISHED
    if rank.failed is None and rank.killed and rank.signal == signal.SIGKILL:
        return ExitStanding.VICTIM
    return ExitStanding.ECHO if rank.echoes else ExitStanding.OWN_FAILURE


def _exit(
    state: GangState, rank: RankState, seen: LastPhase, order: int, oom_kills: int
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
        error=failed.error if failed is not None else _explanation(state, rank, oom_kills),
        error_types=failed.error_types if failed is not None else (),
        traceback=failed.traceback if failed is not None else None,
    )


def _explanation(state: GangState, rank: RankState, oom_kills: int) -> str | None:
    match standing(rank):
        case ExitStanding.FINISHED:
            return None
        case ExitStanding.VICTIM:
            return f"killed: {state.stopped or 'another rank of the gang failed'}"
        case _ if rank.signal == signal.SIGKILL and oom_kills:
            return (
                "ended by SIGKILL: the kernel killed it, for the node had no memory left; lower "
                "train.micro_batch, shard over more ranks, or limit jobs by resources.memory_gib"
            )
        case _ if rank.signal is not None:
            return f"ended by {_signal_name(rank.signal)}"
        case _:
            return f"left with exit code {rank.exit_code} before it had finished"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
