"""Tells the board where the rank is: the trainer's phases and the engine's states."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from fsdp_core import TrainingState
from services.contract.messages.board import MAX_GROUPS, BoardStep, BoardWriter
from services.contract.words.states import RankPhase
from services.worker.rank.loop.step_memory import StepMemory, step_memory

_PHASES: Final = {
    TrainingState.FORWARD: int(RankPhase.FORWARD),
    TrainingState.PRE_BACKWARD: int(RankPhase.PRE_BACKWARD),
    TrainingState.POST_BACKWARD: int(RankPhase.POST_BACKWARD),
}
_EVAL: Final = int(RankPhase.EVAL)


class BoardWatch:
    """An observer of the engine that stores each change on the board, on the training thread.

    Args:
        board: The rank's board.
        groups: Names of the groups whose collectives are counted, in the board's order.
        device: Whose memory is reported: of an accelerator what its allocator holds, else what
            this process has resident.

    Raises:
        ValueError: There are more groups than the board has places for.
    """

    def __init__(self, board: BoardWriter, groups: Sequence[str], device: torch.device) -> None:
        if len(groups) > MAX_GROUPS:
            raise ValueError(f"the board counts {MAX_GROUPS} groups, not {len(groups)}")
        self._board = board
        self._place = {group: place for place, group in enumerate(groups)}
        self._evaluates = False
        self._memory = step_memory(device)

    @property
    def memory(self) -> StepMemory:
        """What steps take."""
        return self._memory

    def enter(self, phase: RankPhase) -> None:
        """The trainer begins ``phase``, outside all units."""
        self._evaluates = phase is RankPhase.EVAL
        self._board.show(int(phase), None, time.monotonic_ns())

    def evaluate(self, part: int) -> None:
        """An evaluation of which nothing else is known has come to its ``part``, which moves the board."""
        self._board.show(_EVAL, part, time.monotonic_ns())

    def on_state(self, state: TrainingState, unit_index: int, unit_fqn: str) -> None:  # noqa: ARG002 (the engine's signature)
        """A unit entered ``state``. Its return to IDLE is not told: its parent computes on."""
        phase = _PHASES.get(state)
        if phase is not None:
            # A forward pass of an evaluation is evaluation to whoever looks from outside.
            shown = _EVAL if self._evaluates else phase
            self._board.show(shown, unit_index, time.monotonic_ns())

    def on_issue(self, group: str, sequence: int) -> None:
        """Collective ``sequence`` of ``group`` was started."""
        place = self._place.get(group)
        if place is not None:
            self._board.issue(place, sequence, time.monotonic_ns())

    def on_complete(self, group: str, sequence: int) -> None:
        """Collective ``sequence`` of ``group`` was waited for."""
        place = self._place.get(group)
        if place is not None:
            self._board.complete(place, sequence, time.monotonic_ns())

    def resume(self, step: int) -> None:
        """``step`` steps were made before this attempt."""
        now_ns = time.monotonic_ns()
        self._board.store(replace(self._board.snapshot, step=step, stored_ns=now_ns))

    def finish_step(self, step: BoardStep, copies: int = 0) -> None:
        """A step and its figures are known, but for memory and time.

        Args:
            step: They.
            copies: Bytes that checkpoints keep in the host's memory.
        """
        memory = self._memory.end_step(copies)
        self._board.finish_step(
            replace(step, memory_bytes=memory.held, ended_ms=time.time_ns() // 1_000_000),
            peak_bytes=memory.peak or 0,
            fragments_bytes=memory.fragments or 0,
            now_ns=time.monotonic_ns(),
        )
