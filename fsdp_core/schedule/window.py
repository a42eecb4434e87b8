"""How many collectives may be in flight at once."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


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
