"""Which unit communicates next, and how many collectives may be in flight. Imports no torch."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ForwardOrder:
    """Predicts what is gathered next from the last pass with the same opener and the same first gather.

    Prefetching by a wrong guess costs one all-gather and is no error as long as every rank guesses
    alike. So a pass consists of the gathers in which all ranks of its opener take part. What some
    ranks run by themselves must not change what is guessed: units that are there already or come
    from fewer ranks, within a pass of all or as a pass of their own. After the first unit that
    differs from the previous pass nothing more is predicted in this pass.

    Of two passes of the root before a backward, as without gradients and then with them, the second
    finds the root's parameters whole, and begins with another gather: each is predicted from its like.
    """

    def __init__(self) -> None:
        self._previous_of: dict[tuple[int, int], tuple[int, ...]] = {}
        self._previous: tuple[int, ...] = ()
        self._opener = 0
        self._current: list[int] = []
        self._on_track = True

    def begin(self, opener: int) -> None:
        """Starts a pass, which begins with unit `opener`."""
        self._opener = opener
        self._current = []
        self._on_track = True

    def enter(self, unit: int) -> int | None:
        """Notes that `unit` is gathered; returns the unit to prefetch, if one is predicted."""
        position = len(self._current)
        if position == 0:
            self._previous = self._previous_of.get((self._opener, unit), ())
        previous = self._previous
        self._current.append(unit)
        self._on_track = self._on_track and position < len(previous) and previous[position] == unit
        following = position + 1
        if not self._on_track or following >= len(previous):
            return None
        return previous[following]

    def end(self) -> None:
        """Ends a pass; the next one like it is predicted from it, if anything was gathered.

        Nothing is where an earlier pass left all units whole, as between passes that accumulate
        gradients. Such a pass may be of some ranks alone.
        """
        if self._current:
            self._previous_of[self._opener, self._current[0]] = tuple(self._current)


class BackwardOrder:
    """The order of post-forwards, with multiplicity, read in reverse by backward.

    A unit may run forward several times before its backward; each run is one entry, and each
    pre-backward takes the unit's latest entry.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._positions: defaultdict[int, list[int]] = defaultdict(list)

    def record(self, unit: int) -> None:
        """Notes that `unit` finished a forward."""
        self._positions[unit].append(len(self._order))
        self._order.append(unit)

    def take(self, unit: int) -> int | None:
        """Unit to prefetch now that `unit` starts backward; None at the front or if unknown.

        Unknown are units of a second backward through one graph, whose entries are spent.
        """
        positions = self._positions[unit]
        if not positions:
            return None
        position = positions.pop()
        return self._order[position - 1] if position > 0 else None

    def __len__(self) -> int:
        return len(self._order)

    def clear(self) -> None:
        """Forgets the iteration."""
        self._order.clear()
        self._positions.clear()


class InFlightWindow(Generic[T]):
    """A first-in, first-out window of bounded length.

    Whoever wants to enter first takes out, and lands, as many of the oldest as `room_for_one`
    yields; so buffers of at most `capacity` collectives exist besides the one being packed.
    """

    def __init__(self, capacity: int = 1) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()

    def resize(self, capacity: int) -> None:
        """Changes the length; what is too much leaves with the next `room_for_one`."""
        self._capacity = capacity

    def room_for_one(self) -> list[T]:
        """Takes out the oldest items that must land before one more may enter."""
        return self._take(len(self._items) - self._capacity + 1)

    def admit(self, item: T) -> None:
        """Adds `item` as the youngest."""
        self._items.append(item)

    def drain(self) -> list[T]:
        """Takes out everything, oldest first."""
        return self._take(len(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def _take(self, count: int) -> list[T]:
        return [self._items.popleft() for _ in range(max(0, count))]
