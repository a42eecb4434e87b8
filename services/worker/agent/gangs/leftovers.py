"""What an earlier agent of this node left: processes to kill, attempts whose end nobody told.

Their boards outlive them, and hold the steps that no beat has brought to Redis.
"""

import contextlib
import signal
from dataclasses import dataclass
from typing import Final

import psutil
import structlog

from services.contract.messages.board import BoardReader, BoardSnapshot
from services.contract.messages.facts import AGENT_DIED, GangEnded, RankExit
from services.contract.messages.telemetry import StepRecord
from services.contract.words.states import RankPhase
from services.worker.agent.host.folders import AttemptFolder, NodeFolder
from services.worker.agent.host.processes import marked, sweep
from services.worker.agent.telemetry.gang_telemetry import Records, step_record

_GONE_WITHIN_S: Final = 5.0
_UNKNOWN_PID: Final = 0
_log = structlog.get_logger()


@dataclass(frozen=True)
class Leftover:
    """An attempt that ended with the agent that watched it.

    Attributes:
        fact: How it ended.
        records: The last steps on its boards; Redis has some of them.
        telemetry_name: Under which Redis has them.
    """

    fact: GangEnded
    records: Records
    telemetry_name: str


def find_leftovers(folder: NodeFolder, node_id: str) -> list[Leftover]:
    """Kill what still lives, and answer how the unfinished attempts ended, from their boards.

    To be called by the only agent of the folder, before its first rank. Blocking.
    """
    killed = sweep(folder.mark)
    if killed:
        _log.warning("left_by_an_earlier_agent", pids=killed)
        psutil.wait_procs(marked(folder.mark), timeout=_GONE_WITHIN_S)
    leftovers = []
    for attempt in folder.unfinished():
        try:
            ended = _ended(attempt, node_id)
            leftovers.append(Leftover(ended, _steps(attempt), attempt.telemetry_name()))
        except ValueError as error:  # a rank made the folder: there is no such job or attempt
            _log.warning("no_attempt", folder=str(attempt.path), why=str(error))
    return leftovers


def forget_leftovers(folder: NodeFolder, leftovers: list[Leftover]) -> None:
    """Record that they were told, and free their boards. Blocking."""
    for leftover in leftovers:
        fact = leftover.fact
        try:
            folder.attempt(fact.job_id, fact.fence).close(fact)
        except OSError as error:  # the agent after this one tells it once more
            _log.error("end_not_recorded", job=fact.job_id, fence=fact.fence, why=str(error))
    folder.remove_boards()


def _ended(attempt: AttemptFolder, node_id: str) -> GangEnded:
    ranks = sorted(placement.rank for placement in attempt.placements())
    boards = {rank: _last_snapshot(attempt, rank) for rank in ranks}
    return GangEnded(
        job_id=attempt.job_id,
        fence=attempt.fence,
        node_id=node_id,
        exits=tuple(
            RankExit(
                rank=rank,
                pid=_UNKNOWN_PID,
                signal=int(signal.SIGKILL),
                order=order,
                step=max(0, boards[rank].step),
                phase=RankPhase(boards[rank].phase).name,
                error=AGENT_DIED,
            )
            for order, rank in enumerate(ranks)
        ),
        last_step=max((0, *(board.step for board in boards.values()))),
    )


def _steps(attempt: AttemptFolder) -> Records:
    steps: tuple[StepRecord, ...] = ()
    with contextlib.suppress(OSError, ValueError):
        reader = BoardReader.open(attempt.board(0))
        with contextlib.closing(reader):
            found = reader.steps_after(0)
            steps = tuple(step_record(entry, attempt.fence) for entry in found)
    return Records(attempt.job_id, attempt.fence, steps, logs=())


def _last_snapshot(attempt: AttemptFolder, rank: int) -> BoardSnapshot:
    nothing = BoardSnapshot(fence=attempt.fence)
    with contextlib.suppress(OSError, ValueError):
        reader = BoardReader.open(attempt.board(rank))
        with contextlib.closing(reader):
            return reader.read() or nothing
    return nothing
