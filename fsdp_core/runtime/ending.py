"""What the end of a backward ends: a rule without effects."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Ends(Protocol):
    """What the rule asks of a unit."""

    @property
    def is_in_forward(self) -> bool:
        """Whether its forward has begun and not ended."""

    @property
    def is_running(self) -> bool:
        """Whether a call of its modules goes on."""


U = TypeVar("U", bound=Ends)


@dataclass(frozen=True)
class Ending(Generic[U]):
    """What ends and what goes on when a backward has finished.

    Attributes:
        ended: Units whose iteration ends.
        going_on: Units whose forward is not over: a backward ran within it.
        left_out: The other units: the backward did not come through them.
        closes_pass: Whether the forward pass that is open, if any, is over too.
    """

    ended: tuple[U, ...]
    going_on: tuple[U, ...]
    left_out: tuple[U, ...]
    closes_pass: bool


def ending_of(
    units: Sequence[U], reached: Collection[U], opener: U | None, *, ends_all: bool
) -> Ending[U]:
    """Decides what a finished backward ends.

    One that came through the output of a unit's forward ends the iteration of all units. One that
    did not, as of a group's head that ran alone, ends that of the units it reached. A forward that
    is still running, whose own code went backward, goes on with all units that it has begun.

    Args:
        units: In the order in which they end.
        reached: Those in which gradients arrived.
        opener: The unit whose forward opened the pass that is not closed yet, if any.
        ends_all: Whether it came through the output of a unit's forward.
    """
    goes_on = opener is not None and opener.is_running
    going_on = tuple(unit for unit in units if goes_on and unit.is_in_forward)
    others = [unit for unit in units if unit not in going_on]
    ended = tuple(unit for unit in others if ends_all or unit in reached)
    left_out = tuple(unit for unit in others if unit not in ended)
    closes_pass = not goes_on and (ends_all or opener in reached)
    return Ending(ended, going_on, left_out, closes_pass=closes_pass)
