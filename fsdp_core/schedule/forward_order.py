"""Which unit forward will need next: the one that followed last time."""

from __future__ import annotations


class ForwardOrder:
    """Predicts the order of pre-forwards from the previous pass.

    Prefetching by a wrong guess costs one all-gather and is never an error, and every rank
    guesses alike, because every rank saw the same passes. After the first unit that differs
    from the previous pass nothing more is predicted in this pass.
    """

    def __init__(self) -> None:
        self._previous: tuple[int, ...] = ()
        self._current: list[int] = []
        self._on_track = True

    def begin(self) -> None:
        """Starts a pass."""
        self._current = []
        self._on_track = True

    def enter(self, unit: int) -> int | None:
        """Notes that `unit` starts forward; returns the unit to prefetch, if one is foreseen."""
        position = len(self._current)
        self._current.append(unit)
        self._on_track = (
            self._on_track and position < len(self._previous) and self._previous[position] == unit
        )
        following = position + 1
        if not self._on_track or following >= len(self._previous):
            return None
        return self._previous[following]

    def end(self) -> None:
        """Ends a pass; it is what the next one is predicted from."""
        self._previous = tuple(self._current)
